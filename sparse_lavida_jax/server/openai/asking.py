# SPDX-License-Identifier: Apache-2.0
"""From a request to its place in the queue, and on to its result or a stream of events."""

import asyncio
import concurrent.futures
import functools
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import fastapi
from fastapi import HTTPException, responses

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.requests import LARGEST_SEED
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.sampling import options
from sparse_lavida_jax.schema import about
from sparse_lavida_jax.server.batching import Cancelled, Ticket
from sparse_lavida_jax.server.openai import bodies, http_errors
from sparse_lavida_jax.server.openai.bodies import Body
from sparse_lavida_jax.server.openai.guards import client_of
from sparse_lavida_jax.server.serving import (
    BRANCH,
    PROOF,
    SMALL,
    SURPRISE,
    Service,
    one_large_image,
)

FILES = 2  # the most files in a request: an image and a mask, or what it was drawn after
POLL_SECONDS = 0.05  # between looks at the progress, for streams
P = TypeVar("P")
OPTIONS = {
    *options.OPTIONS,
    "num_inference_steps",
    "guidance_scale",
    "best_of",
    "style_seed",
}  # that bodies may set


def service_of(request: fastapi.Request) -> Service:
    """Returns the service that answers the requests of a server."""
    return request.app.state.service


class Client:
    """The client of a request: its body, work that is done for it, and whether it has left."""

    def __init__(self, request: fastapi.Request):
        self.request, self.service = request, service_of(request)
        self.address = client_of(request.client)
        self.left: asyncio.Future[None] | None = None

    def _turn(self, work: str) -> asyncio.Lock:
        """Returns what is held during such work for an address, so that others get their turns."""
        return self.request.app.state.turns.setdefault((self.address, work), asyncio.Lock())

    async def body(self, parse: Callable[[bytes], P], *, has_images: bool = False) -> P:
        """Receives the body and parses it in another thread.

        Args:
            has_images: whether requests without images shall not wait for it.

        Raises:
            Exception: what `parse` raises; Cancelled: the client left.
        """
        contents = await self.request.body()
        # From here on the only message is that the client has left.
        self.left = asyncio.ensure_future(self._leaves())
        lane = self.service.lane(len(contents) if has_images else None)
        return await self.call(lane, parse, contents)

    async def form(self) -> tuple[dict[str, str], dict[str, list[bytes]]]:
        """Receives a form: its fields, and the files of each field, without empty ones.

        An empty file or field is what forms send for none.

        Raises:
            HTTPException: it is not a form, or has too much in it; or the client left.
        """
        content_type = self.request.headers.get("content-type", "")
        parse = functools.partial(bodies.of_form, content_type=content_type, most_files=FILES)
        with http_errors.refusing():
            form = await self.body(parse, has_images=True)
        return form.fields, {
            name: [one for one in sent if one] for name, sent in form.files.items()
        }

    async def recorded_image(self) -> tuple[dict[str, str], list[bytes]]:
        """Receives a form with a PNG that `sparse-lavida` wrote.

        Returns:
            The fields; and the PNG with, if it was sent, the image that it was drawn after.

        Raises:
            Refused: other files, or none, were sent; HTTPException: see `form`.
        """
        fields, sent = await self.form()
        images, source = sent.pop("image", []), sent.pop("source", [])
        if len(images) != 1 or len(source) > 1 or any(sent.values()):
            sentence = "image: send one PNG named image, and at most one file named source."
            raise http_errors.Refused(sentence, "image")
        return fields, images + source

    def record_of(self, image: bytes, *source: bytes) -> tuple[Any, dict[str, Any]]:
        """Returns the decoded source of a recorded image, if there is one, and the record."""
        record, decoded = image_files.record_in(image), None
        for one in source:
            with about("source"):
                decoded = image_files.read_bytes(one, "the source", check=self.check)
        return decoded, record

    async def call(self, lane: concurrent.futures.Executor, work: Callable[..., P], *given) -> P:
        """Works in the threads of a lane, until the client leaves.

        Raises:
            Exception: what `work` raises; Cancelled: the client left.
        """
        assert self.left is not None
        done = asyncio.wrap_future(lane.submit(work, *given))
        await asyncio.wait([done, self.left], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self.check()
        return done.result()

    async def decoded(self, images: Sequence[bytes], decode: Callable[[], P], *names: str) -> P:
        """Decodes the images of a request in the lane of their cost.

        Raises:
            Exception: what `decode` raises; ImageError: they cost too much; Cancelled: the client
                left.
        """
        async with self._turn("headers"):
            cost = await self.call(self.service.lane(0), self.service.cost_of, images, *names)
        if cost <= SMALL:
            return await self.call(self.service.lane(cost), decode)
        async with self._turn("large"):
            return await self.call(self.service.lane(cost), one_large_image()(decode))

    def check(self) -> None:
        """Raises `Cancelled` if the client has left; called in other threads as well."""
        if self.left is not None and self.left.done():
            raise Cancelled("the client left.")

    def close(self) -> None:
        """Waits for the client's leaving no longer."""
        if self.left is not None:
            self.left.cancel()

    async def _leaves(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


class Asked:
    """A request in the queue, its fields, and the client that waits for it."""

    def __init__(self, client: Client, ticket: Ticket, fields: Body):
        self.request, self.ticket, self._client = client.request, ticket, client
        self.fields = fields
        self._ended = asyncio.wrap_future(ticket.future)
        # If the client has left, asyncio should not log the error as never retrieved.
        self._ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._ended.add_done_callback(lambda _: client.close())

    async def goes_on(self, seconds: float | None = POLL_SECONDS) -> bool:
        """Waits a moment, and returns whether the request is still waiting or running.

        Args:
            seconds: the longest to wait; None: until it ends.

        Raises:
            Cancelled: the client disconnected; the request is cancelled.
        """
        first, left = asyncio.FIRST_COMPLETED, self._client.left
        assert left is not None
        await asyncio.wait([self._ended, left], timeout=seconds, return_when=first)
        if not self._ended.done() and left.done():
            self.ticket.cancel()
            raise Cancelled("the client left.")
        return not self._ended.done()

    def result(self) -> Any:
        """Returns the result of a request that has ended.

        Raises:
            Exception: the error it raised, or `Cancelled`.
        """
        if self._ended.cancelled():
            raise Cancelled("cancelled while it waited.")
        return self._ended.result()

    async def ended(self) -> Any:
        """Waits for the result.

        Raises:
            HTTPException: the request was refused, failed or was cancelled.
        """
        with http_errors.refusing(self.fields.sent):
            await self.goes_on(None)
            return self.result()


async def queued(
    client: Client,
    task: str,
    asked: Body,
    words: str | Sequence[str],
    images: Sequence[bytes] = (),
    decode: Callable[[], tuple[Any, dict[str, Any]]] = lambda: (None, {}),
    *,
    previews: int = 0,
    **more: Any,
) -> Asked:
    """Puts a request into the queue.

    Args:
        images: the files that the request is about.
        decode: returns their pixels, and the options that are read along with them; called in
            another thread if they do not cost too much (`Service.cost_of`).
        more: options of the task; those in `asked` take precedence.

    Raises:
        HTTPException: the request is refused.
    """
    check_model(client.request, asked.model)
    # Without a seed, OpenAI's clients expect a different image each time; the response states it.
    if task not in (SURPRISE, PROOF):
        more["seed"] = secrets.randbelow(LARGEST_SEED // 2) if asked.seed is None else asked.seed
    given = asked.model_dump(include=OPTIONS, exclude_none=True)
    if {"steps", "num_inference_steps"} & given.keys():
        more.pop("quality", None)
    service = client.service
    with http_errors.refusing(asked.sent), service.place(client.address):
        shown = None
        if images:
            with service.counting_refusals(task), about("image"):
                others = {"inpaint": "the mask", BRANCH: "the source", PROOF: "the source"}
                names = ("the image", others[task])[: len(images)] if task in others else ()
                shown, read = await client.decoded(images, decode, *names)
            given |= read
        options = {"previews": previews, "client": client.address, **more, **given}
        add = functools.partial(service.add, task, words, shown, **options)
        # It is short, and what it adds is cancelled once it is known that the client has left.
        return Asked(client, await asyncio.wrap_future(service.lane().submit(add)), asked)


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
    with http_errors.refusing(asked.fields.sent):
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
            said = http_errors.body(error.status_code, error.detail)
            yield f"event: error\ndata: {json.dumps(said)}\n\n"
        finally:
            asked.ticket.cancel()

    headers = {"Cache-Control": "no-cache"}
    return responses.StreamingResponse(written(), 200, headers, "text/event-stream")


def remark(ticket: Ticket) -> str:
    """Returns what is said before an answer to other words than the user's; "" if nothing is.

    Most clients show nothing but the answer.
    """
    one = ticket.requests[0]
    if not one.warning or (one.images and not one.asked):
        return ""
    return f"{one.warning[:1].upper()}{one.warning[1:]} "


def notes(ticket: Ticket, result: Result) -> dict[str, Any]:
    """Returns what has no field in OpenAI's responses."""
    warning = ticket.requests[0].warning
    return {
        "warnings": [warning] if warning else [],
        "seeds": list(result.seeds),
        "layouts": list(result.layouts),
        "seconds": round(ticket.seconds, 4),
        "tokens_passed": sum(result.passed),
        "layout_tokens_passed": sum(result.layout_passed),
        **({"verdicts": list(result.texts), "tries": list(result.tries)} if result.tries else {}),
        "batch": ticket.batch,
    }
