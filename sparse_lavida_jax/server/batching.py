# SPDX-License-Identifier: Apache-2.0
"""Requests on one device: which share a batch, which go first, and compiling in the background.

Waiting requests with one `batch_shapes.batching_key` are done together. Other batches take turns on
the device at the ends of their phases. A batch whose programs have not run yet releases
the device while it compiles and runs them, unless the model is split over several devices.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from sparse_lavida_jax import runtime
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.batch_shapes import SHARING, Bucket, batching_key
from sparse_lavida_jax.inference.regions import cell_rows
from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.inference.tasks import TaskRun
from sparse_lavida_jax.programs import compiling, persistent_jit
from sparse_lavida_jax.sampling.progress import Progress

CLOSE_SECONDS = 30.0  # the longest that closing waits for running phases
MOST_THREADS = 32  # batches under way, including those that wait for a compilation
MOST_COMPILING = 2  # at once
WAIT_SHARE = 0.25  # of a batch's running time: the longest to wait for further requests
MOST_KINDS = 256  # whose expected number of rows is remembered
EVERY = -1  # previews: one after every phase, of which only the last is kept
# Returns a result for requests, which has `tokens_passed`; reports its progress to the callback of
# the run.
Work = Callable[[TaskRun, Sequence[Request]], Any]


class QueueFull(Exception):
    """The queue is full; the message says so."""


class Stopped(Exception):
    """The service is stopping and takes no more requests; the message says so."""


class Cancelled(Exception):
    """The request was cancelled before it was done."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a request may ask for, and what the queue holds.

    Attributes:
        waiting: requests that may wait while others run.
        words: characters in a prompt.
        upload: bytes in an image file.
        pixels: in all images of a request (`image_files.cost`).
        rows: texts of a request, such as things to find.
        captions: of an image, whose bits are measured.
        images: images per request, all tries of each counted, and attempts at an image.
        new_tokens: tokens in an answer.
        longest_wait: the longest, in seconds, to wait for more requests while the device is free.
        together: batches of different kinds that take turns on the device; each has a cache.
        programs: batch shapes whose compiled programs are kept, besides those of the warm-up.
        only: (steps, registers) that requests for images may set besides the model's own, with no
            other setting that needs new programs; registers None: the model's own. None: any.
    """

    waiting: int = 64
    words: int = 4000
    upload: int = 16 * 2**20
    pixels: int = 2**28
    rows: int = 64
    captions: int = 8
    images: int = 10
    new_tokens: int = 1024
    longest_wait: float = 0.5
    together: int = 4
    programs: int = 32
    only: tuple[tuple[int, int | None], ...] | None = None


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request that waits, runs, and ends.

    Attributes:
        requests: its rows, all of one task.
        queue: all requests that have not ended, in order of arrival.
        looks: the largest number of previews, spread over the steps; or `EVERY`.
        came, began: when it arrived and when its batch began, in seconds of `time.monotonic`; None:
            it is still waiting.
        future: its result.
        state: the progress of the sampler; None before it starts.
        stages: the latest progress of each stage that decodes its rows, such as layout and image.
        compiles: whether its batch runs programs that have to be compiled first.
        previews: the first image with the cells decoded so far, oldest first.
        batch, start: the number of rows in its batch, and the index of its own first row there.
        seconds: from the start of its batch to the end.
        device, first: how many of these seconds its batch held the device, and how many it ran
            programs that had to be compiled first.
        compiled: how many of them something was being compiled.
        cancelled: whether the client no longer waits for the result.
        client: its address; "": not known.
        task: by default that of its requests.
        work: what is done instead of `SparseLaViDa.run`, which is then not done in a batch.
    """

    requests: Sequence[Request] = dataclasses.field(repr=False)
    queue: list["Ticket"] = dataclasses.field(repr=False)
    looks: int = 0
    came: float = dataclasses.field(default_factory=time.monotonic, repr=False)
    began: float | None = None
    future: concurrent.futures.Future[Any] = dataclasses.field(
        default_factory=concurrent.futures.Future, repr=False
    )
    state: Progress | None = dataclasses.field(default=None, repr=False)
    stages: tuple[Progress, ...] = dataclasses.field(default=(), repr=False)
    compiles: bool = dataclasses.field(default=False, repr=False)
    previews: tuple[image_files.Pixels, ...] = dataclasses.field(default=(), repr=False)
    batch: int = 0
    start: int = dataclasses.field(default=0, repr=False)
    seconds: float = 0.0
    device: float = dataclasses.field(default=0.0, repr=False)
    first: float = dataclasses.field(default=0.0, repr=False)
    compiled: float = dataclasses.field(default=0.0, repr=False)
    cancelled: bool = False
    client: str = dataclasses.field(default="", repr=False)
    task: str = dataclasses.field(default="", repr=False)
    work: Work | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        self.task = self.task or self.requests[0].task
        kinds = {batching_key(request) for request in self.requests}
        alone = any(request.turns for request in self.requests)  # branches of one image
        self.shares = self.work is None and self.task in SHARING and len(kinds) == 1 and not alone
        self.kind: Hashable = kinds.pop() if self.shares else self.task

    @property
    def ahead(self) -> int:
        """How many earlier requests have not ended; 0 once it runs."""
        queue = [*self.queue]  # which another thread may change
        return queue.index(self) if self.began is None and self in queue else 0

    @property
    def rows(self) -> range:
        """The indices of its rows in its batch."""
        return range(self.start, self.start + len(self.requests))

    def follow(self, state: Progress) -> None:
        """Keeps the progress of its batch."""
        self.state = state
        if not {*self.rows}.isdisjoint(state.rows):
            before = self.stages[:-1] if state.steps else self.stages
            self.stages = (*before, state)

    def wants_preview(self, state: Progress) -> bool:
        """Whether to make a preview after this phase."""
        if state.stage != "image" or not state.steps:
            return False
        parts, due = self.looks + 1, len(self.previews) + 1
        reached = state.total * due <= state.steps * parts < state.total * parts
        return self.looks == EVERY or (due < parts and reached)

    def cancel(self) -> None:
        """Ends it: at once if it waits, after the current phase if it runs."""
        self.cancelled = True
        self.future.cancel()

    def fail(self, error: Exception) -> None:
        """Ends it with an error, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(error)


# ---------------------------------------------------------------------------------------------
# The device.


class DeviceTurns:
    """Lets one batch at a time use the device.

    A batch keeps the device until it is done, or until it ends a phase while another batch with
    fewer steps left is waiting. When a batch is done, the longest-waiting one is next. So a short
    batch waits for one phase of a long one, and many short ones cannot hold up the long one.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: list[Batch] = []
        self._user: Batch | None = None
        self._since = 0.0

    def take(self, batch: "Batch") -> None:
        """Waits until this batch gets the device."""
        with self._changed:
            self._waiting.append(batch)
            if self._user is None:
                self._hand(batch)
            self._changed.wait_for(lambda: self._user is batch)

    def give(self) -> None:
        """Hands the device to the batch that has waited longest."""
        with self._changed:
            self._hand(self._waiting[0] if self._waiting else None)

    def offer(self, batch: "Batch") -> None:
        """Lets a batch with fewer steps left go first, if `batch` holds the device."""
        with self._changed:
            first = min(self._waiting, key=lambda other: other.left, default=batch)
            if self._user is batch and first.left < batch.left:
                self._waiting.append(batch)
                self._hand(first)
                self._changed.wait_for(lambda: self._user is batch)

    def _hand(self, batch: "Batch | None") -> None:
        if batch is not None:
            self._waiting.remove(batch)
        now = time.monotonic()
        if self._user is not None:
            self._user.on_device += now - self._since
        self._user, self._since = batch, now
        self._changed.notify_all()


