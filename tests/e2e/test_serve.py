# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client draws, edits and asks on loopback; refusals are one sentence."""

import base64
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import staged
import stand_ins
from PIL import Image

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.scenes import tasks, world

WHY = "pip install 'sparse-lavida-jax[serve]' openai to test the server"
pytest.importorskip("fastapi", reason=WHY)
pytest.importorskip("prometheus_client", reason=WHY)
httpx = pytest.importorskip("httpx2", reason=WHY)
openai = pytest.importorskip("openai", reason=WHY)

from serving_on_loopback import served  # noqa: E402

from benchmarks import serving as load  # noqa: E402
from sparse_lavida_jax.cli import hosting  # noqa: E402
from sparse_lavida_jax.pipeline import SparseLaViDa  # noqa: E402
from sparse_lavida_jax.server import endpoints  # noqa: E402
from sparse_lavida_jax.server.openai import asking  # noqa: E402
from sparse_lavida_jax.server.serving import Limits, Service  # noqa: E402

PROMPT = "a red circle above a blue square"
QUICK = {"num_inference_steps": 2, "seed": 3}
slow_test = pytest.mark.skipif(
    os.environ.get("SPARSE_LAVIDA_FULL_TESTS") != "1",
    reason="takes seconds more: set SPARSE_LAVIDA_FULL_TESTS=1",
)


@pytest.fixture(scope="module")
def service(every_task):
    pipe = SparseLaViDa.from_pretrained(every_task)
    pipe = pipe.with_sampling(dataclasses.replace(pipe.settings.sampling, layout=False))
    return Service(pipe, Limits(upload=200_000))


@pytest.fixture(scope="module")
def address(service):
    with served(lambda host, port: endpoints.make_app(service, (host,))) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def shown():
    return world.render(tasks.sample("edit", 0, 0).image)


