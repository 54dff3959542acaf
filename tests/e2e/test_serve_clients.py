# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's client get answers in OpenAI's format; malformed requests are refused."""

import base64
import io
import json
import socket
import struct
import threading
import time
import zlib

import numpy as np
import pytest
import staged
import staged_server
from PIL import Image, PngImagePlugin
from staged import until
from staged_server import KEY, client_of, httpx, openai, png, said, serving, uri

from sparse_lavida_jax.cli import hosting
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.image_files import ImageError
from sparse_lavida_jax.server import endpoints
from sparse_lavida_jax.server.openai import guards
from sparse_lavida_jax.server.serving import Limits, Service

service, address, client = staged_server.service, staged_server.address, staged_server.client
SCHEMES = {  # values of the header Authorization
    f"bearer {KEY}": 200, f"BEARER   {KEY}": 200, f"bEaReR {KEY}": 200, KEY: 401,
    f"Basic {KEY}": 401, f"Token {KEY}": 401, f"Bearer{KEY}": 401, f"Bearer Bearer {KEY}": 401,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Images.


def test_a_stream_shows_the_image_while_it_is_drawn(client, service):
    events = list(client.images.generate(prompt="a", stream=True, partial_images=2))
    kinds = ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.type for event in events] == kinds
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    seen = [np.array(Image.open(io.BytesIO(base64.b64decode(e.b64_json)))) for e in events]
    assert [image.max() for image in seen] == [1, 2, 9]  # decoded cells, and the final image
    assert (events[-1].usage.input_tokens, events[-1].usage.output_tokens) == (2, 2)
    assert (events[-1].size, events[-1].output_format) == ("2x2", "png")
    (event,) = client.images.edit(image=("a.png", png()), prompt="b", stream=True)
    assert event.type == "image_edit.completed"


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_other_formats_are_written(client, service, format):
    how = {"output_format": format, "output_compression": 30}
    reply = client.images.generate(prompt="a", **how)
    image = Image.open(io.BytesIO(base64.b64decode(reply.data[0].b64_json)))
    assert (image.format, reply.output_format) == (format.upper(), format)
    assert reply.usage.input_tokens_details.text_tokens == 2
    assert reply.usage.total_tokens == 4


def test_null_is_as_if_left_out(address, service):
    names = ("n", "size", "quality", "seed", "stream", "user", "background", "output_format")
    reply = httpx.post(
        f"{address}/v1/images/generations", json={"prompt": "a", **dict.fromkeys(names)}
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["quality"] == "medium"


@pytest.mark.parametrize(
    ("asked", "passed_on"),
    [
        ({"quality": "auto"}, {}),
        ({"quality": "medium"}, {}),
        ({"quality": "high"}, {"quality": "high"}),
        ({"quality": "low"}, {"quality": "low"}),
        (
            {"quality": "low", "extra_body": {"num_inference_steps": 3}},
            {"num_inference_steps": 3},
        ),
        (
            {"quality": "low", "extra_body": {"steps": 3, "registers": 2}},
            {"steps": 3, "registers": 2},
        ),
    ],
)
def test_a_number_of_steps_takes_the_place_of_a_quality(client, service, asked, passed_on):
    client.images.generate(prompt="a", **asked)
    ((_, _, _, options),) = service.pipe.given
    about = {"quality", "steps", "num_inference_steps", "registers"}
    assert {name: options[name] for name in about & options.keys()} == passed_on


def test_what_changes_nothing_is_passed_over(client, service):
    client.images.generate(
        prompt="a", user="me", background="opaque", moderation="low", style=None,
        extra_body={"negative_prompt": ""},
    )  # fmt: skip
    assert len(service.pipe.given) == 1


# ---------------------------------------------------------------------------------------------
# Answers.


def test_an_answer_is_counted(client, service):
    reply = client.chat.completions.create(model="staged", messages=[said("user", "a")], n=2)
    assert [choice.message.content for choice in reply.choices] == ["b", "b"]
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "stop"]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 2)
    assert reply.usage.total_tokens == 4


