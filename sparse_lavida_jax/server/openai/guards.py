# SPDX-License-Identifier: Apache-2.0
"""Which requests are let in, how large their bodies may be, and how long they may take.

For a server that strangers can reach: a key, a list of accepted host names, no writes from other
web pages, limits on the size and time of bodies and on all of them together, headers that can be
read in one way only, and an end to idle or stalled connections.

When there are too many connections or unfinished bodies, in total or from one address, the oldest
is closed. For clients behind a trusted proxy (on this machine, or named in uvicorn's variable
`FORWARDED_ALLOW_IPS`), the address is taken from `X-Forwarded-For`.
"""

import asyncio
import dataclasses
import hmac
import ipaddress
import math
import re
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparse_lavida_jax.server.openai import http_errors

KEYED = ("/v1/", "/metrics")  # paths that need a key; the page of a demo needs none
READS = ("GET", "HEAD", "OPTIONS")
HEADER_SECONDS = 15.0  # for the header of a request, or the rest of a body that was refused
RATE = 2**26  # bytes a second of all large bodies: reading them leaves time for other requests
REST = 2**18  # bytes that are read of a body that was refused
# Of a body in chunks, each of which takes time, however small: so many, and one for each further
# 512 bytes, but no more than the last.
FEW_CHUNKS, CHUNK_BYTES, CHUNKS = 2**8, 2**9, 2**12
WRITE_SECONDS = 60.0  # in which a client has to accept something of a response
CONNECTIONS = 512  # at once; a process may usually have 1024 open files
SHARE = 4  # one address has at most a quarter of the connections, and of the bytes of bodies
HEADER_END = re.compile(rb"\n\r?\n")
# Lines of a header that other servers may read otherwise: ended by LF or CR alone, or folded.
AMBIGUOUS = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]")


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is let in.

    Attributes:
        key: that clients must send, as with OpenAI; "": none is needed.
        hosts: the accepted `Host` headers. Refusing all others keeps a web page that is open in
            a browser on this machine from reaching the server through a domain of its own (DNS
            rebinding). Empty: any.
        body: bytes in the body of a request.
        body_seconds: the time that a client has to send the body.
        bodies: bytes in the bodies of all requests that are not done. One address has a quarter of
            it, or room for one body if that is more.
        small: bytes of each body that are not counted, so that short requests always pass.
    """

    key: str = ""
    hosts: tuple[str, ...] = ()
    body: int = 2**26
    body_seconds: float = 60.0
    bodies: int = 2**28
    small: int = 2**16


def client_of(address: tuple[str, int] | None) -> str:
    """Returns the name by which the requests of a client are counted: with IPv6, its network."""
    host = address[0] if address else ""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(int(found) >> 64)
    return str(getattr(found, "ipv4_mapped", found))


@dataclasses.dataclass(eq=False)
class _Body:
    """The body of a request that is not done: what has come so far, and until when it may come."""

    client: str
    deadline: float
    size: int = 0
    whole: bool = False
    ended: bool = False  # to make room for others
    answered: bool = False
    left: bool = False  # by its client, before it was whole or answered
    wait: asyncio.Timeout | None = None

    def end(self) -> None:
        self.size, self.ended, self.deadline = 0, True, 0.0
        if self.wait is not None:
            self.wait.reschedule(0.0)


class Guard:
    """Refuses what the rules do not let in, with errors in the same shape as all others."""

    def __init__(self, app: ASGIApp, rules: Rules):
        self.app, self.rules = app, rules
        self._bodies: dict[_Body, None] = {}  # the oldest first
        self._turn = 0.0  # when the next part of a large body may be read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if refusal := self._refusal(scope):
            return await refusal(scope, receive, send)
        deadline = asyncio.get_running_loop().time() + self.rules.body_seconds
        body = _Body(client_of(scope.get("client")), deadline)
        self._bodies[body] = None

        async def send_on(message: Message) -> None:
            if not body.left:
                body.answered = True
                await send(message)

        try:
            await self.app(scope, lambda: self._receive(receive, body), send_on)
        except Exception as error:
            if not body.left:
                error.add_note(f"{scope['method'][:20]} {scope['path'][:100]}")  # for the log
                raise
        finally:
            del self._bodies[body]
        if body.left:
            left = http_errors.reply(http_errors.CLIENT_LEFT, "the client left.")  # for the metrics
            await left(scope, receive, send)

    async def _receive(self, receive: Receive, body: _Body) -> Message:
        if body.whole:  # from here on the only message is that the client disconnects
            return await receive()
        try:
            async with asyncio.timeout_at(body.deadline) as body.wait:
                message = await receive()
        except TimeoutError as error:
            self._check_room(body)
            seconds = f"{self.rules.body_seconds:g}"
            told = f"the body took more than {seconds} seconds: send it faster, or make it smaller."
            raise HTTPException(408, told) from error
        finally:
            body.wait = None
        body.left = message["type"] == "http.disconnect" and not body.answered
        body.size += len(message.get("body", b""))
        if body.size > self.rules.body:
            raise HTTPException(413, self._too_large)
        self._make_room(body)
        if body.size > self.rules.small:
            now = asyncio.get_running_loop().time()
            self._turn = max(self._turn, now) + len(message.get("body", b"")) / RATE
            await asyncio.sleep(self._turn - now)
        self._check_room(body)
        body.whole = not message.get("more_body", False)
        return message

    def _make_room(self, body: _Body) -> None:
        """Ends the bodies that have lasted longest where there is too much of all together."""
        own = max(self.rules.bodies // SHARE, self.rules.body)
        for most, client in ((own, body.client), (self.rules.bodies, None)):
            rivals = [one for one in self._bodies if client in (None, one.client)]
            excess = sum(max(0, one.size - self.rules.small) for one in rivals) - most
            for one in rivals:
                if excess > 0 and not one.whole and one.size > self.rules.small:
                    excess -= one.size - self.rules.small
                    one.end()

    def _check_room(self, body: _Body) -> None:
        if body.ended:
            sentence = "too many bodies are being sent: this one took longest. Send it again."
            raise HTTPException(503, sentence, {"Retry-After": str(http_errors.RETRY_SECONDS)})

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self.rules.body} bytes, the most that is taken."

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers, rules = Headers(scope=scope), self.rules
        host, coded = headers.get("host", ""), "transfer-encoding" in headers
        length = headers.getlist("content-length")
        if len(length) + coded > 1 or (coded and scope["http_version"] < "1.1"):
            closing = {"Connection": "close"}  # what follows may have been meant as its body
            return http_errors.reply(
                400,
                "the end of the body is given in two ways: send one Content-Length, or chunks.",
                headers=closing,
            )
        if rules.hosts and (host.rpartition(":")[0] or host) not in rules.hosts:
            return http_errors.reply(400, f"this server is not called {host[:100]!r}.")
        if rules.key and scope["path"].startswith(KEYED):
            scheme, _, given = headers.get("authorization", "").strip().partition(" ")
            given = given.strip().encode() if scheme.lower() == "bearer" else b""
            if not hmac.compare_digest(given, rules.key.encode(errors="replace")):
                return http_errors.reply(
                    401,
                    "the key is missing or wrong: send it as Authorization: Bearer KEY.",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        origin, own = headers.get("origin"), (f"http://{host}", f"https://{host}")
        if scope["method"] not in READS and origin is not None and origin not in own:
            sentence = f"a page of {origin[:100]!r} may not ask here: it is not of this server."
            return http_errors.reply(403, sentence)
        coding = headers.get("content-encoding", "").strip()
        if coding.lower() not in ("", "identity"):
            sentence = f"the body is encoded as {coding[:40]!r}: send it as it is, not compressed."
            return http_errors.reply(415, sentence, headers={"Accept-Encoding": "identity"})
        if length and length[0].isdecimal() and int(length[0][:20]) > rules.body:
            return http_errors.reply(413, self._too_large)
        return None


class _Strict(h11.Connection):
    """Refuses headers that other servers may read otherwise, and bodies in too many chunks."""

    _chunks = _bytes = 0  # of the body so far

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._chunks = self._bytes = 0
            came = self.trailing_data[0]
            end = HEADER_END.search(came)
            if AMBIGUOUS.search(came[: end.end()] if end else came.removesuffix(b"\r")):
                raise h11.RemoteProtocolError("lines of the header are ambiguous")
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
        if self._chunks > min(FEW_CHUNKS + self._bytes // CHUNK_BYTES, CHUNKS):
            raise h11.RemoteProtocolError("there are too many chunks")
        return event


class Patient(H11Protocol):
    """A connection that ends if its client is too slow, or if there are too many.

    A client has `HEADER_SECONDS` for the header of a request, or for at most `REST` bytes more of
    a body after it was refused, and in `WRITE_SECONDS` it has to accept something of a response.
    """

    _timer: asyncio.TimerHandle | None = None
    _writes: asyncio.TimerHandle | None = None
    _pending = math.inf  # bytes that the client did not accept before the last look
    _since: float | None = None  # when it began to wait for a request to be whole
    _rest = 0  # bytes of bodies that were refused
    _name = ""

    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **how)
        self.conn = _Strict(h11.SERVER)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._name = client_of(self.client)
        self._look()
        self._look_at_writes()
        every: Any = self.connections
        _end_longest([one for one in every if one._name == self._name], CONNECTIONS // SHARE)
        _end_longest([*every], CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._timer, self._writes):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()
        if self._timer is not None and self.conn.their_state is h11.SEND_BODY:
            self._rest += len(data)
            if self._rest > REST:
                self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pending = math.inf

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # whatever the app still sends is for nobody
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # a response has been sent, or begun
            self.transport.close()

    def _look(self) -> None:
        """Starts or ends the wait for the next request."""
        unfinished = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        self._since = (self._since or self.loop.time()) if unfinished else None
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        elif not waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at_writes(self) -> None:
        """Ends a connection whose client accepts nothing of what is sent."""
        ends = self.flow.write_paused or self.transport.is_closing()
        size = self.transport.get_write_buffer_size()
        if ends and size >= self._pending:
            return self.transport.abort()
        self._pending = size if ends else math.inf
        self._writes = self.loop.call_later(WRITE_SECONDS, self._look_at_writes)


def _end_longest(connections: list[Any], most: int) -> None:
    """Ends the connection that has waited longest for a whole request, if there are too many."""
    if len(connections) > most:
        waiting = [one for one in connections if one._since is not None]
        longest = min(waiting, key=lambda one: one._since)
        longest.connections.discard(longest)
        longest.transport.abort()
