# SPDX-License-Identifier: Apache-2.0
"""Requests as many clients send them: what says or changes nothing gives the plain request."""

import base64
import inspect
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

WHY = "pip install 'sparse-lavida-jax[serve]' openai to test the bodies of requests"
pytest.importorskip("fastapi", reason=WHY)
pytest.importorskip("python_multipart", reason=WHY)
openai = pytest.importorskip("openai", reason=WHY)

from fastapi.exceptions import RequestValidationError  # noqa: E402
from openai.resources.chat.completions import Completions  # noqa: E402
from openai.resources.images import Images  # noqa: E402

from sparse_lavida_jax.data.image_files import ImageError  # noqa: E402
from sparse_lavida_jax.prompting.request_errors import RequestError  # noqa: E402
from sparse_lavida_jax.server.openai import bodies, chat_endpoint  # noqa: E402
from sparse_lavida_jax.server.openai.bodies import ChatBody, ImageBody  # noqa: E402
from sparse_lavida_jax.server.serving import Service  # noqa: E402

URI = "data:image/png;base64," + base64.b64encode(b"an image of some kind").decode()
DRAW = {"prompt": "a red circle", "n": 2, "seed": 7, "steps": 12, "guidance_scale": 2}
ASK = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "how many?"},
                                     {"type": "image_url", "image_url": {"url": URI}}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "which colour?"},
    ],
    "n": 1, "seed": 7, "max_tokens": 64, "temperature": 1,
}  # fmt: skip
METHODS = ((Images.generate, ImageBody), (Images.edit, ImageBody), (Completions.create, ChatBody))
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
OF_FORMS = {"image", "mask", "markup"}  # files
# The defaults of OpenAI's API, and what other programs send by default.
DEFAULTS = {
    ImageBody: {
        "background": "auto", "frame_count": 1, "input_fidelity": "low", "model": "", "n": 1,
        "output_compression": 100, "output_format": "png", "partial_images": 0, "quality": "auto",
        "response_format": "b64_json", "size": "auto", "stream": False, "moderation": "auto",
        "negative_prompt": "", "user": "me", "lora": {}, "priority": 0,
    },
    ChatBody: {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False,
        "top_logprobs": 0, "modalities": ["text"], "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "service_tier": "auto", "store": False, "stop": [],
        "stream": False, "stream_options": {"include_usage": False}, "tool_choice": "auto",
        "tools": [], "top_p": 1, "verbosity": "medium", "metadata": {}, "n": 1,
        "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "best_of": 1, "echo": False,
        "ignore_eos": False, "chat_template_kwargs": {}, "skip_special_tokens": True,
        "guided_json": None, "stop_token_ids": [], "keep_alive": "5m", "cache_prompt": True,
        "thinking": {"type": "disabled"}, "prompt_cache_key": "a", "length_penalty": 1,
    },
}  # fmt: skip


def checked(kind, fields):
    """What a body amounts to, with the contents of its messages."""
    body = bodies.of_json(json.dumps(fields).encode(), kind).model_dump()
    messages, options = body.pop("messages", None), body.pop("stream_options", {})
    body["stream_options"] = {name for name in options if options[name]}
    return body, messages and chat_endpoint.talk_of(
        messages, lambda uri: Service.contents_of_uri(None, uri)
    )


def test_every_field_of_the_installed_client_is_decided():
    for method, kind in METHODS:
        names = inspect.signature(method).parameters.keys() - OF_THE_CLIENT - OF_FORMS
        undecided = names - kind.model_fields.keys() - bodies.PASSED_OVER - kind.neutral.keys()
        assert not undecided, (method, undecided)
        plain = {"prompt": "a"} if kind is ImageBody else {"messages": ASK["messages"]}
        said = [(name, value) for name in names - plain.keys() for value in (None, "")]
        said += [(name, []) for name in names & kind.neutral.keys()]
        for name, value in [*said, *DEFAULTS[kind].items()]:
            assert checked(kind, plain | {name: value}) == checked(kind, plain), (name, value)


@given(st.data())
def test_what_says_nothing_gives_the_plain_request(data):
    kind, plain = data.draw(st.sampled_from([(ImageBody, DRAW), (ChatBody, ASK)]))
    fields, silent = json.loads(json.dumps(plain)), st.sampled_from([None, ""])
    for name in data.draw(st.sets(st.sampled_from(sorted(kind.model_fields)))) - plain.keys():
        fields[name] = data.draw(silent)
    for name in data.draw(st.sets(st.sampled_from(sorted(DEFAULTS[kind])))) - plain.keys():
        fields[name] = DEFAULTS[kind][name]
    for name in data.draw(st.sets(st.sampled_from(sorted(fields)))):
        if type(fields[name]) is int:
            fields[name] = float(fields[name])
    if data.draw(st.booleans()):
        fields[data.draw(st.text(max_size=9).filter(lambda name: name not in fields))] = None
    for message in fields.get("messages", ()):
        message |= data.draw(
            st.dictionaries(
                st.sampled_from(["refusal", "audio", "annotations", "tool_calls", "function_call"]),
                st.sampled_from([None, [], ""]),
            )
        )
        if isinstance(message["content"], str) and data.draw(st.booleans()):
            message["content"] = [{"type": "text", "text": message["content"], "image_url": None}]
        elif isinstance(message["content"], list):
            uri = data.draw(st.sampled_from([URI, "DATA:image/PNG;x=y;Base64," + URI[22:]]))
            shown = data.draw(st.sampled_from([uri, {"url": uri, "detail": "auto", "x": None}]))
            message["content"][1]["image_url"] = shown
            message["content"].insert(data.draw(st.integers(0, 2)), None)
    sent = json.dumps(fields, ensure_ascii=data.draw(st.booleans()))
    if data.draw(st.booleans()):
        sent = sent.replace("data:image/png", "data:image\\/png")
    mark = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\r\n\t "]))
    found = bodies.of_json(mark + sent.encode("utf-8", "surrogatepass"), kind)
    assert checked(kind, plain) == checked(kind, found.model_dump())