def test_an_answer_is_no_longer_than_was_asked(client, service):
    asked = {"model": "staged", "messages": [said("user", "a")], "max_tokens": 1}
    reply = client.chat.completions.create(**asked)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 1)


def test_an_answer_is_streamed(client, service):
    chunks = list(
        client.chat.completions.create(
            model="staged",
            messages=[said("user", "a")],
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
    )
    texts = ["", ""]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == ["b", "b"]
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("stop") == 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 4
    assert len({chunk.id for chunk in chunks}) == 1


def test_words_that_the_model_does_not_know_are_named_in_every_reply(client):
    """In chats they are named before the answer, too, since most clients show nothing else."""
    ask = client.chat.completions.create
    for words, told, before in (
        ("a", [], ""),
        ("hexagon", ["unknown: 'hexagon'."], "Unknown: 'hexagon'. "),
    ):
        asked = {"model": "staged", "messages": [said("user", words)]}
        whole = ask(**asked)
        assert whole.sparse_lavida["warnings"] == told
        assert whole.choices[0].message.content == f"{before}b"
        chunks = [*ask(**asked, stream=True)]
        assert chunks[-1].sparse_lavida["warnings"] == told
        parts = (chunk.choices[0].delta.content or "" for chunk in chunks)
        assert "".join(parts) == f"{before}b"
        drawn = client.images.generate(prompt=words)
        assert drawn.sparse_lavida["warnings"] == told


def test_text_is_sent_as_it_is_committed():
    with serving() as (service, address):
        chunks = client_of(address).chat.completions.create(
            model="staged", messages=[said("user", "a")], stream=True
        )
        pipe = service.pipe
        pipe.at_step.acquire(timeout=staged.PATIENCE)
        assert next(chunks).choices[0].delta.role == "assistant"
        pipe.go.release()
        pipe.at_step.acquire(timeout=staged.PATIENCE)
        assert next(chunks).choices[0].delta.content == "b"
        assert service.running  # two steps are left
        pipe.run_free()
        assert [chunk.choices[0].finish_reason for chunk in chunks] == ["stop"]


def test_messages_of_a_system_and_of_one_role_in_a_row_are_joined(client, service):
    messages = [
        said("system", "be brief"), said("developer", "be kind"),
        said("user", {"type": "text", "text": "what is it?"}, uri(png(40, 20))),
        said("assistant", "a circle"), said("user", "which"), said("user", "colour?"),
    ]  # fmt: skip
    client.chat.completions.create(model="staged", messages=messages, temperature=0.5)
    ((task, words, shown, options),) = service.pipe.given
    assert (task, words, [image.shape for image in shown]) == (
        "ask", ["which\ncolour?"], [(20, 40, 3)],
    )  # fmt: skip
    assert options["earlier"] == (("be brief\nbe kind\nwhat is it?", "a circle"),)
    assert options["temperature"] == [0.5]


def test_things_are_found_in_pixels_of_the_image_that_was_sent(client, service):
    side = 2 * service.largest_side
    reply = client.chat.completions.create(
        model="staged", extra_body={"task": "ground"},
        messages=[said("user", {"type": "text", "text": "a cat\na dog"}, uri(png(side, side)))],
    )  # fmt: skip
    assert json.loads(reply.choices[0].message.content) == [
        {"label": "a cat", "bbox_2d": [2.0, 4.0, 6.0, 8.0]}, {"label": "a dog", "bbox_2d": None},
    ]  # fmt: skip
    assert service.pipe.given[0][2].shape == (side // 2, side // 2, 3)


def test_the_model_is_listed_and_retrieved(client):
    assert [model.id for model in client.models.list()] == ["staged"]
    assert client.models.retrieve("staged").owned_by == "local"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-image-1' here"):
        client.models.retrieve("gpt-image-1")


# ---------------------------------------------------------------------------------------------
# Errors.


BODIES = [
    (400, b"{", "the body cannot be read as JSON"),
    (400, b"[" * 100_000, "the body cannot be read as JSON"),
    (400, b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "the body cannot be read as JSON"),
    (400, b'{"prompt": "a \\ud800"}', "character 3 of the prompt is half a character"),
    (400, b'{"prompt": "a", "guidance": NaN}', "guidance: Input should be"),
    (400, b'{"prompt": "a", "guidance": 1e999}', "guidance: Input should be"),
    (400, b"\xff", "the body cannot be read as JSON"),
    (400, b'{"prompt": "a", "\\ud800": 1}', "?: there is no such field here"),
    (400, b'{"prompt": "a", "size": "\\ud800"}', "must be such as 512x512"),
    (400, b"3", "Input should be a valid dictionary"),
    (413, bytes(3_000_000), "the body has more than 1581909 bytes"),
]


@pytest.mark.parametrize(("code", "body", "told"), BODIES)
def test_every_error_has_the_shape_of_openais(address, code, body, told):
    reply = httpx.post(f"{address}/v1/images/generations", content=body)
    assert reply.status_code == code
    error = reply.json()["error"]
    assert told in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}


def test_a_body_of_unknown_length_is_counted(address):
    parts = (bytes(100_000) for _ in range(30))
    reply = httpx.post(f"{address}/v1/images/generations", content=parts)
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")


def test_wrong_addresses_have_the_shape_too(address):
    for code, method, path in [
        (404, "GET", "/v1/nothing"), (405, "GET", "/v1/images/generations"), (404, "POST", "/"),
    ]:  # fmt: skip
        reply = httpx.request(method, address + path)
        assert reply.status_code == code
        assert "docs/serving.md" in reply.json()["error"]["message"]


def test_an_error_of_the_program_has_the_shape_too(client, service, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(service.pipe, "requests", broken)
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError") as caught:
        client.images.generate(prompt="a")
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------------------------------------
# Malformed requests.


DATA = b"\x00\x00\x00\x00IDAT\x35\xaf\x06\x1e"  # a chunk of image data that holds none


def bombs():
    notes = PngImagePlugin.PngInfo()
    notes.add_text("a", "b" * 2**21, zip=True)
    yield "text chunks", png(pnginfo=notes), "not an image that can be read"
    body = b"IHDR" + struct.pack(">IIBBBBB", 1, 67_000_000, 8, 2, 0, 0, 0)
    head = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    yield "a line", b"\x89PNG\r\n\x1a\n" + head + DATA, "a side may have at most 16384"
    yield "cut off", png()[:20], "not an image that can be read"
    yield "a strip", png(1000, 2), "64 times those of the other"


@pytest.mark.parametrize(("contents", "told"), [bomb[1:] for bomb in bombs()])
def test_images_that_would_fill_the_memory_are_refused(client, service, contents, told):
    with pytest.raises(openai.BadRequestError, match=told):
        client.images.edit(image=("a.png", contents), prompt="a")
    with pytest.raises(openai.BadRequestError, match=told):
        client.images.edit(image=("a.png", png()), mask=("m.png", contents), prompt="a")
    shown = said("user", {"type": "text", "text": "a"}, uri(contents))
    with pytest.raises(openai.BadRequestError, match=told):
        client.chat.completions.create(model="staged", messages=[shown])


def test_nothing_larger_than_what_the_model_looks_at_waits(client, service):
    client.images.edit(image=("a.png", png(400, 200)), prompt="a")
    ((_, _, shown, _),) = service.pipe.given
    assert shown.shape == (service.largest_side // 2, service.largest_side, 3)


def test_images_are_read_beside_the_others_once_there_is_a_place(monkeypatch):
    with serving(Limits(waiting=1)) as (service, address):
        reading, go = threading.Event(), threading.Event()

        def read_bytes(contents, check):
            reading.set()
            go.wait(staged.PATIENCE)
            raise ImageError("it was no image.")

        monkeypatch.setattr(image_files, "read_bytes", read_bytes)
        client, replies = client_of(address), []

        def edit():
            try:
                client.images.edit(image=("a.png", png()), prompt="a")
            except openai.APIError as error:
                replies.append(error.status_code)

        threads = [threading.Thread(target=edit) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert reading.wait(staged.PATIENCE)
        assert httpx.get(f"{address}/health", timeout=5).status_code == 200
        until(lambda: service._batcher._places.total() == 2)  # one about to start, one waiting
        with pytest.raises(openai.RateLimitError, match="1 requests wait already"):
            client.images.generate(prompt="b")
        go.set()
        for thread in threads:
            thread.join(staged.PATIENCE)
        assert replies == [400, 400]
        service.pipe.run_free()
        client.images.generate(prompt="b")  # the places are free again


def test_a_key_is_asked_for():
    with serving(key=KEY) as (service, address):
        service.pipe.run_free()
        assert client_of(address).models.list().data[0].id == "staged"
        for path in ("/v1/models", "/metrics"):
            reply = httpx.get(address + path, headers={"authorization": "Bearer a kez"})
            assert reply.status_code == 401
            assert reply.json()["error"]["type"] == "authentication_error"
            assert httpx.get(address + path).status_code == 401
            for value, code in SCHEMES.items():
                headers = {"Authorization": value}
                assert httpx.get(address + path, headers=headers).status_code == code, value
            for name in ("X-API-Key", "api-key"):
                assert httpx.get(address + path, headers={name: KEY}).status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200


def test_pages_of_others_may_not_write(address, service):
    def post(origin):
        body = {"prompt": "a"}
        url = f"{address}/v1/images/generations"
        return httpx.post(url, json=body, headers={"origin": origin}).status_code

    assert [post(one) for one in ("http://evil.example", "null", "http://[", address)] == [
        403, 403, 403, 200,
    ]  # fmt: skip


def test_a_body_that_never_comes_is_not_waited_for():
    with serving(body_seconds=0.3) as (_, address):
        reply = said_to(address, b"POST /v1/images/generations HTTP/1.1\r\n", b"Content-Length: 9")
        assert reply.startswith(b"HTTP/1.1 408") and b"took more than 0.3 seconds" in reply


def said_to(address, *lines):
    """Returns a server's answer to headers without a body, until it closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=staged.PATIENCE) as door:
        door.sendall(b"".join(lines) + b"\r\nHost: a\r\nConnection: close\r\n\r\n")
        parts = []
        while part := door.recv(4096):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("begins", [b"", b"GET /health HTTP/1.1\r\nHost"])
def test_a_connection_that_says_nothing_is_closed(monkeypatch, begins):
    monkeypatch.setattr(guards, "HEADER_SECONDS", 0.3)
    service = Service(staged.Staged())
    with hosting.listen("127.0.0.1", 0) as door:
        started = hosting.server_of(endpoints.make_app(service), service, 1)
        thread = threading.Thread(target=started.run, kwargs={"sockets": [door]})
        thread.start()
        address = door.getsockname()
        with socket.create_connection(address, timeout=staged.PATIENCE) as slow:
            slow.sendall(begins)
            began = time.monotonic()
            assert slow.recv(1) == b""  # closed
            assert time.monotonic() - began < staged.PATIENCE
        assert httpx.get(f"http://127.0.0.1:{address[1]}/health").status_code == 200
        started.should_exit = True
        thread.join(staged.PATIENCE)


def test_histograms_tell_of_every_request(client, service, address):
    client.images.generate(prompt="a")
    client.chat.completions.create(model="staged", messages=[said("user", "a")])
    text = httpx.get(f"{address}/metrics").text
    for name in ("queue_seconds", "device_seconds", "batch_rows", "request_tokens"):
        assert f'sparse_lavida_{name}_count{{task="generate"}}' in text
    assert 'sparse_lavida_request_images_sum{task="generate"}' in text
    assert 'sparse_lavida_latency_seconds_count{code="200",endpoint="/v1/chat/completions"}' in text
    assert httpx.get(f"{address}/anything").status_code == 404
    assert "anything" not in httpx.get(f"{address}/metrics").text
