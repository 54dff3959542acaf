# SPDX-License-Identifier: Apache-2.0
"""Requests on one device: who shares a batch, who goes first, and who compiles beside the others.

Requests of one kind (`batches.kind_of`) that wait are done together. Batches of different kinds
take turns on the device at the ends of their segments. A batch whose programs never ran gives the
device away while it compiles and runs them.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax

from sparse_lavida_jax.apps.tasks import cell_rows
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.batches import SHARING, kind_of
from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.sample import Progress

CLOSE_SECONDS = 30.0  # most that closing waits for the segments that run
MOST_THREADS = 32  # batches that are begun, those that wait for a compilation among them
MOST_COMPILING = 2  # at once
WAIT_SHARE = 0.25  # of the seconds of a batch: what waiting for company may cost
MOST_KINDS = 256  # of which it is known how many rows are expected
EVERY = -1  # previews: one after every segment, of which the last is kept


class QueueFull(Exception):
    """The queue is full; the message says so."""


class Stopped(Exception):
    """The service stops and takes nothing more; the message says so."""


class Cancelled(Exception):
    """The request was cancelled before it was done."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a request may ask for, and what the queue holds.

    Attributes:
        waiting: requests that wait while others run.
        words: characters of a prompt.
        upload: bytes of an image file.
        images: images of one request, and attempts at one.
        new_tokens: of one answer.
        longest_wait: seconds that a request waits for company though the device is free, at most.
        together: batches of different kinds that take turns on the device; each has a cache.
        programs: batches of different shapes whose compiled programs are kept.
        only: steps and registers of images that may be asked for besides the model's own, and
            nothing else that needs programs; registers None: the model's own. None: any.
    """

    waiting: int = 64
    words: int = 4000
    upload: int = 16 * 2**20
    images: int = 10
    new_tokens: int = 1024
    longest_wait: float = 0.5
    together: int = 4
    programs: int = 64
    only: tuple[tuple[int, int | None], ...] | None = None


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request that waits, runs, and ends.

    Attributes:
        requests: its rows, all of one task.
        queue: all requests that have not ended, in the order in which they came.
        looks: how many previews to make at most, spread over the steps; or `EVERY`.
        came, began: when it came, and when its batch began, in seconds of `time.monotonic`; None:
            it waits.
        future: its result.
        state: how far the sampler is; None before it starts.
        previews: the first image with the cells that are decoded so far, oldest first.
        batch, start: rows of its batch, its own among them, and which is its first.
        seconds: from the beginning of its batch to the end.
        device, first: of them, how long its batch had the device, and how long it ran programs
            that had to be compiled first.
        cancelled: whether nobody waits for the result any more.
    """

    requests: Sequence[Request] = dataclasses.field(repr=False)
    queue: list["Ticket"] = dataclasses.field(repr=False)
    looks: int = 0
    came: float = dataclasses.field(default_factory=time.monotonic, repr=False)
    began: float | None = None
    future: concurrent.futures.Future[Result] = dataclasses.field(
        default_factory=concurrent.futures.Future, repr=False
    )
    state: Progress | None = dataclasses.field(default=None, repr=False)
    previews: tuple[image_files.Pixels, ...] = dataclasses.field(default=(), repr=False)
    batch: int = 0
    start: int = dataclasses.field(default=0, repr=False)
    seconds: float = 0.0
    device: float = dataclasses.field(default=0.0, repr=False)
    first: float = dataclasses.field(default=0.0, repr=False)
    cancelled: bool = False

    def __post_init__(self):
        kinds = {kind_of(request) for request in self.requests}
        self.shares = self.task in SHARING and len(kinds) == 1
        self.kind: Hashable = kinds.pop() if self.shares else self.task

    @property
    def task(self) -> str:
        """What is asked for."""
        return self.requests[0].task

    @property
    def ahead(self) -> int:
        """How many requests came before it and have not ended; 0 once it runs."""
        queue = [*self.queue]  # which another thread may change
        return queue.index(self) if self.began is None and self in queue else 0

    def wants_preview(self, state: Progress) -> bool:
        """Whether to make a preview between these segments."""
        if state.making != "image" or not state.steps:
            return False
        parts, due = self.looks + 1, len(self.previews) + 1
        reached = state.total * due <= state.steps * parts < state.total * parts
        return self.looks == EVERY or (due < parts and reached)

    def cancel(self) -> None:
        """Ends it: at once if it waits, after the present segment if it runs."""
        self.cancelled = True
        self.future.cancel()

    def fail(self, error: Exception) -> None:
        """Ends it with an error, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(error)


# ---------------------------------------------------------------------------------------------
# The device.


class Device:
    """Lets one batch at a time use the device.

    A batch keeps it until it is done, or until one of its segments has ended and another one waits
    that has fewer steps left. After a batch that is done comes the one that waits longest. So a
    short batch waits for one segment of a long one, and many short ones do not stop the long one.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: list[Batch] = []
        self._user: Batch | None = None
        self._since = 0.0

    def take(self, batch: "Batch") -> None:
        """Waits until the device is the batch's."""
        with self._changed:
            self._waiting.append(batch)
            if self._user is None:
                self._hand(batch)
            self._changed.wait_for(lambda: self._user is batch)

    def give(self) -> None:
        """Gives it to the one that waits longest."""
        with self._changed:
            self._hand(self._waiting[0] if self._waiting else None)

    def offer(self, batch: "Batch") -> None:
        """Lets a shorter batch go first, if the device is this one's."""
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
    """Requests that are done together, on their way.

    Args:
        tickets: of one kind.
        batcher: that they were given to.

    Attributes:
        left: steps to do; 0 while that is not known.
        on_device: seconds that it had the device.
        first: seconds that it ran programs that had to be compiled first.
    """

    def __init__(self, tickets: Sequence[Ticket], batcher: "Batcher"):
        self.tickets, self.batcher = tickets, batcher
        self.pipe, self.device = batcher.pipe, batcher.device
        self.left = 0
        self.on_device = self.first = 0.0

    def run(self) -> None:
        """Does them; if that fails, each alone, so that an error reaches who asked and no other."""
        requests = [request for ticket in self.tickets for request in ticket.requests]
        for ticket, start in self._firsts():
            ticket.batch, ticket.start = len(requests), start
        self.device.take(self)
        try:
            how = {"padding": "served", "programs": self._programs}
            result = self.pipe.run(requests, self._look, **how)
        except Exception as error:
            failure = error
        else:
            failure = None
        finally:
            self.device.give()
        if failure is None:
            for ticket, start in self._firsts():
                self._measure(ticket)
                if not ticket.future.done():
                    ticket.future.set_result(result.part(start, start + len(ticket.requests)))
        elif len(self.tickets) == 1 or isinstance(failure, Cancelled):
            for ticket in self.tickets:
                self._measure(ticket)
                ticket.fail(failure)
        else:
            for ticket in self.tickets:
                if not ticket.future.done():
                    Batch([ticket], self.batcher).run()

    def _measure(self, ticket: Ticket) -> None:
        assert ticket.began is not None
        ticket.seconds = time.monotonic() - ticket.began
        ticket.device, ticket.first = self.on_device, self.first

    def _firsts(self) -> Iterator[tuple[Ticket, int]]:
        """Yields each ticket and the number of its first row."""
        start = 0
        for ticket in self.tickets:
            yield ticket, start
            start += len(ticket.requests)

    def _look(self, state: Progress) -> None:
        """Tells the tickets how far they are, and lets others use the device."""
        self.left = state.total - state.steps
        for ticket, start in self._firsts():
            if ticket.cancelled:
                done = f"{state.steps} of {state.total} steps of the {state.making}"
                ticket.fail(Cancelled(f"cancelled after {done}."))
                continue
            ticket.state = state
            if start in state.rows and ticket.wants_preview(state):
                cells = state.canvas[state.rows.index(start)]
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
        """Leaves the device to others while programs run that have to be compiled first."""
        known = self.batcher.known
        with contextlib.ExitStack() as stack:
            if key not in known:
                self.device.give()
                stack.callback(self.device.take, self)
                stack.enter_context(self.batcher.beside(self.tickets[0].kind))
                if key in known:  # somebody compiled it meanwhile
                    stack.close()
                else:
                    stack.callback(self._add_first, time.monotonic())
            yield
            known.add(key)


