# SPDX-License-Identifier: Apache-2.0
"""Which requests are let in, how large their bodies may be, and how long they may take.

For a server that strangers can reach: a key, a list of accepted host names, no writes from other
web pages, limits on the size and time of bodies, and an end to idle or stalled connections.
"""

import asyncio
import dataclasses
import hmac
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparse_lavida_jax.apps.api import errors

KEYED = ("/v1/", "/metrics")  # paths that need a key; the page of a demo needs none
READS = ("GET", "HEAD", "OPTIONS")
HEADER_SECONDS = 15.0  # for the header of a request


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
        send_seconds: the time that a client has to accept each part of a response.
    """

    key: str = ""
    hosts: tuple[str, ...] = ()
    body: int = 2**26
    body_seconds: float = 60.0
    send_seconds: float = 60.0


class Guard:
    """Refuses what the rules do not let in, with errors in the same shape as all others."""

    def __init__(self, app: ASGIApp, rules: Rules):
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if refusal := self._refusal(scope):
            code, sentence = refusal
            headers = {"WWW-Authenticate": "Bearer"} if code == 401 else None
            return await errors.reply(code, sentence, headers=headers)(scope, receive, send)
        deadline = asyncio.get_running_loop().time() + self.rules.body_seconds
        brought, whole = 0, False

        async def bounded_receive() -> Message:
            nonlocal brought, whole
            if whole:  # from here on the only message is that the client disconnects
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                seconds = f"{self.rules.body_seconds:g}"
                raise HTTPException(408, f"the body took more than {seconds} seconds.") from error
            brought += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if brought > self.rules.body:
                raise HTTPException(413, self._too_large)
            return message

        async def bounded_send(message: Message) -> None:
            async with asyncio.timeout(self.rules.send_seconds):
                await send(message)

        await self.app(scope, bounded_receive, bounded_send)

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self.rules.body} bytes, the most that is taken."

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers, rules = Headers(scope=scope), self.rules
        host = headers.get("host", "")
        if rules.hosts and (host.rpartition(":")[0] or host) not in rules.hosts:
            return 400, f"this server is not called {host[:100]!r}."
        if rules.key and scope["path"].startswith(KEYED):
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(given, rules.key.encode()):
                return 401, "the key is missing or wrong: send it as Authorization: Bearer KEY."
        origin, own = headers.get("origin"), (f"http://{host}", f"https://{host}")
        if scope["method"] not in READS and origin is not None and origin not in own:
            return 403, f"a page of {origin[:100]!r} may not ask here: it is not of this server."
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > rules.body:
            return 413, self._too_large
        return None


class Patient(H11Protocol):
    """A connection that is closed if the header of a request takes over `HEADER_SECONDS`."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def _look(self) -> None:
        """Starts or ends the wait for the header of a request."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        elif not waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None
