# SPDX-License-Identifier: Apache-2.0
"""Requests as many clients send them, to a server: forms, keys, phrases, and what errors name."""

import dataclasses
import json

import pytest
import staged_server
from staged_server import httpx, png, said, uri

service, address, client = staged_server.service, staged_server.address, staged_server.client


def test_a_limit_below_the_10_images_of_openai_is_reported_as_n_too(monkeypatch, address, service):
    monkeypatch.setattr(service, "limits", dataclasses.replace(service.limits, images=4))
    reply = httpx.post(f"{address}/v1/images/generations", json={"prompt": "a", "n": 5})
    assert reply.json()["error"]["message"] == "n=5 is out of range: 1 to 4."


FORM_HEAD = 'Content-Disposition: form-data; name="{}"'


def form(*parts: tuple[str, bytes]) -> bytes:
    """A form; each part has its name, and more after it, and its contents."""
    heads = (FORM_HEAD.format(name).encode("latin-1") for name, _ in parts)
    body = (b"--X\r\n%b\r\n\r\n%b\r\n" % (h, c) for h, (_, c) in zip(heads, parts, strict=True))
    return b"".join(body) + b"--X--\r\n"


FILE = '{}"; filename="{}'


@pytest.mark.parametrize(
    "parts",
    [
        [("mask", b""), ("n", b""), ("size", b""), ("seed", b""), ("stream", b""), ("user", b"")],
        [(FILE.format("mask", "m.png"), b"")],
        [(FILE.format("mask", ""), b""), ("background", b"auto"), ("style", b"")],
        [("n", b"1.0"), ("output_compression", b"100"), ("moderation", b"low")],
    ],
)
@pytest.mark.parametrize(
    "name", [FILE.format("image", "caf\xe9\x01.png"), FILE.format("image[]", "")]
)
@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=X", 'Multipart/Form-Data;BOUNDARY="X"']
)
def test_empty_parts_of_a_form_count_as_left_out(address, service, parts, name, kind):
    sent = form((name, png()), ("prompt", b"a"), *parts)
    reply = httpx.post(f"{address}/v1/images/edits", content=sent, headers={"Content-Type": kind})
    assert reply.status_code == 200, reply.text
    ((task, words, _, options),) = service.pipe.given
    assert (task, words, options["num_images"]) == ("edit", "a", 1)


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([(FILE.format("image", "a"), b"")], "image"),
        ([("mask", b"x"), (FILE.format("image", "a"), png())], "mask"),
        ([(FILE.format("image", "a"), b"x")], "image"),
        ([(FILE.format("image", "a"), png()), (FILE.format("mask", "a"), b"x")], "mask"),
        ([(FILE.format("image", "a"), png()), ("size", b"3x3")], "size"),
        ([(FILE.format("image", "a"), png()), ("seed", b"x")], "seed"),
    ],
)
def test_an_error_names_the_part_of_a_form(address, parts, param):
    kind = {"Content-Type": "multipart/form-data; boundary=X"}
    sent = form(("prompt", b"a"), *parts)
    reply = httpx.post(f"{address}/v1/images/edits", content=sent, headers=kind)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize("kind", ["", "text/plain", "Application/JSON; Charset=UTF-8"])
def test_json_needs_no_type_and_may_start_with_a_mark(address, service, kind):
    sent = b"\xef\xbb\xbf" + json.dumps({"prompt": "a", "seed": 2**63}).encode()
    url, headers = f"{address}/v1/images/generations", {"Content-Type": kind} if kind else {}
    assert httpx.post(url, content=sent, headers=headers).status_code == 200
    assert service.pipe.given[0][3]["seed"] == 2**63


@pytest.mark.parametrize(("coding", "code"), [("gzip", 415), ("BR", 415), ("Identity", 200)])
def test_a_compressed_body_is_refused_in_a_sentence(address, service, coding, code):
    url, headers = f"{address}/v1/images/generations", {"Content-Encoding": coding}
    reply = httpx.post(url, content=b'{"prompt": "a"}', headers=headers)
    assert reply.status_code == code
    assert code == 200 or "not compressed" in reply.json()["error"]["message"]


def test_half_a_character_anywhere_is_no_error_of_the_program(address, service):
    half, image = (
        "\ud800",
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,\udfff"}},
    )
    bodies = [{"prompt": half}, {"prompt": "a", half: half}, {"prompt": "a", "user": half}]
    bodies += [{"prompt": "a", name: half} for name in ("size", "sampler", "model", "style", "n")]
    talks = [said(half, "a"), said("user", half), said("user", image), said("user", {"type": half})]
    talks += [said("user", "a") | {half: half}, said("user", {"type": "text", "text": half})]
    bodies += [{"messages": [one, said("user", half)]} for one in [*talks, said("assistant", half)]]
    bodies += [{"messages": [one]} for one in talks]
    for body in bodies:
        path = "chat/completions" if "messages" in body else "images/generations"
        reply = httpx.post(f"{address}/v1/{path}", content=json.dumps(body))
        assert reply.status_code == (200 if body.get("user") else reply.status_code)
        assert reply.status_code in (200, 400, 404), (body, reply.text)
        assert reply.json()


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_there_are_is_the_most_there_are(client, service, field):
    asked = {"model": "staged", "messages": [said("user", "a")], field: 32_000}
    reply = client.chat.completions.create(**asked)
    (chunk, *_) = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)][::-1]
    assert (reply.choices[0].finish_reason, chunk.finish_reason) == ("stop", "stop")
    assert reply.usage.completion_tokens == 1
    assert [options["max_new_tokens"] for *_, options in service.pipe.given] == [1024, 1024]


def find(address, words, **fields):
    content = [{"type": "text", "text": words}, uri(png())]
    body = {"messages": [said("user", *content)], "task": "ground", **fields}
    return httpx.post(f"{address}/v1/chat/completions", json=body)


def test_phrases_end_at_line_ends_alone(address, service):
    words = " a\u2028cat \r\n\x0b\r\ra\x0cdog\x85\n"
    reply = find(address, words, top_p=0.5, max_tokens=4096)
    labels = [one["label"] for one in json.loads(reply.json()["choices"][0]["message"]["content"])]
    assert labels == ["a\u2028cat", "a\x0cdog"]
    ((_, _, _, options),) = service.pipe.given
    assert options["sampling"].text.top_p == 0.5


@pytest.mark.parametrize(
    ("words", "fields", "told"),
    [
        ("", {}, "give at least one phrase"),
        (" \n\r\n", {}, "give at least one phrase"),
        ("a", {"max_tokens": 0}, "max_tokens=0: the boxes are 1 tokens and come whole"),
        ("a", {"n": 2}, "n: boxes come whole"),
        ("a\n" * 65, {}, "65 phrases were sent: at most 64"),
        ("a" * 4001, {}, "4001 characters: at most 4000"),
    ],
)
def test_things_to_find_are_at_least_one_phrase(address, service, words, fields, told):
    reply = find(address, words, **fields)
    assert (reply.status_code, told in reply.text) == (400, True), reply.text


def test_what_a_system_says_is_not_a_thing_to_find(address, service):
    messages = [said("system", "be kind"), said("user", {"type": "text", "text": "a"}, uri(png()))]
    reply = find(address, "", messages=messages)
    assert (reply.status_code, "asked in one message" in reply.text) == (400, True)
