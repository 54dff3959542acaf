# SPDX-License-Identifier: Apache-2.0
"""What a hostile client sends to the server: bodies, whole requests, and acts against an address.

`KINDS` are acts: each sends one hostile request, or a handful, to a host and a port, waits for the
answer at most `PATIENCE` seconds, and returns the status codes it got (none where the server
closed the connection). Large bodies are made once.
"""

import base64
import collections
import contextlib
import functools
import json
import random
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable

PATIENCE = 30.0  # seconds that an act takes at most
STUCK = 50  # connections of `stuck_bodies`
GENERATIONS, EDITS, CHAT = (
    f"/v1/{path}" for path in ("images/generations", "images/edits", "chat/completions")
)
FORM = "multipart/form-data; boundary=x"


# ---------------------------------------------------------------------------------------------
# Files.


def png(width: int, height: int, bits: int = 8, kind: int = 0) -> bytes:
    """Returns a valid black PNG; it is a thousandth of the size of its pixels.

    Args:
        kind: PNG's colour type: 0 is grey, 2 is RGB, 6 is RGBA.
    """
    row = bytes(1 + (width * {0: 1, 2: 3, 6: 4}[kind] * bits + 7) // 8)
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">2I5B", width, height, bits, kind, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """Returns a grey progressive JPEG of one colour with so many empty scans after the first."""

    def segment(marker: int, body: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body

    def packed(bits: str) -> bytes:
        bits += "1" * (-len(bits) % 8)
        return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")

    blocks = (-(-side // 8)) ** 2
    runs, single = divmod(blocks, 2**14)
    # One code for "no difference"; one for 16384 blocks without any detail, one for one block.
    tables = segment(0xC4, b"\x00" + bytes([1] + [0] * 15) + b"\x00")
    tables += segment(0xC4, b"\x10" + bytes([1, 1] + [0] * 14) + b"\xe0\x00")
    frame = struct.pack(">BHHB", 8, side, side, 1) + bytes([1, 0x11, 0])
    first = segment(0xDA, bytes([1, 1, 0x00, 0, 0, 0])) + packed("0" * blocks)
    empty = segment(0xDA, bytes([1, 1, 0x00, 1, 63, 0])) + packed("0" * (15 * runs) + "10" * single)
    quantization = segment(0xDB, b"\x00" + bytes([1] * 64))
    return b"".join(
        [b"\xff\xd8", quantization, segment(0xC2, frame), tables, first, empty * scans, b"\xff\xd9"]
    )


def uri(contents: bytes, kind: str = "png") -> str:
    """Returns a file as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(contents).decode()}"


# ---------------------------------------------------------------------------------------------
# Bodies and requests.


def form(*parts: tuple[str, str | tuple[str, bytes]]) -> bytes:
    """Returns a form with the boundary x: fields with a text, or with a file's name and bytes."""
    body = b""
    for name, value in parts:
        file = "" if isinstance(value, str) else f'; filename="{value[0]}"'
        contents = value.encode() if isinstance(value, str) else value[1]
        head = f'--x\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        body += head.encode() + contents + b"\r\n"
    return body + b"--x--\r\n"


def chat(*urls: str, role: str = "user") -> bytes:
    """Returns a chat about images."""
    parts = [f'{{"type":"image_url","image_url":{{"url":"{url}"}}}}' for url in urls]
    content = ",".join(['{"type":"text","text":"what is this?"}', *parts])
    return f'{{"messages":[{{"role":"{role}","content":[{content}]}}]}}'.encode()


def request(path: str, body: bytes = b"", kind: str = "application/json", *more: str) -> bytes:
    """Returns a whole request, which asks for the connection to be closed."""
    head = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    head += [f"Content-Type: {kind}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@functools.cache
def punycode_form() -> bytes:
    """A form that names a codec which takes a minute for a megabyte."""
    body = form(("prompt", "a" * 500_000 + "-" + "b" * 500_000))
    return request(EDITS, body, f"{FORM}; charset=punycode")


@functools.cache
def undefined_form() -> bytes:
    """A form that names a codec which always fails."""
    return request(EDITS, form(("prompt", "a")), f"{FORM}; charset=undefined")


@functools.cache
def scans() -> bytes:
    """A JPEG of 600 scans, which take minutes."""
    image = ("a.jpg", jpeg_of_scans(8192, 600))
    return request(EDITS, form(("prompt", "x"), ("image", image)), FORM)


@functools.cache
def large_images() -> bytes:
    """A chat of 16 large images in a few bytes."""
    return request(CHAT, chat(*[uri(png(8192, 8192, 16))] * 16))


@functools.cache
def unknown_fields() -> bytes:
    """Four million fields that are not known."""
    body = "{" + ",".join(f'"{i:x}":1' for i in range(4_000_000)) + "}"
    return request(GENERATIONS, body.encode())


@functools.cache
def nesting() -> bytes:
    """Lists of lists, 40 MB of them."""
    return request(GENERATIONS, b"[" + b"[]," * 13_000_000 + b"[]]")


@functools.cache
def metadata() -> bytes:
    """A field that is ignored, with 40 MB of empty objects."""
    return request(GENERATIONS, b'{"prompt":"x","metadata":[' + b"{}," * 13_000_000 + b"{}]}")


@functools.cache
def long_role() -> bytes:
    """A message of an unknown role, which has a million characters."""
    return request(CHAT, chat(role="r" * 1_000_000))


@functools.cache
def foreign_digits() -> bytes:
    """Base64 that is not ASCII."""
    return request(CHAT, chat("data:image/png;base64,\u0661"))


_CLOSE = b"Connection: close\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + _CLOSE


def smuggled(*lines: str, body: bytes = b"0\r\n\r\n", version: str = "1.1") -> bytes:
    """Returns a request with header lines that proxies may read otherwise, and a second one."""
    head = [f"POST {GENERATIONS} HTTP/{version}", "Host: localhost", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body + LAST


# Of each, only the first may be answered: the end of its body is a matter of opinion.
SMUGGLED = {
    "length and encoding": smuggled("Content-Length: 3", "Transfer-Encoding: chunked"),
    "encoding and length": smuggled("Transfer-Encoding: chunked", "Content-Length: 3"),
    "encoding in capitals": smuggled("Content-Length: 3", "TRANSFER-ENCODING: CHUNKED"),
    "length 0 and encoding": smuggled("Content-Length: 0", "Transfer-Encoding: chunked"),
    "two lengths": smuggled("Content-Length: 5", "Content-Length: 6"),
    "two lengths in one": smuggled("Content-Length: 5, 6"),
    "negative": smuggled("Content-Length: -5"),
    "plus": smuggled("Content-Length: +5"),
    "underscore": smuggled("Content-Length: 0_5"),
    "hexadecimal": smuggled("Content-Length: 0x5"),
    "empty length": smuggled("Content-Length:"),
    "space within": smuggled("Content-Length: 5 5"),
    "long length": smuggled("Content-Length: " + "9" * 30),
    "chunked twice": smuggled("Transfer-Encoding: chunked, chunked"),
    "two encodings": smuggled("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    "gzip": smuggled("Transfer-Encoding: gzip, chunked"),
    "identity": smuggled("Transfer-Encoding: identity"),
    "x": smuggled("Transfer-Encoding: xchunked"),
    "vertical tab": smuggled("Transfer-Encoding: \x0bchunked"),
    "fold": smuggled("X: y", "Transfer-Encoding:\r\n chunked"),
    "folded length": smuggled("X: y\r\n Content-Length: 5"),
    "bare LF": smuggled("X: y\nContent-Length: 5"),
    "bare LF at the end": b"POST /v1/images/generations HTTP/1.1\nHost: localhost\n\n" + LAST,
    "bare CR": smuggled("X: y\rContent-Length: 5"),
    "NUL": smuggled("X: y\0z", "Content-Length: 5"),
    "space before the colon": smuggled("Content-Length : 5"),
    "space before the name": smuggled("X: y", " Content-Length: 5"),
    "HTTP/1.0 in chunks": smuggled("Transfer-Encoding: chunked", version="1.0"),
    "broken chunk": smuggled("Transfer-Encoding: chunked", body=b"-1\r\n"),
    "broken end of a chunk": smuggled("Transfer-Encoding: chunked", body=b"1\r\nabc\r\n0\r\n\r\n"),
    "chunk of 0x": smuggled("Transfer-Encoding: chunked", body=b"0x1\r\na\r\n0\r\n\r\n"),
    "two hosts": smuggled("Host: localhost", "Content-Length: 5"),
}

# Requests that are no harm, only strange: each gets an answer below 500, or is closed.
STRANGE = {
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: localhost\r\n" + _CLOSE,
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    "zeros": bytes(1000),
    "a long line": b"a" * 100_000,
    "many headers": b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(20_000)),
    "a long query": request("/health?" + "q" * 60_000),
    "a long path": request("/" + "%00%0a%1b" * 1000),
    "a path of NUL": request("/v1/models/%00%0a%1b[2J"),
    "a path of bytes": request("/v1/models/%ff%fe%ed%a0%80"),
    "dots": request("/v1/models/../../../etc/passwd"),
    "another address": request("http://other.example/health"),
    "a long method": b"M" * 10_000 + b" /health HTTP/1.1\r\nHost: localhost\r\n" + _CLOSE,
    "CONNECT": b"CONNECT other.example:443 HTTP/1.1\r\nHost: localhost\r\n" + _CLOSE,
    "TRACE": b"TRACE /health HTTP/1.1\r\nHost: localhost\r\n" + _CLOSE,
    "OPTIONS": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n" + _CLOSE,
    "HEAD": b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n" + _CLOSE,
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a host of bytes": b"GET /health HTTP/1.1\r\nHost: \xff\xfe\r\n" + _CLOSE,
    "IPv6": b"GET /health HTTP/1.1\r\nHost: [::1]:8000\r\n" + _CLOSE,
    "a key of bytes": request("/v1/models", b"", "text/plain", "Authorization: Bearer \u0661"),
    "a forwarded address": request("/health", b"", "text/plain", "X-Forwarded-For: [, ,\x7f, a:b"),
    "a length and nothing": request("/health", b"", "a", "Expect: 100-continue"),
    "a web socket": request("/", b"", "a", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    "h2c": request("/health", b"", "a", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQA"),
    "many at once": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200 + LAST,
}


# ---------------------------------------------------------------------------------------------
# Acts.


def answers(host: str, port: int, sent: bytes, seconds: float = PATIENCE) -> list[int]:
    """Sends bytes and returns the status codes of all answers, until the connection is closed.

    Raises:
        TimeoutError: the connection was not closed in time.
    """
    return [int(part[:3]) for part in reply(host, port, sent, seconds).split(b"HTTP/1.1 ")[1:]]


def reply(host: str, port: int, sent: bytes, seconds: float = PATIENCE) -> bytes:
    """Sends bytes and returns what comes back until the connection is closed.

    Raises:
        TimeoutError: the connection was not closed in time.
    """
    end, got = time.monotonic() + seconds, b""
    with socket.create_connection((host, port), timeout=seconds) as door:
        try:
            door.sendall(sent)
        except ConnectionError:
            pass  # refused before all was sent
        while True:
            door.settimeout(max(0.01, end - time.monotonic()))
            try:
                part = door.recv(2**16)
            except ConnectionError:
                part = b""
            if not part:
                return got
            got += part


def leaving(host: str, port: int) -> list[int]:
    """Leaves while a header or a body is sent, in the middle of a chunk, and without a farewell."""
    length = request(GENERATIONS, b"{" * 1000)
    chunked = smuggled("Transfer-Encoding: chunked", body=b"40\r\n{")
    for sent in (length[:60], length[:-1], chunked.removesuffix(LAST), request("/health")):
        for reset in (False, True):
            with socket.create_connection((host, port), timeout=PATIENCE) as door:
                if reset:
                    door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                door.sendall(sent)
                time.sleep(0.01)
    return []


def stuck_bodies(
    host: str, port: int, number: int = STUCK, size: int = 38_000_000, seconds: float = 5.0
) -> list[int]:
    """Keeps bodies open that lack their last bytes, and returns what the server says to them."""
    head = request(GENERATIONS, bytes(1)).replace(b"Content-Length: 1", b"Content-Length: 42000000")
    left = [size] * number
    got = [b""] * number
    end = time.monotonic() + seconds
    doors = []
    try:
        for _ in range(number):
            door = socket.create_connection((host, port), timeout=PATIENCE)
            doors.append(door)
            door.sendall(head[:-1])
            door.setblocking(False)
        blanks = b" " * 2**16
        while time.monotonic() < end:
            sent = 0
            for i, door in enumerate(doors):
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sent += (n := door.send(blanks[: left[i]]) if left[i] else 0)
                    left[i] -= n
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    got[i] += door.recv(2**12)
            if not sent:
                time.sleep(0.01)
    finally:
        for door in doors:
            door.close()
    return [int(one[9:12]) for one in got if one.startswith(b"HTTP/1.1 ")]


def slow_headers(host: str, port: int, number: int = 20, seconds: float = 1.0) -> list[int]:
    """Sends headers a byte at a time over several connections."""
    doors = [socket.create_connection((host, port), timeout=PATIENCE) for _ in range(number)]
    end = time.monotonic() + seconds
    for byte in request("/health"):
        for door in doors:
            door.sendall(bytes([byte]))
        time.sleep(0.02)
        if time.monotonic() > end:
            break
    for door in doors:
        door.close()
    return []


def small_chunks(host: str, port: int) -> list[int]:
    """Sends a megabyte in chunks of one byte."""
    body = b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n"
    sent = smuggled("Transfer-Encoding: chunked", "Connection: close", body=body)
    return answers(host, port, sent.removesuffix(LAST))


def _whole(make: Callable[[], bytes]) -> Callable[[str, int], list[int]]:
    return lambda host, port: answers(host, port, make())


def _any(of: dict[str, bytes]) -> Callable[[str, int], list[int]]:
    return lambda host, port: answers(host, port, random.choice(list(of.values())))


# By name; the numbers are only part of the names.
KINDS: dict[str, Callable[[str, int], list[int]]] = {
    "3 punycode form": _whole(punycode_form),
    "4 scans": _whole(scans),
    "5 large images": _whole(large_images),
    "6 unknown fields": _whole(unknown_fields),
    "7 nesting": _whole(nesting),
    "7 metadata": _whole(metadata),
    "8 stuck bodies": stuck_bodies,
    "10 undefined form": _whole(undefined_form),
    "12 foreign digits": _whole(foreign_digits),
    "13 leaving": leaving,
    "25 long role": _whole(long_role),
    "26 smuggled": _any(SMUGGLED),
    "strange": _any(STRANGE),
    "slow headers": slow_headers,
    "small chunks": small_chunks,
}


def main(host: str, port: str, seconds: str, *names: str) -> None:
    """Does acts at random until the time is over, and writes the number of each answer."""
    end, counts = time.monotonic() + float(seconds), collections.Counter[str]()
    while time.monotonic() < end:
        name = random.choice(names or tuple(KINDS))
        try:
            codes = KINDS[name](host, int(port))
            counts.update(f"{name}: {code}" for code in codes or ["closed"])
        except OSError as error:  # also a timeout
            counts[f"{name}: {type(error).__name__}"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
