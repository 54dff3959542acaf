# SPDX-License-Identifier: Apache-2.0
"""From a request to its place in the queue, and to its result or to a stream of events."""

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

POLL_SECONDS = 0.05  # between two looks whether a client is still there
OPTIONS = {*options.OPTIONS, "num_inference_steps", "guidance_scale"}  # of bodies


def service_of(request: fastapi.Request) -> Service:
    """Returns what does the requests of a server."""
    return request.app.state.service


class Asked:
    """A request in the queue, and the client that waits for it."""

    def __init__(self, request: fastapi.Request, ticket: Ticket):
        self.request, self.ticket = request, ticket
        self._ended = asyncio.wrap_future(ticket.future)
        # An error that nobody waits for any more is no error of the loop.
        self._ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def goes_on(self) -> bool:
        """Waits a moment, and returns whether the request still waits or runs.

        Raises:
            Cancelled: the client went away; the request is cancelled.
        """
        if (await asyncio.wait([self._ended], timeout=POLL_SECONDS))[0]:
            return False
        if await self.request.is_disconnected():
            self.ticket.cancel()
            raise Cancelled("the client left.")
        return True

    def result(self) -> Result:
        """Returns the result of a request that has ended.

        Raises:
            Exception: what went wrong with it, or `Cancelled`.
        """
        if self._ended.cancelled():
            raise Cancelled("cancelled while it waited.")
        return self._ended.result()

    async def ended(self) -> Result:
        """Waits for the result.

        Raises:
            HTTPException: the request is refused, fails, or was cancelled.
        """
        with errors.refusing():
            while await self.goes_on():
                pass
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
        more: options of the task; those that `asked` names prevail.

    Raises:
        HTTPException: it is refused.
    """
    check_model(request, asked.model)
    # Without a seed, OpenAI's clients expect another image every time; the reply names it.
    more["seed"] = secrets.randbelow(LARGEST_SEED // 2) if asked.seed is None else asked.seed
    given = asked.model_dump(include=OPTIONS, exclude_none=True)
    if "num_inference_steps" in given:
        more.pop("steps", None)
    with errors.refusing():
        service = service_of(request)
        reading = service.read(task, words, shown, previews=previews, **more | given)
        return Asked(request, await asyncio.wrap_future(reading))


def check_model(request: fastapi.Request, name: str | None) -> None:
    """Refuses another model than the one that is served.

    Raises:
        HTTPException: 404.
    """
    own = request.app.state.model
    if name not in (None, "", own):
        raise HTTPException(404, f"there is no model {name[:100]!r} here, only {own!r}.")


async def streamed(
    asked: Asked, events: AsyncIterator[tuple[str, dict[str, Any]]]
) -> responses.StreamingResponse:
    """Returns a stream of events, names and contents, that begins once the request runs.

    What is wrong with a request until then gets a code of its own, later it is an event.

    Args:
        events: without names ("") where OpenAI's have none; `[DONE]` comes after these.

    Raises:
        HTTPException: the request is refused, or was cancelled.
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
    """Returns what OpenAI's replies have no field for."""
    return {
        "seeds": list(result.seeds),
        "plans": list(result.plans),
        "seconds": round(ticket.seconds, 4),
        "tokens_passed": result.tokens_passed,
        "batch": ticket.batch,
    }
