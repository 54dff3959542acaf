# SPDX-License-Identifier: Apache-2.0
"""One model and its queue: one request at a time, limits on requests, cancelling at any segment.

    service = Service(SparseLaViDa.from_pretrained("scenes"))
    ticket = service.submit("generate", "a red circle above a blue square", seed=3)
    print(ticket.ahead, ticket.future.result().image)

The page (`apps/demo.py`) and the server (`apps/server.py`) are built on this; it needs no package
besides ours.
"""

import base64
import binascii
import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

from sparse_lavida_jax.apps.errors import REFUSED
from sparse_lavida_jax.apps.tasks import cell_rows
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.templates import RequestError, check_words
from sparse_lavida_jax.inference.requests import Request, Shown
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sample import Progress

CLOSE_SECONDS = 30.0  # most that closing waits for the segment that runs


class QueueFull(Exception):
    """The queue is full; the message says so."""


class Cancelled(Exception):
    """The request was cancelled before it was done."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a request may ask for.

    Attributes:
        waiting: requests that wait while one runs.
        words: characters of a prompt.
        upload: bytes of an image file.
        images: images of one request, and attempts at one.
        new_tokens: of one answer.
    """

    waiting: int = 8
    words: int = 4000
    upload: int = 16 * 2**20
    images: int = 4
    new_tokens: int = 1024


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request that waits, runs, and ends.

    Attributes:
        task: what is asked for.
        queue: all requests that have not ended, the one that runs first.
        future: its result.
        began: when it came to the device, in seconds of `time.monotonic`; None: it waits.
        state: how far the sampler is; None before it starts.
        preview: the first image with the cells that are decoded so far, if asked for.
        seconds: on the device, in the end.
        cancelled: whether nobody waits for the result any more.
    """

    task: str
    queue: list["Ticket"] = dataclasses.field(repr=False)
    future: concurrent.futures.Future[Result] = dataclasses.field(init=False, repr=False)
    began: float | None = None
    state: Progress | None = dataclasses.field(default=None, repr=False)
    preview: image_files.Pixels | None = dataclasses.field(default=None, repr=False)
    seconds: float = 0.0
    cancelled: bool = False

    @property
    def ahead(self) -> int:
        """How many requests come before it, with the one that runs; 0 once it runs."""
        queue = [*self.queue]  # which another thread may change
        return queue.index(self) if self in queue else 0

    def cancel(self) -> None:
        """Ends it: at once if it waits, after the present segment if it runs."""
        self.cancelled = True
        self.future.cancel()


class Service:
    """A model, its queue, and counts of what was done so far.

    Args:
        pipe: does the tasks, one request at a time.
        limits: on requests.

    Attributes:
        counts: ended requests by (task, outcome); outcomes are done, refused, cancelled, failed.
        tokens, seconds: of the requests that were done, by task.
    """

    def __init__(self, pipe: SparseLaViDa, limits: Limits | None = None):
        self.pipe = pipe
        self.limits = limits or Limits()
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.tokens: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._device = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="device")
        self._lock = threading.Lock()
        self._open: list[Ticket] = []

    def submit(
        self,
        task: str,
        words: str | Sequence[str] | None = None,
        shown: Shown | None = None,
        *,
        preview: bool = False,
        **options: Any,
    ) -> Ticket:
        """Adds a request to the end of the queue.

        Args:
            task, words, shown, options: see `SparseLaViDa.requests`.
            preview: whether to look at the image between segments, which costs a decoding.

        Raises:
            one of errors.REFUSED: it cannot be done, or asks for more than the limits allow.
            QueueFull: too many requests wait already.
        """
        self._check(words, options)
        try:
            requests = self.pipe.requests(task, words, shown, **options)
        except REFUSED:
            with self._lock:
                self.counts[task, "refused"] += 1
            raise
        ticket = Ticket(task, self._open)
        with self._lock:
            if len(self._open) > self.limits.waiting:
                raise QueueFull(
                    f"{len(self._open) - 1} requests wait already and the queue is full: try again"
                    " in a moment."
                )
            self._open.append(ticket)
            ticket.future = self._device.submit(self._do, ticket, requests, preview)
        ticket.future.add_done_callback(lambda _: self._close(ticket))
        return ticket

    @property
    def waiting(self) -> int:
        """How many requests wait, without the one that runs."""
        with self._lock:
            return sum(ticket.began is None for ticket in self._open)

    @property
    def running(self) -> bool:
        """Whether the device is at work."""
        with self._lock:
            return any(ticket.began is not None for ticket in self._open)

    def close(self) -> None:
        """Cancels all requests and ends the work."""
        with self._lock:
            left = list(self._open)
        for ticket in left:
            ticket.cancel()
        self._device.shutdown(wait=False, cancel_futures=True)
        # Those that waited are cancelled already; `wait` would never hear of them.
        running = [ticket.future for ticket in left if not ticket.future.cancelled()]
        concurrent.futures.wait(running, CLOSE_SECONDS)

    def image(self, contents: bytes, name: str = "the image") -> image_files.Pixels:
        """Returns the pixels of an uploaded file.

        Raises:
            ImageError: it is too large, or no image (`image_files.read`).
        """
        if len(contents) > self.limits.upload:
            raise image_files.ImageError(
                f"{name} has {len(contents)} bytes: at most {self.limits.upload} are taken. Make it"
                " smaller."
            )
        return image_files.read_bytes(contents, name)

    def image_of_uri(self, uri: str) -> image_files.Pixels:
        """Returns the pixels of an image in a data URI; nothing is ever fetched.

        Raises:
            ImageError: a remote address, another URI, too large, or no image.
        """
        kind, comma, payload = uri.partition(",")
        if not (kind.startswith("data:image/") and kind.endswith(";base64") and comma):
            raise image_files.ImageError(
                f"an image at {uri[:60]!r} is not fetched: send the image itself, as"
                " data:image/png;base64,..."
            )
        try:
            return self.image(base64.b64decode(payload, validate=True))
        except binascii.Error as error:
            raise image_files.ImageError(f"the data URI is no base64: {error}.") from error

    def _check(self, words: str | Sequence[str] | None, options: dict[str, Any]) -> None:
        texts = [] if words is None else [words] if isinstance(words, str) else list(words)
        if options.get("template") is not None:
            texts.append(options["template"])
        for text in texts:
            if len(check_words(text)) > self.limits.words:
                raise RequestError(
                    f"the prompt has {len(text)} characters: at most {self.limits.words} are taken."
                )
        for name, most in (
            ("num_images", self.limits.images),
            ("rounds", self.limits.images),
            ("max_new_tokens", self.limits.new_tokens),
        ):
            asked = options.get(name)
            if asked is not None and not 1 <= asked <= most:
                raise RequestError(f"{name}={asked} is out of range: 1 to {most}.")

    def _do(self, ticket: Ticket, requests: Sequence[Request], preview: bool) -> Result:
        """Does a request, in the one thread of the device."""
        ticket.began = time.monotonic()

        def look(state: Progress) -> None:
            ticket.state = state
            if ticket.cancelled:
                raise Cancelled(
                    f"cancelled after {state.steps} of {state.total} steps of the {state.making}."
                )
            if preview and state.making == "image" and state.steps:
                cells = state.canvas[0]
                ticket.preview = self.pipe.preview(cells, cell_rows(len(cells), requests[0].size))

        try:
            return self.pipe.run(requests, callback=look)
        finally:
            ticket.seconds = time.monotonic() - ticket.began

    def _close(self, ticket: Ticket) -> None:
        with self._lock:
            self._open.remove(ticket)
            outcome = _outcome(ticket.future)
            self.counts[ticket.task, outcome] += 1
            if outcome == "done":
                self.tokens[ticket.task] += ticket.future.result().tokens_passed
                self.seconds[ticket.task] += ticket.seconds


def _outcome(future: concurrent.futures.Future[Result]) -> str:
    error = None if future.cancelled() else future.exception()
    if future.cancelled() or isinstance(error, Cancelled):
        return "cancelled"
    if error is None:
        return "done"
    return "refused" if isinstance(error, REFUSED) else "failed"
