# SPDX-License-Identifier: Apache-2.0
"""What strangers send to the server: odd requests, unfinished bodies, and too many connections."""

import asyncio
import contextlib
import logging
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import hostile_inputs as hostile
import pytest
import staged

WHY = "pip install 'sparse-lavida-jax[serve]' to test the server"
pytest.importorskip("fastapi", reason=WHY)
pytest.importorskip("prometheus_client", reason=WHY)

from serving_on_loopback import served  # noqa: E402
from starlette import requests, responses  # noqa: E402
from starlette.middleware.exceptions import ExceptionMiddleware  # noqa: E402

from sparse_lavida_jax.server import endpoints, log_lines  # noqa: E402
from sparse_lavida_jax.server.openai import guards  # noqa: E402
from sparse_lavida_jax.server.openai.guards import Guard, Rules  # noqa: E402
from sparse_lavida_jax.server.serving import Service  # noqa: E402


@contextlib.contextmanager
def serving(**rules):
    """A server with a staged model that steps without waiting: its host and port."""
    service = Service(staged.Staged())
    service.pipe.run_free()
    with served(lambda *_: endpoints.make_app(service, **rules)) as address:
        host, port = address.removeprefix("http://").split(":")
        yield host, int(port)


@pytest.fixture(scope="module")
def door():
    with serving(hosts=("localhost",), key="a key") as found:
        yield found


@pytest.fixture
def log(caplog):
    """The lines of the log that the server writes to stderr."""
    caplog.handler.addFilter(brief := log_lines.Brief())
    with caplog.at_level(logging.WARNING):
        yield caplog
    caplog.handler.removeFilter(brief)


def health(door, seconds=5.0):
    return hostile.answers(*door, hostile.request("/health"), seconds)


# ---------------------------------------------------------------------------------------------
# Requests that can be read in two ways, and other odd ones.


@pytest.mark.parametrize("name", hostile.SMUGGLED)
def test_a_request_of_two_meanings_is_refused_and_its_connection_closed(door, log, name):
    assert hostile.answers(*door, hostile.SMUGGLED[name], 5) == [400]
    assert log.messages == []


def test_the_same_length_twice_is_one_length(door):
    for lines in (("Content-Length: 5", "Content-Length: 5"), ("Content-Length: 5, 5",)):
        sent = hostile.smuggled(*lines, "Authorization: Bearer a key")
        assert hostile.answers(*door, sent) == [400, 200]  # the body is not JSON


@pytest.mark.parametrize("name", hostile.STRANGE)
def test_a_strange_request_is_no_error_of_the_server(door, log, name):
    codes = hostile.answers(*door, hostile.STRANGE[name], 20)
    assert all(code < 500 for code in codes)
    assert health(door) == [200]
    assert log.messages == []


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/models/%0a"])
@pytest.mark.parametrize("key", ["", "Bearer", "Bearer \xe9", "Bearer \u0661", "Bearer a keyy"])
def test_a_wrong_key_of_any_bytes_is_refused(door, path, key):
    sent = hostile.request(path, b"", "a", f"Authorization: {key}")
    assert hostile.answers(*door, sent) == [401]


# ---------------------------------------------------------------------------------------------
# Clients that leave, and the log.


def test_a_client_that_leaves_is_not_logged(log):
    with serving() as door:
        hostile.leaving(*door)
        metrics = hostile.request("/metrics")
        until(lambda: b'code="499"' in hostile.reply(*door, metrics))
        assert b'code="500"' not in hostile.reply(*door, metrics)
    assert log.messages == []


def test_a_broken_chunk_after_the_answer_is_not_logged(door, log):
    with socket.create_connection(door, timeout=5) as client:
        client.sendall(
            hostile.smuggled("Transfer-Encoding: chunked", body=b"").removesuffix(hostile.LAST)
        )
        assert client.recv(2**12).startswith(b"HTTP/1.1 401")  # it has no key
        client.sendall(b"-1\r\n")
        assert client.recv(2**12) == b""
    assert health(door) == [200]
    assert log.messages == []


def test_an_error_of_the_program_is_one_line_and_repeats_are_counted(log, monkeypatch):
    def broken(_):
        raise ZeroDivisionError("what a stranger sent\n")

    monkeypatch.setattr(endpoints, "_card", broken)
    with serving() as door:
        for _ in range(3):
            assert hostile.answers(*door, hostile.request("/v1/models/staged")) == [500]
    (line,) = log.messages
    assert re.fullmatch(
        "Exception in ASGI application: ZeroDivisionError at"
        r" sparse_lavida_jax/server/endpoints.py:\d+, GET /v1/models/staged",
        line,
    )


