# SPDX-License-Identifier: Apache-2.0
"""Who may ask, how much a request may bring, and how long it may take to bring it.

For strangers: a key, the names that a server answers to, no writes by other web pages, bodies of
bounded size and time, and connections that say nothing or take nothing are closed.
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

KEYED = ("/v1/", "/metrics")  # what a key is asked for; the page of a demo has none
READS = ("GET", "HEAD", "OPTIONS")
HEADER_SECONDS = 15.0  # for the head of a request


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is let in.

    Attributes:
        key: that clients send, as OpenAI's do; "": none is asked for.
        hosts: names it answers to; other `Host` headers are refused, so that no web page that is
            open in a browser on the machine reaches it by a name of its own. Empty: any.
        body: bytes of a request.
        body_seconds: that a client has to send them.
        send_seconds: that a client has to take each part of an answer.
    """

    key: str = ""
    hosts: tuple[str, ...] = ()
    body: int = 2**26
    body_seconds: float = 60.0
    send_seconds: float = 60.0


class Guard:
    """Refuses what the rules do not let in, in the shape of all other errors."""

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
            if whole:  # what comes now is that the client leaves
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
    """A connection that is closed if the head of a request takes longer than `HEADER_SECONDS`."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def _look(self) -> None:
        """Begins to wait for the head of a request, or ends it."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        elif not waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None