@pytest.mark.parametrize(
    ("seed", "taken"),
    [(0, 0), (7.0, 7), ("7", 7), (2**31, 2**31), (2**64 - 1, 2**64 - 1), (-1, ...), (None, None),
     (-2, ...), (2**64, ...), (7.5, ...), (True, ...), ("x", ...), ([7], ...), ({"a": 1}, ...)],
)  # fmt: skip
def test_a_seed_has_64_bits(seed, taken):
    try:
        assert bodies.checked({"prompt": "a", "seed": seed}, ImageBody).seed == taken
    except RequestValidationError as error:
        assert taken is ..., error


@pytest.mark.parametrize("name", ["n", "steps", "registers", "temperature", "guidance", "quality"])
def test_true_and_what_is_empty_but_no_text_are_not_numbers(name):
    for value in (True, False, [], {}):
        with pytest.raises(RequestValidationError, match=name):
            bodies.checked({"prompt": "a", name: value}, ImageBody)


@pytest.mark.parametrize(
    "fields",
    [{"web_search_options": {}}, {"tools": [{}]}, {"stop": ["a"]}, {"top_k": 40}, {"min_p": 0.1},
     {"repetition_penalty": 1.1}, {"echo": True}, {"chat_template_kwargs": {"add_bos": True}},
     {"images": ["x"]}, {"max_output_tokens": 5}, {"logit_bias": {"5": 1}}],
)  # fmt: skip
def test_what_would_change_an_answer_is_refused(fields):
    with pytest.raises(RequestValidationError, match=next(iter(fields))):
        bodies.checked(ASK | fields, ChatBody)


def talk(*messages):
    return chat_endpoint.talk_of([*messages], lambda uri: Service.contents_of_uri(None, uri))


def test_texts_that_are_empty_or_null_count_as_left_out():
    user, plain = {"role": "user", "content": "a"}, talk({"role": "user", "content": "a"})
    empty = ("", [], [{"type": "text", "text": ""}])
    for content in empty:
        assert talk({"role": "system", "content": content}, user) == plain
        assert talk({"role": "user", "content": content}, user) == plain
    assert talk({"role": "system"}, user) == plain
    silent = {"role": "assistant", "refusal": "", "annotations": [], "name": "b"}
    assert talk(user, silent, user).earlier == (("a", ""),)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": "a", "images": ["x"]}, "a message has no field 'images'"),
        ({"role": "assistant", "content": "a", "refusal": "no"}, "has no field 'refusal'"),
        ({"content": "a"}, "a message of '' is not known"),
        ({"role": "user", "content": 5}, "must be a text, or a list of parts"),
        ({"role": "user", "content": [{"type": "text"}]}, "of type 'text' is not known, or empty"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "is not known, or empty"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"min_pixels": 9}}]},
         "a part has no field 'min_pixels'"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "x"}]},
         "has no field 'file_id'"),
    ],
)  # fmt: skip
def test_what_a_message_cannot_hold_is_refused(message, told):
    with pytest.raises(RequestError, match=told):
        talk(message, {"role": "user", "content": "b"})


def test_an_image_is_base64_as_browsers_take_it():
    contents = bytes(range(256)) + b"\xfb\xff"  # with + and / in base64
    plain = base64.b64encode(contents).decode()
    lines = "\r\n".join(plain[i : i + 76] for i in range(0, len(plain), 76))
    heads = ("data:image/png", "DATA:image/png", "Data:IMAGE/PNG;charset=UTF-8;name=a b")
    payloads = (plain, lines, plain.rstrip("="), f" {plain}\n")
    for head, code, payload in itertools.product(heads, ("base64", "BASE64"), payloads):
        assert Service.contents_of_uri(None, f"{head};{code},{payload}") == contents
    url_safe = base64.urlsafe_b64encode(contents).decode()
    other = f"data:application/octet-stream;base64,{plain}"
    for wrong in (f"{heads[0]},{plain}", "HTTP://a/b.png", URI[5:], other):
        with pytest.raises(ImageError, match="is not fetched"):
            Service.contents_of_uri(None, wrong)
    for wrong in (url_safe, "A", "\ud800", "\u0661\u0661\u0661\u0661", "%2B%2B%2B%2B"):
        with pytest.raises(ImageError, match="is not base64"):
            Service.contents_of_uri(None, f"{heads[0]};base64,{wrong}")