SERVER = """
import staged
from sparse_lavida_jax.cli import hosting
from sparse_lavida_jax.server import log_lines
from sparse_lavida_jax.server import endpoints
from sparse_lavida_jax.server.serving import Service

log_lines.shorten()
service = Service(staged.Staged())
service.pipe.run_free()
with hosting.listen("127.0.0.1", 0) as door:
    print(door.getsockname()[1], flush=True)
    hosting.server_of(endpoints.make_app(service), service, 1).run(sockets=[door])
"""


def test_strangers_write_nothing_into_the_log_of_a_process():
    words = [sys.executable, "-c", SERVER]
    folder = pathlib.Path(__file__).parents[1]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True, cwd=folder) as process:
        assert process.stdout and process.stderr
        try:
            door = "127.0.0.1", int(process.stdout.readline())
            hostile.leaving(*door)
            for sent in (*hostile.SMUGGLED.values(), *hostile.STRANGE.values()):
                hostile.answers(*door, sent)
            assert health(door) == [200]
        finally:
            process.terminate()
        assert process.stderr.read() == ""


def until(condition):
    deadline = time.monotonic() + staged.PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


# ---------------------------------------------------------------------------------------------
# Bodies.


class Sent:
    """A request to a guard in this process, whose body is sent in parts."""

    def __init__(self, guard, client="192.0.2.1"):
        self.messages, self.sent = asyncio.Queue(), []
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [],
            "client": (client, 1),
        }
        scope |= {"http_version": "1.1"}
        self.task = asyncio.ensure_future(guard(scope, self.messages.get, self._send))

    async def _send(self, message):
        self.sent.append(message)

    async def part(self, size, *, last=False):
        """Sends a part, and returns the code of the answer, if there is one by then."""
        self.messages.put_nowait(
            {"type": "http.request", "body": bytes(size), "more_body": not last}
        )
        return await self.code()

    async def code(self):
        for _ in range(20):
            await asyncio.sleep(0)
        return self.sent[0]["status"] if self.sent else None

    def header(self, name):
        return dict(self.sent[0]["headers"])[name]


async def reading(scope, receive, send):
    """An app that reads the body, and answers with 200."""
    request = requests.Request(scope, receive)
    if len(await request.body()) == 13:
        raise ZeroDivisionError
    await responses.Response()(scope, receive, send)


def guarded(**rules):
    return Guard(ExceptionMiddleware(reading), Rules(**{"small": 10} | rules))


def test_the_body_that_lasts_longest_makes_room_for_others():
    async def main():
        guard = guarded(body=1000, bodies=2000)
        first, second, third = (Sent(guard, client) for client in "abc")
        assert [await one.part(800) for one in (first, second)] == [None, None]
        assert await third.part(800) is None
        assert await first.code() == 503 and first.header(b"retry-after") == b"2"
        assert [await one.part(100, last=True) for one in (third, second)] == [200, 200]
        assert not guard._bodies

    asyncio.run(main())


def test_one_address_has_its_share_and_small_bodies_pass():
    async def main():
        guard = guarded(body=1000, bodies=4000)
        # Of IPv6, a network is one client.
        addresses = ("2001:db8:0:2::1", "2001:db8::1", "2001:db8::2", "2001:db8::3")
        other, *own = (Sent(guard, address) for address in addresses)
        assert [await one.part(600) for one in (other, own[0], own[1])] == [None] * 3
        assert [await one.code() for one in (other, own[0], own[1])] == [None, 503, None]
        assert await own[2].part(10, last=True) == 200
        assert await own[1].part(400, last=True) == 200
        assert await other.part(400, last=True) == 200
        assert not guard._bodies

    asyncio.run(main())


def test_room_is_given_back_however_a_request_ends():
    async def main():
        guard = guarded(body=1000, bodies=1000, body_seconds=0.05)
        late, large, leaves, fails = (Sent(guard, client) for client in "abcd")
        assert await large.part(1001) == 413
        await leaves.part(900)
        leaves.messages.put_nowait({"type": "http.disconnect"})
        assert await leaves.code() == 499
        await fails.part(13, last=True)
        assert isinstance(fails.task.exception(), ZeroDivisionError)
        await late.part(900)
        await asyncio.sleep(0.1)
        assert await late.code() == 408
        assert not guard._bodies

    asyncio.run(main())