class Batch:
    """Requests that are being done together.

    Args:
        tickets: all of one kind.
        batcher: the queue they come from.
        bucket, watch: see `Batcher.rehearse`.

    Attributes:
        left: steps left; 0 until that is known.
        on_device: seconds during which it held the device.
        first: seconds during which it ran programs that had to be compiled first.
        keys: of its programs (`persistent_jit.Programs`).
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        batcher: "Batcher",
        bucket: Bucket | None = None,
        watch: Callable[[Progress], None] = lambda _: None,
    ):
        self.tickets, self.batcher = tickets, batcher
        self.pipe, self.device = batcher.pipe, batcher.device
        self.bucket, self.watch = bucket, watch
        self.keys: set[Hashable] = set()
        self.left = 0
        self.on_device = self.first = 0.0

    def run(self) -> None:
        """Does them; if that fails, does each alone, so that only the faulty one gets the error."""
        requests = [request for ticket in self.tickets for request in ticket.requests]
        start, failure = 0, None
        for ticket in self.tickets:
            ticket.batch, ticket.start, ticket.stages = len(requests), start, ()
            start += len(ticket.requests)
        self.device.take(self)
        try:
            result = self._result(requests)
        except Exception as error:
            failure = error
        finally:
            self.device.give()
        if failure is None:
            for ticket in self.tickets:
                self._measure(ticket)
                if not ticket.future.done():
                    part = result if ticket.work else result.part(ticket.start, ticket.rows.stop)
                    ticket.future.set_result(part)
        elif len(self.tickets) == 1 or isinstance(failure, Cancelled):
            for ticket in self.tickets:
                self._measure(ticket)
                ticket.fail(failure)
        else:
            for ticket in self.tickets:
                if not ticket.future.done():
                    Batch([ticket], self.batcher).run()

    def _result(self, requests: Sequence[Request]) -> Any:
        how: dict[str, Any] = {"padding": "served", "programs": self._programs}
        work = self.tickets[0].work
        if work is None:
            return self.pipe.run(requests, self._look, bucket=self.bucket, **how)
        return work(self.pipe.task_run(requests[0].sampling, self._look, **how), requests)

    def _measure(self, ticket: Ticket) -> None:
        assert ticket.began is not None
        ticket.seconds = time.monotonic() - ticket.began
        ticket.device, ticket.first = self.on_device, self.first
        ticket.compiled = compiling.seconds(ticket.began)

    def _look(self, state: Progress) -> None:
        """Updates the progress of the tickets, and lets other batches use the device."""
        self.watch(state)
        self.left = state.total - state.steps
        for ticket in self.tickets:
            if ticket.cancelled:
                done = f"{state.steps} of {state.total} steps of the {state.stage}"
                ticket.fail(Cancelled(f"cancelled after {done}."))
                continue
            ticket.follow(state)
            if ticket.start in state.rows and ticket.wants_preview(state):
                cells = state.responses[state.rows.index(ticket.start)]
                rows = cell_rows(len(cells), ticket.requests[0].size)
                kept = () if ticket.looks == EVERY else ticket.previews
                ticket.previews = (*kept, self.pipe.preview(cells, rows))
        if all(ticket.cancelled for ticket in self.tickets):
            raise Cancelled("nobody waits for it any more.")
        self.device.offer(self)

    def _add_first(self, began: float) -> None:
        self.first += time.monotonic() - began

    @contextlib.contextmanager
    def _programs(self, key: Hashable) -> Iterator[None]:
        """Leaves the device to others while it runs programs that have to be compiled first.

        A mesh is not left to others: two programs that wait for other devices may never end.
        """
        known = self.batcher.known
        self.keys.add(key)
        with contextlib.ExitStack() as stack:
            if key not in known:
                if self.pipe.mesh is None:
                    self.device.give()
                    stack.callback(self.device.take, self)
                    stack.enter_context(self.batcher.beside(self.tickets[0].kind, key))
                if key in known:  # another batch compiled it in the meantime
                    stack.close()
                else:
                    stack.callback(self._add_first, time.monotonic())
                    for ticket in self.tickets:
                        ticket.compiles = True
            yield
            if key not in known:
                runtime.return_freed_memory()
            known.add(key)
            self.batcher.kept.add(key)


# ---------------------------------------------------------------------------------------------
# The queue.


class Batcher:
    """The queue of a model: requests arrive one by one and are done in batches.

    Args:
        pipe: the `SparseLaViDa` that does them; its `batch_size` is the largest batch.
        limits: of the queue.
        ended: called with every request that has ended.

    Attributes:
        open: requests that have not ended, in order of arrival.
        device: what batches take turns on.
        known: keys of the programs that are in memory because they have run (`Programs`).
        kept: keys of all programs that ever ran: the folder of compiled programs has them.
        warm: keys of rehearsed programs, which stay in memory.
        stops: whether new requests are turned away.
    """

    def __init__(self, pipe: Any, limits: Limits, ended: Callable[[Ticket], None]):
        self.pipe, self.limits, self.ended = pipe, limits, ended
        self.open: list[Ticket] = []
        self.device = DeviceTurns()
        self.known: set[Hashable] = set()
        self.kept: set[Hashable] = set()
        self.warm: set[Hashable] = set()
        self._spared: set[persistent_jit.Program] = set()
        self.stops = False
        self._changed = threading.Condition()
        self._busy: collections.Counter[Hashable] = collections.Counter()  # those under way
        self._places: collections.Counter[str] = collections.Counter()  # being read, by client
        # For each kind, the rows expected in its next batch, and how many seconds to wait for them.
        self._expected: dict[Hashable, tuple[int, float]] = {}
        self._rehearsed: set[Ticket] = set()
        self._compiling = threading.BoundedSemaphore(MOST_COMPILING)
        self._workers = concurrent.futures.ThreadPoolExecutor(
            MOST_THREADS, thread_name_prefix="device"
        )

    @property
    def waiting(self) -> list[Ticket]:
        """The requests that wait."""
        return [ticket for ticket in [*self.open] if ticket.began is None]

    @property
    def running(self) -> bool:
        """Whether any request is running."""
        return any(ticket.began is not None for ticket in [*self.open])

    def take_place(self, client: str = "") -> None:
        """Reserves a place in the queue for a request being read; `leave_place` gives it back.

        Args:
            client: its address, which may have half of all places; "": may have all.

        Raises:
            QueueFull: too many requests wait already, in all or of this client.
            Stopped: no more requests are taken.
        """
        with self._changed:
            self._check_goes_on()
            # If nothing runs, the first request is about to start, and does not count as waiting.
            wait = len(self.waiting) + self._places.total() - (not self.running)
            if wait >= self.limits.waiting:
                raise QueueFull(
                    f"{wait} requests wait already and the queue is full: try again in a moment."
                )
            own = sum(ticket.client == client for ticket in self.waiting) + self._places[client]
            own -= not self.running
            if client and own >= max(1, self.limits.waiting // 2):
                raise QueueFull(
                    f"{own} requests of {client} wait already, half of the queue: try again in a"
                    " moment."
                )
            self._places[client] += 1

    def leave_place(self, client: str = "") -> None:
        """Gives a place back: its request is in the queue, or was refused."""
        with self._changed:
            self._places -= collections.Counter([client])  # subtraction drops counts of 0

    def _check_goes_on(self) -> None:
        if self.stops:
            raise Stopped("this server stops and takes nothing more: ask again in a minute.")

    def add(self, ticket: Ticket) -> None:
        """Adds a request that has a reserved place to the end of the queue.

        Raises:
            Stopped: no more requests are taken.
        """
        with self._changed:
            self._check_goes_on()
            self.open.append(ticket)
            ticket.future.add_done_callback(lambda _: self._close(ticket))
            self._workers.submit(self._work)
            self._changed.notify_all()

    def rehearse(
        self,
        requests: Sequence[Request],
        bucket: Bucket | None = None,
        watch: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Runs a batch that no client asked for, alongside the others, to make its programs.

        Args:
            bucket: shapes that images are padded to; by default those of the requests.
            watch: called with the progress; may raise an exception to end the batch.

        Raises:
            Exception: what `watch` raises, or the batch; Cancelled: the queue was closed.
        """
        ticket = Ticket(requests, [], EVERY, began=time.monotonic())
        ticket.future.set_running_or_notify_cancel()
        batch = Batch([ticket], self, bucket, watch)
        with self._changed:
            self._busy[ticket.kind] += 1
            self._rehearsed.add(ticket)
            ticket.cancelled = self.stops
        try:
            batch.run()
            ticket.future.result()
        finally:
            with self._changed:
                self._end(ticket)
                self._rehearsed.remove(ticket)
                self.warm |= batch.keys & self.known
                self._spared = persistent_jit.in_memory()

    def stop(self) -> None:
        """Takes no more requests and turns away those that wait; running ones continue."""
        with self._changed:
            self.stops = True
            for ticket in self._rehearsed:
                ticket.cancel()
            for ticket in self.waiting:
                if not ticket.cancelled and ticket.future.set_running_or_notify_cancel():
                    ticket.fail(Stopped("this server stops: ask again in a minute."))

    def close(self) -> None:
        """Cancels all requests and stops all work."""
        with self._changed:
            self.stops = True
            left = [*self.open, *self._rehearsed]
            for ticket in left:
                ticket.cancel()
        self._workers.shutdown(wait=False, cancel_futures=True)
        # Waiting requests are cancelled already; `wait` would never be notified of them.
        running = [ticket.future for ticket in left if not ticket.future.cancelled()]
        concurrent.futures.wait(running, CLOSE_SECONDS)

    def _close(self, ticket: Ticket) -> None:
        with self._changed:
            self.open.remove(ticket)
            self._changed.notify_all()
        self.ended(ticket)

    @contextlib.contextmanager
    def beside(self, kind: Hashable, key: Hashable) -> Iterator[None]:
        """Lets other batches, even of this kind, start while one compiles a program.

        Few compile at once. A program that is only loaded again does not wait for them.
        """
        with self._changed:
            self._busy -= collections.Counter([kind])
            if not self.stops:
                self._workers.submit(self._work)
        try:
            with contextlib.nullcontext() if key in self.kept else self._compiling:
                yield
        finally:
            with self._changed:
                self._busy[kind] += 1

    def _work(self) -> None:
        """Does batches until no waiting request can start."""
        while tickets := self._gather():
            try:
                Batch(tickets, self).run()
            finally:
                self._done(tickets)

    def _gather(self) -> list[Ticket]:
        """Returns the requests of the next batch, now marked as running; [] if none can start.

        It waits for further requests only where more are expected (`_done`).
        """
        with self._changed:
            while True:
                self._drop_programs()
                free = (ticket for ticket in self.waiting if ticket.kind not in self._busy)
                first = next(free, None)
                if first is None or self._busy.total() >= self.limits.together:
                    return []
                kind = first.kind
                self._busy[kind] += 1
                expected, wait = self._expected.get(kind, (0, 0.0))
                self._changed.wait_for(
                    lambda kind=kind, expected=expected: self._rows_of(kind) >= expected, wait
                )
                if batch := self._taken(kind):
                    return batch
                self._end(first)  # it was cancelled in the meantime

    def _end(self, ticket: Ticket) -> None:
        self._busy -= collections.Counter([ticket.kind])  # subtraction drops counts of 0
        self._changed.notify_all()

    def _rows_of(self, kind: Hashable) -> int:
        return sum(len(ticket.requests) for ticket in self.waiting if ticket.kind == kind)

    def _taken(self, kind: Hashable) -> list[Ticket]:
        """Takes requests of a kind out of the queue, up to the size of a batch."""
        taken, rows = [], 0
        for ticket in self.waiting:
            if ticket.kind != kind or ticket.cancelled:
                continue
            more = rows + len(ticket.requests)
            if taken and (not ticket.shares or more > self.pipe.batch_size):
                break
            if ticket.future.set_running_or_notify_cancel():
                ticket.began, rows = time.monotonic(), more
                taken.append(ticket)
        return taken

    def _done(self, tickets: Sequence[Ticket]) -> None:
        """Lets the next batch of a kind start, and sets how many rows it is expected to have.

        Clients that were just answered may ask again at once, and others are waiting already.
        """
        first, rows = tickets[0], sum(len(ticket.requests) for ticket in tickets)
        wait = min(self.limits.longest_wait, WAIT_SHARE * first.seconds)
        with self._changed:
            if len(self._expected) >= MOST_KINDS:
                self._expected.clear()
            if first.shares:
                most = min(rows + self._rows_of(first.kind), self.pipe.batch_size)
                self._expected[first.kind] = most, wait
            self._end(first)

    def _drop_programs(self) -> None:
        """Frees compiled programs if there are too many, except rehearsed ones.

        Otherwise their number and their memory would grow with every new setting that clients use.
        Batches under way load theirs again before their next phase, without holding the device.
        """
        if len(self.known - self.warm) >= self.limits.programs:
            persistent_jit.forget(self._spared)
            runtime.return_freed_memory()
            # Where jax holds the programs (`persistent_jit.PersistentJit`), they are all freed.
            self.known &= self.warm if self._spared else set()