# ---------------------------------------------------------------------------------------------
# The queue.


class Batcher:
    """The queue of a model: requests come one by one, and are done in batches.

    Args:
        pipe: does them, a `SparseLaViDa`; its `batch_size` is the largest batch.
        limits: of the queue.
        ended: called with every request that has ended.

    Attributes:
        open: requests that have not ended, in the order in which they came.
        device: that batches take turns on.
        known: what chooses programs that have run (`engine.Programs`).
        stops: whether nothing more is taken.
    """

    def __init__(self, pipe: Any, limits: Limits, ended: Callable[[Ticket], None]):
        self.pipe, self.limits, self.ended = pipe, limits, ended
        self.open: list[Ticket] = []
        self.device = Device()
        self.known: set[Hashable] = set()
        self.stops = False
        self._changed = threading.Condition()
        self._busy: collections.Counter[Hashable] = collections.Counter()  # kinds on the device
        self._begun = 0  # batches, those that compile among them
        self._places = 0  # taken by requests that are read
        # Rows of the next batch of each kind, and seconds to wait for them.
        self._expected: dict[Hashable, tuple[int, float]] = {}
        self._rehearsed: set[Ticket] = set()
        self._compiling = threading.BoundedSemaphore(MOST_COMPILING)
        self._workers = concurrent.futures.ThreadPoolExecutor(
            MOST_THREADS, thread_name_prefix="device"
        )

    @property
    def waiting(self) -> list[Ticket]:
        """Requests that wait."""
        return [ticket for ticket in [*self.open] if ticket.began is None]

    @property
    def running(self) -> bool:
        """Whether the device is at work."""
        return any(ticket.began is not None for ticket in [*self.open])

    def take_place(self) -> None:
        """Takes a place in the queue for a request that is read; `leave_place` gives it back.

        Raises:
            QueueFull: too many wait already.
            Stopped: nothing more is taken.
        """
        with self._changed:
            self._check_goes_on()
            # The first one of an idle device is about to begin.
            wait = len(self.waiting) + self._places - (not self.running)
            if wait >= self.limits.waiting:
                raise QueueFull(
                    f"{wait} requests wait already and the queue is full: try again in a moment."
                )
            self._places += 1

    def leave_place(self) -> None:
        """Gives a place back: its request is in the queue, or was refused."""
        with self._changed:
            self._places -= 1

    def _check_goes_on(self) -> None:
        if self.stops:
            raise Stopped("this server stops and takes nothing more: ask again in a minute.")

    def add(self, ticket: Ticket) -> None:
        """Adds a request, which has a `place`, to the end of the queue.

        Raises:
            Stopped: nothing more is taken.
        """
        with self._changed:
            self._check_goes_on()
            self.open.append(ticket)
            ticket.future.add_done_callback(lambda _: self._close(ticket))
            self._workers.submit(self._work)
            self._changed.notify_all()

    def rehearse(self, requests: Sequence[Request]) -> None:
        """Does a batch that nobody asked for, beside the others, so that its programs have run.

        Raises:
            Cancelled: the work ended meanwhile.
        """
        ticket = Ticket(requests, [], began=time.monotonic())
        ticket.future.set_running_or_notify_cancel()
        with self._changed:
            self._begin(ticket)
            self._rehearsed.add(ticket)
            ticket.cancelled = self.stops
        try:
            Batch([ticket], self).run()
            ticket.future.result()
        finally:
            with self._changed:
                self._end(ticket)
                self._rehearsed.remove(ticket)

    def stop(self) -> None:
        """Takes nothing more, and turns away what waits; what runs goes on."""
        with self._changed:
            self.stops = True
            for ticket in self.waiting:
                if not ticket.cancelled and ticket.future.set_running_or_notify_cancel():
                    ticket.fail(Stopped("this server stops: ask again in a minute."))

    def close(self) -> None:
        """Cancels all requests and ends the work."""
        with self._changed:
            self.stops = True
            left = [*self.open, *self._rehearsed]
            for ticket in left:
                ticket.cancel()
        self._workers.shutdown(wait=False, cancel_futures=True)
        # Those that waited are cancelled already; `wait` would never hear of them.
        running = [ticket.future for ticket in left if not ticket.future.cancelled()]
        concurrent.futures.wait(running, CLOSE_SECONDS)

    def _close(self, ticket: Ticket) -> None:
        with self._changed:
            self.open.remove(ticket)
            self._changed.notify_all()
        self.ended(ticket)

    @contextlib.contextmanager
    def beside(self, kind: Hashable) -> Iterator[None]:
        """Lets other batches begin, also of this kind, while one compiles; few compile at once."""
        with self._changed:
            self._busy -= collections.Counter([kind])
            if not self.stops:
                self._workers.submit(self._work)
        try:
            with self._compiling:
                yield
        finally:
            with self._changed:
                self._busy[kind] += 1

    def _work(self) -> None:
        """Does batches until none waits that could begin."""
        while tickets := self._gather():
            try:
                Batch(tickets, self).run()
            finally:
                self._done(tickets)

    def _gather(self) -> list[Ticket]:
        """Returns requests that are done together from now on; none where none could begin.

        They wait for company only where more are expected (`_done`).
        """
        with self._changed:
            while True:
                self._drop_programs()
                free = (ticket for ticket in self.waiting if ticket.kind not in self._busy)
                first = next(free, None)
                if first is None or self._busy.total() >= self.limits.together:
                    return []
                kind = first.kind
                self._begin(first)
                expected, wait = self._expected.get(kind, (0, 0.0))
                self._changed.wait_for(
                    lambda kind=kind, expected=expected: self._rows_of(kind) >= expected, wait
                )
                if batch := self._taken(kind):
                    return batch
                self._end(first)  # cancelled meanwhile

    def _begin(self, ticket: Ticket) -> None:
        self._busy[ticket.kind] += 1
        self._begun += 1

    def _end(self, ticket: Ticket) -> None:
        self._busy -= collections.Counter([ticket.kind])  # what is 0 is left out
        self._begun -= 1
        self._changed.notify_all()

    def _rows_of(self, kind: Hashable) -> int:
        return sum(len(ticket.requests) for ticket in self.waiting if ticket.kind == kind)

    def _taken(self, kind: Hashable) -> list[Ticket]:
        """Takes requests of a kind out of the queue, as many as a batch holds."""
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
        """Lets the next batch of a kind begin, and says how many rows it may have.

        Who was answered may ask again at once, and who came meanwhile is there already.
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
        """Frees all compiled programs if there are too many; no batch runs then.

        Their number and their memory would grow with every new setting that somebody asks for.
        """
        if len(self.known) < self.limits.programs:
            return
        self._changed.wait_for(lambda: not self._begun)
        if len(self.known) >= self.limits.programs:  # unless another thread was first
            jax.clear_caches()
            self.known.clear()