def png(pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pixels(reply):
    contents = [base64.b64decode(one.b64_json) for one in reply.data]
    return [np.array(Image.open(io.BytesIO(one)).convert("RGB")) for one in contents]


def test_images_are_those_that_python_draws_and_say_how(client, service, tmp_path):
    reply = client.images.generate(
        prompt=PROMPT, n=2, size="96x96", model="tiny", response_format="b64_json", extra_body=QUICK
    )
    assert [one.shape for one in pixels(reply)] == [(96, 96, 3)] * 2
    notes = reply.sparse_lavida
    assert notes["seeds"] == [3, 4]
    assert notes["tokens_passed"] > 0
    assert notes["warnings"] == []
    wanted = service.pipe.generate(PROMPT, num_images=2, seed=3, steps=2)
    np.testing.assert_array_equal(pixels(reply), wanted.pixels)
    (tmp_path / "a.png").write_bytes(base64.b64decode(reply.data[1].b64_json))
    record = image_files.read_record(tmp_path / "a.png")
    assert (record["checkpoint"]["name"], record["bucket"]["rows"]) == ("tiny", 2)
    np.testing.assert_array_equal(service.pipe.replay(record).pixels[0], wanted.pixels[1])


def test_an_image_is_branched_from_its_png_and_nothing_it_names_is_read(address, service, shown):
    drawn = service.pipe.generate(PROMPT, seed=3, steps=2)
    own = image_files.encoded(drawn.pixels[0], record=drawn.records[0])
    fields, url = {"at": "image:1", "n": "2", "seed": "9"}, f"{address}/v1/images/branches"
    reply = httpx.post(url, data=fields, files={"image": own}, timeout=120)
    assert reply.status_code == 200, reply.text
    made = [base64.b64decode(one["b64_json"]) for one in reply.json()["data"]]
    wanted = service.pipe.branch(drawn, "image:1", num_images=2, seed=9)
    assert [image_files.record_in(one)["turns"] for one in made] == [
        [["image", 1, 9]],
        [["image", 1, 10]],
    ]
    for contents, pixels_of_one in zip(made, wanted.pixels, strict=True):
        np.testing.assert_array_equal(image_files.read_bytes(contents), pixels_of_one)
    assert reply.json()["sparse_lavida"]["tokens_passed"] == wanted.tokens_passed
    edited = service.pipe.edit(shown, "remove it", seed=3, steps=2)
    named = edited.records[0] | {"picture": edited.records[0]["picture"] | {"path": "/etc/passwd"}}
    contents = image_files.encoded(edited.pixels[0], record=named)
    refused = {
        "it was drawn after another image": {"files": {"image": contents}},
        "branches are drawn as their image was": {
            "files": {"image": own}, "data": fields | {"steps": "4"},
        },
        "n: Input should be less than or equal to 10": {
            "files": {"image": own}, "data": {"n": "11"},
        },
        "at='image:7' is out of range: image:0 to image:1": {
            "files": {"image": own}, "data": {"at": "image:7"},
        },
        "does not say how it was drawn": {"files": {"image": png(shown)}},
        "drawn by another checkpoint": {
            "files": {"image": image_files.encoded(
                drawn.pixels[0], record=drawn.records[0] | {"checkpoint": {"sha256": "ab"}}
            )},
        },
    }  # fmt: skip
    for told, asked in refused.items():
        reply = httpx.post(url, timeout=120, **asked)
        assert (reply.status_code, told in reply.text) == (400, True), reply.text
    source = {"image": contents, "source": png(shown)}
    reply = httpx.post(url, data={"at": "image:1"}, files=source, timeout=120)
    assert reply.status_code == 200, reply.text


SCORES = ("surprise", "proofs")


def refused(url, **sent):
    """The error of a form that must be refused in one sentence."""
    reply = httpx.post(url, timeout=120, **sent)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"].endswith(".")
    return error


def test_captions_are_ranked_by_the_bits_of_an_image(address, service, shown):
    captions, url = ["two blue squares", PROMPT, "a red circle"], f"{address}/v1/images/surprise"
    sent = {"captions": "\r\n".join([*captions, " "]), "model": "tiny"}
    reply = httpx.post(url, data=sent, files={"image": png(shown)}, timeout=120)
    assert reply.status_code == 200, reply.text
    said, wanted = reply.json(), service.pipe.surprise(shown, captions)
    notes, written = said.pop("sparse_lavida"), wanted.as_json()
    assert said.pop("created") > 0
    assert [one.pop("index") for one in said["captions"]] == wanted.ranked
    assert said == written
    assert (notes["tokens_passed"], notes["batch"]) == (wanted.tokens_passed, 3)
    assert notes["warnings"] == [] and notes["seconds"] > 0
    assert service.counts["surprise", "done"] == 1
    assert service.tokens["surprise"] == wanted.tokens_passed


@pytest.mark.parametrize(
    ("data", "told", "param"),
    [
        ({}, "captions: Field required", "captions"),
        ({"captions": " \n\n"}, "0 captions were sent: 1 to 8", "captions"),
        ({"captions": "a\n" * 9}, "9 captions were sent: 1 to 8 can be compared", "captions"),
        ({"captions": "a" * 5000}, "5000 characters: at most 4000", "captions"),
        ({"captions": "a", "seed": "3"}, "seed: nothing is drawn", "seed"),
        ({"captions": "a", "stream": "true"}, "stream: nothing is drawn", "stream"),
        ({"captions": "a", "plans": "64"}, "plans: there is no such field", None),
    ],
)
def test_captions_that_are_not_taken(address, shown, data, told, param):
    error = refused(f"{address}/v1/images/surprise", data=data, files={"image": png(shown)})
    assert told in error["message"]
    assert error["param"] == param or param is None


@pytest.mark.parametrize("name", SCORES)
def test_what_is_not_an_image_is_not_scored(address, shown, name):
    url, data = f"{address}/v1/images/{name}", {"captions": "a"} if name == "surprise" else {}
    wide = png(np.zeros((1, 17_000, 3), np.uint8))
    for files, told in (
        ({"image": b"junk"}, "is not an image"),
        ({"image": wide}, "17000"),
        ({"image": b"\0" * 300_000}, "at most 200000 are taken"),
        ({"mask": png(shown)}, "named image"),
        ([("image", png(shown)), ("image", png(shown))], "named image"),
    ):
        assert told in refused(url, data=data, files=files)["message"]
    assert "multipart/form-data" in refused(url, json=data)["message"]


@pytest.fixture(scope="module")
def drawn(service):
    return service.pipe.generate(PROMPT, seed=3, steps=2)


def of_record(drawn, **changes):
    return image_files.encoded(drawn.pixels[0], record=drawn.records[0] | changes)


def test_an_image_is_proved_from_its_png(address, service, drawn, shown):
    url = f"{address}/v1/images/proofs"
    reply = httpx.post(url, files={"image": of_record(drawn)}, timeout=120)
    assert reply.status_code == 200, reply.text
    said, (wanted,) = reply.json(), service.pipe.prove(drawn)
    notes = said.pop("sparse_lavida")
    assert said["created"] > 0 and said["passes"] == 1 and said["lines"] == wanted.lines
    assert said == said | json.loads(json.dumps(wanted.as_json())) and said["follows"]
    assert notes["tokens_passed"] == wanted.tokens_passed > 36
    codes = [list(one) for one in drawn.records[0]["codes"]]
    codes[7][0] = (codes[7][0] + 1) % 64
    reply = httpx.post(url, files={"image": of_record(drawn, codes=codes)}, timeout=120).json()
    assert not reply["follows"] and 7 in reply["image"]["places"] + reply["pixels"]
    assert reply["image"]["wrong"] and reply["lines"][-1] == "it was not drawn so"
    other = drawn.pixels[0].copy()
    other[20, 40] = 255 - other[20, 40]
    changed = image_files.encoded(other, record=drawn.records[0])
    reply = httpx.post(url, files={"image": changed}, timeout=120).json()
    assert (reply["pixels"], reply["image"]["wrong"], reply["follows"]) == ([1 * 6 + 2], 0, False)
    edited = service.pipe.edit(shown, "remove it", seed=3, steps=2)
    sent = {"image": of_record(edited), "source": png(shown)}
    reply = httpx.post(url, files=sent, timeout=120)
    assert reply.status_code == 200 and reply.json()["follows"], reply.text
    assert service.counts["proof", "done"] == 4


def test_records_of_strangers_are_not_followed(address, service, drawn, shown):
    """Nothing that a record names is opened, and it cannot ask for more than the model can do."""
    edited = service.pipe.edit(shown, "remove it", seed=3, steps=2)
    named = {"picture": edited.records[0]["picture"] | {"path": "/etc/passwd"}}
    sampling, recipe = (drawn.records[0][name] for name in ("sampling", "recipe"))
    large = np.zeros((400, 400, 3), np.uint8)
    told = {
        "does not say how it was drawn": png(shown),
        "it was drawn after another image": of_record(edited, **named),
        "drawn by another checkpoint": of_record(drawn, checkpoint={"sha256": "ab"}),
        "has format 'junk'": of_record(drawn, format="junk"),
        "before records held codes": of_record(drawn, codes=None),
        "its codes are not": of_record(drawn, codes=[[1]] * 9),
        "the record of how it was drawn is damaged": of_record(drawn, turns="x"),
        "a list of codes": of_record(drawn, codes={"a": 1}),
        "steps=1000 is more than": of_record(drawn, sampling=sampling | {"num_steps": 1000}),
        "cannot be drawn": of_record(drawn, recipe=recipe | {"size": [9999, 16]}),
        "at most 4000": of_record(drawn, prompt="a" * 5000),
        "draws at most 96 a side": image_files.encoded(large, record=drawn.records[0]),
    }
    for sentence, contents in told.items():
        message = refused(f"{address}/v1/images/proofs", files={"image": contents})["message"]
        assert sentence in message
    wrong = {"image": of_record(edited), "source": png(255 - shown)}
    message = refused(f"{address}/v1/images/proofs", files=wrong)["message"]
    assert "is not the image that it was drawn after" in message
    # Kernels that a record names are not loaded; turns after the last step of its plan do nothing.
    turns = [["image", step, step] for step in range(60)]
    odd = of_record(drawn, attention="pallas_tpu", turns=turns)
    reply = httpx.post(f"{address}/v1/images/proofs", files={"image": odd}, timeout=120)
    assert reply.status_code == 200, reply.text
    sent = {"data": {"seed": "1"}, "files": {"image": of_record(drawn)}}
    assert refused(f"{address}/v1/images/proofs", **sent)["param"] == "seed"


def test_the_best_of_several_counts_as_so_many_images(address, service):
    url, asked = f"{address}/v1/images/generations", {"prompt": PROMPT, "best_of": 2, **QUICK}
    reply = httpx.post(url, json=asked, timeout=120).json()
    wanted = service.pipe.generate(PROMPT, best_of=2, seed=3, steps=2)
    assert reply["sparse_lavida"]["tries"] == list(wanted.tries)
    made = base64.b64decode(reply["data"][0]["b64_json"])
    np.testing.assert_array_equal(image_files.read_bytes(made), wanted.pixels[0])
    reply = httpx.post(url, json=asked | {"n": 6}, timeout=120)
    told = "6 images, each the best of 2, are up to 12: at most 10 are drawn"
    assert (reply.status_code, told in reply.text) == (400, True), reply.text
    edit = {"prompt": "remove it", "best_of": "2"}
    files = {"image": png(wanted.pixels[0])}
    reply = httpx.post(f"{address}/v1/images/edits", data=edit, files=files, timeout=120)
    assert "edit takes no best_of here" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "best_of"


@slow_test
def test_a_mask_is_transparent_where_it_is_drawn(client, service, shown):
    holed = np.dstack([shown, np.full(shown.shape[:2], 255, np.uint8)])
    holed[:16, :16, 3] = 0  # one cell
    reply = client.images.edit(
        image=("a.png", png(shown)), mask=("m.png", png(holed)), prompt=PROMPT, extra_body=QUICK
    )
    codes = [service.pipe.codec.encode(one[None])[0] for one in (shown, pixels(reply)[0])]
    np.testing.assert_array_equal(codes[0][1:], codes[1][1:])
    reply = client.images.edit(image=("a.png", png(shown)), prompt="remove it", extra_body=QUICK)
    assert pixels(reply)[0].shape == (96, 96, 3)


def test_a_question_about_an_image_is_answered(client, shown, service):
    uri = f"data:image/png;base64,{base64.b64encode(png(shown)).decode()}"
    content = [
        {"type": "text", "text": "how many squares are there?"},
        {"type": "image_url", "image_url": {"url": uri}},
    ]
    reply = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], seed=1, max_tokens=8
    )
    wanted = service.pipe.ask(shown, content[0]["text"], seed=1, max_new_tokens=8)
    assert reply.choices[0].message.content == wanted.text
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_a_request_of_many_quirks_gives_the_answer_of_the_plain_one(address, shown):
    """One real run for each task; `test_client_bodies.py` has the quirks."""
    uri = f"data:image/png;base64,{base64.b64encode(png(shown)).decode()}"
    part = {"type": "image_url", "image_url": {"url": uri}}
    asked = {"messages": [{"role": "user", "content": [SAID, part]}], "max_tokens": 8, "seed": 1}
    odd = {"role": "user", "name": "a", "refusal": None, "content": [
        None, {"type": "input_text", "text": "why?"},
        {"type": "image_url", "image_url": uri.replace("data:", "DATA:").replace("=", "")},
    ]}  # fmt: skip
    drawn = {"prompt": PROMPT, **QUICK}
    cases = [
        ("chat/completions", asked, asked | {"messages": [odd], "max_tokens": 8.0, "stop": ""}),
        ("images/generations", drawn, drawn | {"n": 1.0, "seed": 3.0, "style": None, "lora": []}),
    ]
    for path, plain, other in cases:
        sent = [json.dumps(plain).encode(), b"\xef\xbb\xbf" + json.dumps(other).encode()]
        replies = [httpx.post(f"{address}/v1/{path}", content=one, timeout=120) for one in sent]
        first, second = [reply.json().get("choices", reply.json().get("data")) for reply in replies]
        assert first == second is not None, replies[1].text