@pytest.mark.slow
def test_stuck_bodies_take_a_bounded_memory_and_nobody_waits_for_them():
    words = [sys.executable, "-c", SERVER]
    folder = pathlib.Path(__file__).parents[1]
    with subprocess.Popen(words, stdout=-1, text=True, cwd=folder) as process:
        assert process.stdout
        try:
            door = "127.0.0.1", int(process.stdout.readline())
            assert health(door) == [200]
            before, codes, seconds = resident(process.pid), [], []
            act = threading.Thread(target=lambda: codes.extend(hostile.stuck_bodies(*door)))
            act.start()
            most = 0
            while act.is_alive():
                began = time.monotonic()
                assert health(door) == [200]
                seconds.append(time.monotonic() - began)
                most = max(most, resident(process.pid))
                time.sleep(0.1)
            act.join()
        finally:
            process.terminate()
    print(f"+{(most - before) >> 20} MiB, {max(seconds):.2f} s, {len(codes)} refused")
    assert most - before < 300 * 2**20  # two copies of the bodies that are kept
    assert max(seconds) < 2
    assert set(codes) == {503} and len(codes) > hostile.STUCK / 2


def resident(pid):
    """Returns the bytes of memory that a process uses."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


# ---------------------------------------------------------------------------------------------
# Connections.


def opened(door, number, address):
    found = []
    for _ in range(number):
        found.append(socket.create_connection(door, 5, source_address=(address, 0)))
        time.sleep(0.01)  # so that it is known which one waits longest
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_the_connection_that_waits_longest_makes_room_for_others(monkeypatch):
    monkeypatch.setattr(guards, "CONNECTIONS", 12)
    with serving() as door:
        first = opened(door, 3, "127.0.0.2")
        second = opened(door, 5, "127.0.0.3")  # two more than its share of 3
        for one in second[:2]:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        third = [one for i in range(4, 9) for one in opened(door, 2, f"127.0.0.{i}")]
        for one in first:  # too many in all
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        for one in third:
            one.sendall(hostile.request("/health"))
            assert one.recv(12) == b"HTTP/1.1 200"
        for one in (*first, *second, *third):
            one.close()
        assert health(door) == [200]


def test_what_is_left_of_a_refused_body_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(guards, "HEADER_SECONDS", 0.3)
    with serving() as door, socket.create_connection(door, 5) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n")
        assert client.recv(2**12).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < began + 5:
                client.sendall(b"a")
                time.sleep(0.02)
        assert time.monotonic() < began + 5


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_accepts_nothing_is_left(monkeypatch, reads):
    monkeypatch.setattr(guards, "WRITE_SECONDS", 0.3)
    size, ended = 2**25, threading.Event()

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await responses.Response(bytes(size))(scope, receive, send)
            while (await receive())["type"] != "http.disconnect":
                pass
            ended.set()

    with served(lambda *_: app) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 5) as client:
            client.sendall(hostile.request("/"))
            got, began = 0, time.monotonic()
            while reads and (part := client.recv(2**20)):  # slowly, but it does
                got += len(part)
                time.sleep(0.05)
            assert ended.wait(staged.PATIENCE)
            if not reads:
                time.sleep(1)
                with contextlib.suppress(ConnectionError):
                    while part := client.recv(2**20):
                        got += len(part)
            assert (got > size) == reads
            assert not reads or time.monotonic() - began > 1


def test_a_body_in_too_many_chunks_is_refused(monkeypatch):
    monkeypatch.setattr(guards, "CHUNKS", 2 * guards.FEW_CHUNKS)
    with serving() as free:
        head = hostile.request(hostile.GENERATIONS, b"", "application/json")
        head = head.replace(b"GET", b"POST").replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        for size, most in (1, guards.FEW_CHUNKS), (guards.CHUNK_BYTES, guards.CHUNKS):
            for number in most, most + 1:
                chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
                got = hostile.reply(*free, head + chunk * number + b"0\r\n\r\n")
                assert [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]] == [400]
                assert (b"cannot be read as JSON" in got) == (number == most)


def test_large_bodies_are_read_at_a_bounded_rate(monkeypatch):
    monkeypatch.setattr(guards, "RATE", 2**21)
    with serving() as door:
        began = time.monotonic()
        assert hostile.answers(*door, hostile.request(hostile.GENERATIONS, b" " * 2**20)) == [400]
        assert time.monotonic() - began > 0.4  # a megabyte at two a second
        assert health(door) == [200]


def test_little_is_read_of_a_body_that_was_refused(monkeypatch):
    monkeypatch.setattr(guards, "REST", 2**16)
    with serving(key="a key") as door, socket.create_connection(door, timeout=10) as client:
        head = hostile.request(hostile.GENERATIONS, b" ").replace(b"h: 1\r\n", b"h: 9000000\r\n")
        client.sendall(head)
        assert client.recv(2**16).startswith(b"HTTP/1.1 401")
        with pytest.raises(ConnectionError):
            for _ in range(1000):  # 9 MB
                client.sendall(b" " * 9000)
                time.sleep(0.0005)
