# SPDX-License-Identifier: Apache-2.0
"""One request takes a bounded time and memory, and no request without images waits for images."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import hostile_inputs as hostile
import numpy as np
import pytest
import staged

WHY = "pip install 'sparse-lavida-jax[serve]' to test the server"
pytest.importorskip("fastapi", reason=WHY)
pytest.importorskip("prometheus_client", reason=WHY)

from serving_on_loopback import served  # noqa: E402

from sparse_lavida_jax.data import image_files  # noqa: E402
from sparse_lavida_jax.server import endpoints, serving  # noqa: E402
from sparse_lavida_jax.server.batching import QueueFull  # noqa: E402
from sparse_lavida_jax.server.openai import bodies  # noqa: E402
from sparse_lavida_jax.server.serving import LANES, Limits, Service  # noqa: E402

SMALL = hostile.png(8, 8)
SOON = 10.0  # seconds; what is refused took minutes


@pytest.fixture(scope="module")
def running():
    """A service whose model steps without waiting, and its host and port."""
    service = Service(staged.Staged(), Limits(longest_wait=0.0))
    with served(lambda *_: endpoints.make_app(service)) as address:
        service.pipe.run_free()
        host, port = address.removeprefix("http://").split(":")
        yield service, (host, int(port))


@pytest.fixture
def door(running):
    running[0].pipe.run_free()
    return running[1]


def answer(door, sent: bytes) -> tuple[int, str]:
    """Returns the status code of a request, and the message of its error."""
    reply = hostile.reply(*door, sent, SOON)
    head, _, body = reply.partition(b"\r\n\r\n")
    message = json.loads(body).get("error", {}).get("message", "")
    return int(head[9:12]), message


def edit(*parts, kind=hostile.FORM) -> bytes:
    return hostile.request(hostile.EDITS, hostile.form(*parts), kind)


def image(contents: bytes):
    return "image", ("a.png", contents)


def draw(**fields) -> bytes:
    return hostile.request(hostile.GENERATIONS, json.dumps({"prompt": "a", **fields}).encode())


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (hostile.punycode_form, 400, "send multipart/form-data, in UTF-8"),
        (hostile.undefined_form, 400, "send multipart/form-data, in UTF-8"),
        (hostile.scans, 400, "has 601 scans: at most 64 are read"),
        (hostile.large_images, 400, "the images have 1073741824 pixels in all"),
        (hostile.unknown_fields, 413, "more than 1048576 bytes besides images"),
        (hostile.nesting, 413, "more than 1048576 bytes besides images"),
        (hostile.metadata, 413, "more than 1048576 bytes besides images"),
        (hostile.foreign_digits, 400, "the data URI is not base64"),
        (hostile.long_role, 400, "is not known, or calls tools"),
    ],
)
def test_what_the_attack_sent_is_refused_soon(door, make, code, message):
    sent = make()
    began = time.monotonic()
    got, said = answer(door, sent)
    assert (got, message in said) == (code, True), said
    assert time.monotonic() - began < SOON
    assert len(said) < 400


def padded_jpeg() -> bytes:
    """A JPEG with a megabyte of padding, which Pillow skips byte by byte."""
    jpeg = hostile.jpeg_of_scans(64, 1)
    return jpeg[:2] + b"\xff" * 2**20 + jpeg[2:]


def chunky_png() -> bytes:
    """A PNG with a hundred thousand empty chunks."""
    return SMALL[:33] + b"\0\0\0\0tEXt\x96\x42\xc5\x85" * 100_000 + SMALL[33:]


def blocks_of_metadata() -> bytes:
    """A JPEG with a thousand blocks of metadata."""
    jpeg = hostile.jpeg_of_scans(64, 1)
    return jpeg[:2] + b"\xff\xe1\x00\x08Exif\0\0" * 1001 + jpeg[2:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (padded_jpeg, "take more than 0.1 s to read"),
        (chunky_png, "take more than 0.1 s to read"),
        (blocks_of_metadata, "has over 1000 blocks of metadata"),
    ],
)
def test_the_headers_of_images_take_bounded_time(door, monkeypatch, make, message):
    monkeypatch.setattr(serving, "HEADER_SECONDS", 0.1)
    sent = hostile.request(hostile.CHAT, hostile.chat(*[hostile.uri(make())] * 8))
    code, said = answer(door, sent)
    assert (code, message in said) == (400, True), said


CHARSETS = ["utf-16", "idna", "latin-1", "utf-7", "unicode_escape", "hex", "\xff", "rot13", "''"]


@pytest.mark.parametrize("charset", CHARSETS)
def test_no_codec_is_chosen_by_a_client(door, charset):
    sent = edit(("prompt", "a")).replace(
        hostile.FORM.encode(), f"{hostile.FORM}; charset={charset}".encode("latin-1")
    )
    assert answer(door, sent)[0] == 400


@pytest.mark.parametrize(
    ("sent", "code", "message"),
    [
        (edit(("prompt", "a"), image(SMALL), kind=f"{hostile.FORM}; charset=UTF-8"), 200, ""),
        (edit(("prompt", "\u00e9"), image(SMALL)), 200, ""),
        (edit(("prompt", "\u00e9")).replace("\u00e9".encode(), b"\xe9 "), 400, "not in UTF-8"),
        (edit(("prompt", "a")).replace(b"--x--", b"--y--"), 400, "it has no end"),
        (edit(("prompt", "a"), ("prompt", "b")), 400, "'prompt' is there twice"),
        (edit(*[(f"f{i}", "") for i in range(65)]), 400, "its fields are more than 64"),
        (edit(("prompt", "a" * 2**21)), 400, "or hold over 1048576 characters"),
        (edit(*[image(SMALL)] * 3), 400, "it has more than 2 files"),
        (edit(("prompt", "a"), ("file", ("a.png", b"x"))), 400, "send one file named image"),
        (edit(image(SMALL)), 400, "prompt: Field required"),
        (edit(("prompt", "a"), kind="multipart/form-data"), 400, "the form cannot be read"),
        (edit(("prompt", "a"), kind="text/plain; boundary=x"), 400, "send multipart/form-data"),
    ],
)  # fmt: skip
def test_forms_are_whole_small_and_in_utf_8(door, sent, code, message):
    got, said = answer(door, sent)
    assert (got, message in said) == (code, True), said


MANY = {f"{i:x}": 1 for i in range(1000)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (MANY, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more: there is no such field here"),
        ({"x" * 5000: 1}, f"{'x' * 40}: there is no such field here"),
        ({"\n": 1, "a" * 100: 2}, "there is no such field here"),
        ({"user": [0] * bodies.MOST_VALUES}, "it has more than 16384 values"),
        ({"metadata": [[[]] * 17_000]}, "it has more than 16384 values"),
        ({"prompt": "a" * 2**20}, "more than 1048576 bytes besides images"),
        ({"prompt": "data:" + "a" * 2**20}, "more than 1048576 bytes besides images"),
        ({"size": "9" * 10_000}, "must be such as 512x512"),
        ({"model": "m" * 10_000}, "there is no model 'mmm"),
        ({"quality": "q" * 10_000}, "quality: Input should be"),
    ],
)
def test_json_is_small_and_errors_are_short(door, fields, message):
    reply = hostile.reply(*door, draw(**fields), SOON)
    assert reply[9] == 52, reply[:200]  # "4"
    assert message in reply.decode()
    assert len(reply) < 1000


def test_data_uris_are_not_counted_as_json(door):
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    contents = image_files.encoded(noise)
    assert 16 * len(contents) > 8 * bodies.MOST_JSON
    sent = hostile.chat(*[hostile.uri(contents)] * 16)
    assert answer(door, hostile.request(hostile.CHAT, sent))[0] == 200
    sent = hostile.chat(*[hostile.uri(contents)] * 18)
    assert answer(door, hostile.request(hostile.CHAT, sent))[0] == 413


def test_a_conversation_and_a_list_of_things_are_bounded(door):
    def chat(**fields):
        return answer(door, hostile.request(hostile.CHAT, json.dumps(fields).encode()))

    turns = [("user", "a" * 4001), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in turns]
    code, message = chat(messages=messages)
    assert (code, "4001 characters: at most 4000" in message) == (400, True)
    things = json.loads(hostile.chat(hostile.uri(hostile.png(8, 8))))
    things["messages"][0]["content"][0]["text"] = "a\n" * 65
    code, message = chat(**things, task="ground")
    assert (code, message) == (400, "65 phrases were sent: at most 64.")


# ---------------------------------------------------------------------------------------------
# Beside each other.


@pytest.fixture
def slow_images(monkeypatch):
    """Images are read until `go` is set or their client has left; yields (started, go, ended)."""
    started, go, ended = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def read_bytes(contents, check):
        started.release()
        try:
            while not go.wait(0.01):
                check()
        finally:
            ended.release()
        return np.zeros((8, 8, 3), np.uint8)

    monkeypatch.setattr(image_files, "read_bytes", read_bytes)
    yield started, go, ended
    go.set()


@pytest.mark.parametrize("side", [8, 4096])
def test_requests_without_images_and_small_images_do_not_wait(door, slow_images, side):
    started, go, _ = slow_images
    lane = LANES["small" if side == 8 else "large"]
    sent, replies = edit(("prompt", "a"), image(hostile.png(side, side))), []
    threads = [
        threading.Thread(target=lambda: replies.append(answer(door, sent)[0]))
        for _ in range(lane + 1)
    ]
    for thread in threads:
        thread.start()
    for _ in range(lane):
        assert started.acquire(timeout=SOON)
    assert answer(door, draw())[0] == 200
    assert not replies
    go.set()
    for thread in threads:
        thread.join(SOON)
    assert replies == [200] * (lane + 1)


def test_a_large_image_waits_for_one_of_the_page_and_a_small_one_does_not(door, slow_images):
    started, go, _ = slow_images
    go.set()
    large, small = (edit(("prompt", "a"), image(hostile.png(n, n))) for n in (4096, 8))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with serving.one_large_image():
            waiting = pool.submit(answer, door, large)
            assert answer(door, small)[0] == 200
            assert started.acquire(timeout=SOON)
            assert not started.acquire(timeout=0.5)
        assert waiting.result(SOON)[0] == 200


def test_large_images_of_one_client_leave_turns_to_others(door, monkeypatch):
    order, sent = [], {side: hostile.png(side, side) for side in (4096, 4000)}

    def read_bytes(contents, check):
        order.append(contents)
        time.sleep(0.2)
        return np.zeros((8, 8, 3), np.uint8)

    monkeypatch.setattr(image_files, "read_bytes", read_bytes)

    def ask(side):
        form, address = hostile.form(("prompt", "a"), image(sent[side])), f"10.0.0.{side % 100}"
        assert hostile.answers(
            *door, hostile.request(hostile.EDITS, form, hostile.FORM, f"X-Forwarded-For: {address}")
        ) == [200]  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        done = [pool.submit(ask, 4096) for _ in range(8)]
        while not order:
            time.sleep(0.01)
        time.sleep(0.1)
        done.append(pool.submit(ask, 4000))
        for one in done:
            one.result(SOON)
    assert order.index(sent[4000]) <= 3


def test_reading_ends_when_the_client_leaves(door, slow_images):
    started, go, ended = slow_images
    with socket.create_connection(door) as client:
        client.sendall(edit(("prompt", "a"), image(SMALL)))
        assert started.acquire(timeout=SOON)
        assert not ended.acquire(timeout=0.1)
    assert ended.acquire(timeout=SOON)
    assert not go.is_set()


def test_one_client_has_at_most_half_of_the_queue():
    service = Service(staged.Staged(), Limits(waiting=4))  # which gets no request, only places
    with contextlib.ExitStack() as stack:
        for client in ("a", "a", "a", "b", "b"):  # one of them is about to start
            stack.enter_context(service.place(client))
        with pytest.raises(QueueFull, match="4 requests wait already and the queue is full"):
            stack.enter_context(service.place("c"))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(service.place("a"))
        with pytest.raises(QueueFull, match="2 requests of a wait already, half of the queue"):
            stack.enter_context(service.place("a"))
    service.close()
