# SPDX-License-Identifier: Apache-2.0
"""From a request to its place in the queue, and on to its result or a stream of events."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import fastapi
from fastapi import HTTPException, responses

from sparse_lavida_jax.apps.api import errors
from sparse_lavida_jax.apps.api.bodies import Body
from sparse_lavida_jax.apps.batching import Cancelled, Ticket
from sparse_lavida_jax.apps.serving import Service
from sparse_lavida_jax.inference.requests import LARGEST_SEED
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.sampling import options

POLL_SECONDS = 0.05  # between looks at the progress, for streams
OPTIONS = {*options.OPTIONS, "num_inference_steps", "guidance_scale"}  # that bodies may set


def service_of(request: fastapi.Request) -> Service:
    """Returns the service that answers the requests of a server."""
    return request.app.state.service


class Asked:
    """A request in the queue, and the client that waits for it."""

    def __init__(self, request: fastapi.Request, ticket: Ticket):
        self.request, self.ticket = request, ticket
        self._ended = asyncio.wrap_future(ticket.future)
        # If the client has left, asyncio should not log the error as never retrieved.
        self._ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._left = asyncio.ensure_future(self._leaves())
        self._ended.add_done_callback(lambda _: self._left.cancel())

    async def _leaves(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def goes_on(self, seconds: float | None = POLL_SECONDS) -> bool:
        """Waits a moment, and returns whether the request is still waiting or running.

        Args:
            seconds: the longest to wait; None: until it ends.

        Raises:
            Cancelled: the client disconnected; the request is cancelled.
        """
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait([self._ended, self._left], timeout=seconds, return_when=first)
        if not self._ended.done() and self._left.done():
            self.ticket.cancel()
            raise Cancelled("the client left.")
        return not self._ended.done()

    def result(self) -> Result:
        """Returns the result of a request that has ended.

        Raises:
            Exception: the error it raised, or `Cancelled`.
        """
        if self._ended.cancelled():
            raise Cancelled("cancelled while it waited.")
        return self._ended.result()

    async def ended(self) -> Result:
        """Waits for the result.

        Raises:
            HTTPException: the request was refused, failed or was cancelled.
        """
        with errors.refusing():
            await self.goes_on(None)
            return self.result()


async def queued(
    request: fastapi.Request,
    task: str,
    asked: Body,
    words: str | Sequence[str],
    shown: Callable[[], tuple[Any, dict[str, Any]]],
    *,
    previews: int = 0,
    **more: Any,
) -> Asked:
    """Puts a request into the queue.

    Args:
        shown: reads the images, in another thread (`Service.read`).
        more: options of the task; those in `asked` take precedence.

    Raises:
        HTTPException: the request is refused.
    """
    check_model(request, asked.model)
    # Without a seed, OpenAI's clients expect a different image each time; the response states it.
    more["seed"] = secrets.randbelow(LARGEST_SEED // 2) if asked.seed is None else asked.seed
    given = asked.model_dump(include=OPTIONS, exclude_none=True)
    if "num_inference_steps" in given:
        more.pop("steps", None)
    with errors.refusing():
        service = service_of(request)
        reading = service.read(task, words, shown, previews=previews, **more | given)
        return Asked(request, await asyncio.wrap_future(reading))


def check_model(request: fastapi.Request, name: str | None) -> None:
    """Refuses any model other than the one being served.

    Raises:
        HTTPException: 404.
    """
    own = request.app.state.model
    if name not in (None, "", own):
        raise HTTPException(404, f"there is no model {name[:100]!r} here, only {own!r}.")


async def streamed(
    asked: Asked, events: AsyncIterator[tuple[str, dict[str, Any]]]
) -> responses.StreamingResponse:
    """Returns a stream of named events, which starts once the request runs.

    Errors before that get an HTTP status of their own; later ones become an event.

    Args:
        events: with empty names where OpenAI's have none; such a stream ends with `[DONE]`.

    Raises:
        HTTPException: the request was refused or cancelled.
    """
    with errors.refusing():
        while asked.ticket.state is None and await asked.goes_on():
            pass
        if asked.ticket.state is None:
            asked.result()

    async def written() -> AsyncIterator[str]:
        name = ""
        try:
            async for name, content in events:
                yield (f"event: {name}\n" if name else "") + f"data: {json.dumps(content)}\n\n"
            if not name:
                yield "data: [DONE]\n\n"
        except HTTPException as error:
            said = errors.body(error.status_code, error.detail)
            yield f"event: error\ndata: {json.dumps(said)}\n\n"
        finally:
            asked.ticket.cancel()

    headers = {"Cache-Control": "no-cache"}
    return responses.StreamingResponse(written(), 200, headers, "text/event-stream")


def notes(ticket: Ticket, result: Result) -> dict[str, Any]:
    """Returns what has no field in OpenAI's responses."""
    warning = ticket.requests[0].warning
    return {
        "warnings": [warning] if warning else [],
        "seeds": list(result.seeds),
        "plans": list(result.plans),
        "seconds": round(ticket.seconds, 4),
        "tokens_passed": result.tokens_passed,
        "batch": ticket.batch,
    }