def test_an_answer_without_an_end_fills_the_limit_and_says_length(client, service, monkeypatch):
    limits = dataclasses.replace(service.limits, new_tokens=16)
    monkeypatch.setattr(service, "limits", limits)
    monkeypatch.setattr(type(service.pipe.prompts), "ends", lambda _: {-1})
    reply = client.chat.completions.create(model="tiny", **user(SAID), max_tokens=4096, seed=1)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 16


def test_a_mask_that_is_opaque_and_white_is_as_one_without_transparency(address, shown):
    white = np.zeros((96, 96), np.uint8)
    white[:40, :40] = 255
    canvas = np.dstack([white, white, white, np.full_like(white, 255)])  # as canvas.toBlob has it
    replies = []
    for mask in (white, canvas):
        files = {"image": ("a.png", png(shown)), "mask": ("m.png", png(mask))}
        fields = {"prompt": PROMPT, **QUICK, "n": "", "size": ""}
        url = f"{address}/v1/images/edits"
        replies.append(httpx.post(url, data=fields, files=files, timeout=120))
    assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
    assert replies[0].json()["data"] == replies[1].json()["data"]


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def message(role, content):
    return {"messages": [{"role": role, "content": content}]}


SAID = {"type": "text", "text": "why?"}
IMAGE_THERE = {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}
NO_IMAGE_URI = {"type": "image_url", "image_url": "data:image/png;base64,"}
# Of each path: fields that are added to a valid request, or replace its own.
REFUSED = {
    "images/generations": [
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": None}, "prompt: Field required"),
        ({"prompt": "a" * 4001}, "4001 characters: at most 4000"),
        ({"prompt": 3}, "prompt: Input should be a valid string"),
        ({"prompt": "\ud800"}, "is half a character"),
        ({"n": 11}, "n: Input should be less than or equal"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": True}, "n: "),
        ({"size": "big"}, "size='big' must be such as"),
        ({"size": "7x7"}, "7x7 cannot be drawn"),
        ({"size": "7x96"}, "size=7x96 cannot be drawn"),
        ({"size": "1" * 5000 + "x8"}, "size='11111111111111111111' must be such as 512x512"),
        ({"size": "\u0663x8"}, "must be such as 512x512"),
        ({"steps": 99}, "steps=99 is more than there are"),
        ({"num_inference_steps": 99}, "num_inference_steps=99 is more than there are"),
        ({"num_inference_steps": 0}, "num_inference_steps: Input should be"),
        ({"num_inference_steps": 10**9}, "num_inference_steps: Input should be less"),
        ({"sampler": "x"}, "choose one of dense, none"),
        ({"seed": -1}, "seed: Input should be"),
        ({"seed": 2**64}, "seed: Input should be"),
        ({"response_format": "url"}, "come as b64_json"),
        ({"model": "dall-e-3"}, "there is no model"),
        ({"style": "vivid"}, "style is not supported: leave it out."),
        ({"background": "transparent"}, 'background is not supported: leave it out, or say "auto"'),
        ({"negative_prompt": "hands"}, "negative_prompt is not supported"),
        ({"input_fidelity": "high"}, "input_fidelity is not supported"),
        ({"lora": "x"}, "lora: there is no such field here, and it might change the result"),
        ({"quality": "hd"}, "quality: Input should be 'auto', 'low', 'medium' or 'high'"),
        ({"output_format": "gif"}, "output_format: Input should be"),
        ({"output_compression": 50}, "output_compression requires output_format=jpeg or webp"),
        ({"partial_images": 2}, "partial_images requires stream=true"),
        ({"stream": True, "partial_images": 4}, "partial_images: Input should be less"),
        ({"stream": True, "n": 2}, "a stream is of one image"),
        ({"guidance_scale": 1e308}, "guidance_scale: Input should be less than or equal to 100"),
        ({"guidance_scale": -1}, "guidance_scale: Input should be greater"),
        ({"temperature": -1}, "temperature: Input should be greater"),
        ({"registers": 10**9}, "registers: Input should be less than or equal to 1024"),
    ],
    "images/edits": [({"prompt": "a"}, "send multipart/form-data")],
    "chat/completions": [
        (user(IMAGE_THERE), "is not fetched: send the image itself"),
        (user({"type": "audio"}), "a part of type 'audio' is not known"),
        (user("a"), "must be a text, or a list of parts"),
        (user({"type": "image_url", "image_url": "a.png"}), "is not fetched"),
        ({"num_inference_steps": 99}, "num_inference_steps=99"),
        ({"registers": 99}, "registers=99 is more than"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        (message("user", ""), "the prompt is empty"),
        (message("assistant", "a"), "begins and ends with a message of the user"),
        (message("tool", "a"), "a message of 'tool' is not known"),
        (message("system", [NO_IMAGE_URI] * 2), "only users may"),
        ({"messages": message("user", "a")["messages"] * 257},
         "messages: List should have at most 256"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"logprobs": True}, "logprobs is not supported: leave it out, or say false"),
        ({"stop": ["."]}, "stop is not supported"),
        ({"stop": "a"}, "stop is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range: 1 to 1024"),
        ({"max_completion_tokens": 0}, "max_completion_tokens=0 is out of range"),
        ({"top_p": 0}, "top_p: Input should be greater than 0"),
        ({"stream_options": {"include_usage": True}}, "stream_options requires stream=true"),
        ({"task": "ground"}, "things are found in one image"),
        ({"task": "ground", "stream": True}, "boxes come whole"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [(path, *case) for path, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_is_refused_in_a_sentence_that_names_the_field(address, path, asked, told):
    plain = user(SAID) if path == "chat/completions" else {"prompt": "a"}
    reply = httpx.post(f"{address}/v1/{path}", content=json.dumps(plain | asked))
    error = reply.json()["error"]
    assert reply.status_code == (404 if "model" in asked else 400), reply.text
    assert told in error["message"]
    assert error["type"] == "invalid_request_error"
    if path == "images/generations":
        assert error["param"] == (None if "model" in asked else [*asked][-1])
    elif path == "chat/completions":  # with a task, its messages may be at fault
        assert error["param"] in ({*asked, "messages"} if "task" in asked else asked)


def test_broken_and_large_uploads_are_refused(client, address, service):
    with pytest.raises(openai.BadRequestError, match="the image is not an image that can be read"):
        client.images.edit(image=("a.png", b"not an image"), prompt="a")
    with pytest.raises(openai.BadRequestError, match="at most one file named mask"):
        client.images.edit(image=("a.png", b"x"), prompt="a", extra_body={"mask": "iVBORw0KGgo="})
    with pytest.raises(openai.BadRequestError, match="has 200001 bytes: at most 200000"):
        client.images.edit(image=("a.png", bytes(200_001)), prompt="a")
    reply = httpx.post(f"{address}/v1/images/generations", content=bytes(3_000_000))
    assert reply.status_code == 413


def test_only_its_own_names_are_answered_to(address):
    assert httpx.get(f"{address}/healthz").json()["status"] == "ok"
    reply = httpx.get(f"{address}/healthz", headers={"host": "rebound.example"})
    assert reply.status_code == 400


@slow_test
def test_the_command_serves_until_it_is_interrupted(tmp_path):
    folder = stand_ins.model_of_every_task(tmp_path / "tiny")
    words = [sys.executable, "-m", "sparse_lavida_jax", "serve", "--port=0", "--no-warmup"]
    process = subprocess.Popen(
        [*words, f"--checkpoint={folder}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    try:
        told = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", told).group()
        until(lambda: _answers(f"{address}/healthz"))
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=staged.PATIENCE)[1]
    finally:
        process.kill()
    assert process.returncode in (0, 130)
    assert "Traceback" not in said


def _answers(address):
    try:
        return httpx.get(address).status_code == 200
    except httpx.TransportError:
        return False


# ---------------------------------------------------------------------------------------------
# The queue.


@pytest.fixture
def slow():
    """A server whose model steps only when the test allows it: its service and its client."""
    service = Service(staged.Staged(), Limits(waiting=1))
    with served(lambda *_: endpoints.make_app(service)) as address:
        yield service, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        service.pipe.run_free()


def ask(client, words, replies, **more):
    def call():
        try:
            message = {"role": "user", "content": words}
            reply = client.chat.completions.create(model="staged", messages=[message], **more)
            replies[words] = reply.choices[0].message.content
        except openai.APIError as error:
            replies[words] = type(error).__name__

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def until(condition):
    deadline = time.monotonic() + staged.PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_full_queue_gives_429_and_health_goes_on(slow):
    service, client = slow
    replies = {}
    threads = [ask(client, "a", replies)]
    until(lambda: service.running)
    threads.append(ask(client, "b", replies))
    until(lambda: service.waiting == 1)
    with pytest.raises(openai.RateLimitError, match="1 requests wait already") as caught:
        client.images.generate(prompt="c")
    assert caught.value.response.headers["retry-after"] == "2"
    health = httpx.get(str(client.base_url).replace("/v1/", "/health")).json()
    assert (health["running"], health["waiting"], health["model"]) == (True, 1, "staged")
    service.pipe.run_free()
    for thread in threads:
        thread.join(staged.PATIENCE)
    assert replies == {"a": "b", "b": "b"}
    metrics = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
    assert 'sparse_lavida_requests_total{outcome="done",task="ask"} 2.0' in metrics
    assert 'sparse_lavida_tokens_total{task="ask"} 14.0' in metrics
    assert "sparse_lavida_waiting 0.0" in metrics


def test_a_server_that_stops_turns_away_who_waits_and_finishes_what_runs():
    service, replies = Service(staged.Staged()), {}
    with hosting.listen("127.0.0.1", 0) as door:
        started = hosting.server_of(endpoints.make_app(service), service, staged.PATIENCE)
        serving = threading.Thread(target=started.run, kwargs={"sockets": [door]})
        serving.start()
        address = f"http://127.0.0.1:{door.getsockname()[1]}"
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        until(lambda: _answers(f"{address}/ready"))
        runs = ask(client, "runs", replies)
        until(lambda: service.running)
        waits = ask(client, "waits", replies)
        until(lambda: service.waiting == 1)
        started.should_exit = True
        waits.join(staged.PATIENCE)
        assert replies == {"waits": "InternalServerError"}  # the client's name for 503
        service.pipe.run_free()
        runs.join(staged.PATIENCE)
        assert replies["runs"] == "b"
        serving.join(staged.PATIENCE)
        assert not serving.is_alive()


def test_a_client_that_leaves_frees_the_device_at_the_next_phase(slow):
    service, client = slow
    replies = {}
    leaves = ask(client, "leaves", replies, timeout=0.3)
    until(lambda: service.running)
    stays = ask(client, "stays", replies)
    leaves.join(staged.PATIENCE)
    assert replies == {"leaves": "APITimeoutError"}
    time.sleep(4 * asking.POLL_SECONDS)
    assert service.pipe.asked == ["leaves"]  # a phase is not interrupted
    service.pipe.go.release()
    until(lambda: service.pipe.asked == ["leaves", "stays"])
    service.pipe.run_free()
    stays.join(staged.PATIENCE)
    assert replies["stays"] == "b"
    assert service.counts["ask", "cancelled"] == 1


def test_a_crowd_that_sends_anything_gets_no_error(address):
    mix = (("generate:2", 1.0), ("ask", 1.0), ("broken", 6.0), ("leave", 1.0))
    crowd = load.Load(4, 3.0, mix=mix)
    answers = load.drive(address, crowd)
    wrong = [one for one in answers if one.code not in load.EXPECTED.get(one.task, (200, 429))]
    assert wrong == [] and load.summary(answers, crowd)["failed"] == 0
    assert {one.code for one in answers if one.task == "broken"} >= {400}
