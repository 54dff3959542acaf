# SPDX-License-Identifier: Apache-2.0
"""Compiles programs side by side.

XLA compiles a program mostly in one thread, and without Python's lock. Programs that are compiled
one after another take the sum of their times; side by side, about the time of the longest.
"""

import concurrent.futures
import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from sparse_lavida_jax import runtime
from sparse_lavida_jax.programs import jax_settings

MOST_THREADS = 16
WAIT_S = 0.2  # between looks for Ctrl-C
QUIET_S = 2.0  # without a line of progress

T = TypeVar("T")
Future = concurrent.futures.Future

_ahead: bool | None = None
_show: Callable[[str], None] | None = None


def are_made_ahead() -> bool:
    """Whether all programs of a request are made before the first one runs: not on CPUs.

    There small programs are the fastest to compile, and several share few cores.
    """
    return jax.default_backend() != "cpu" if _ahead is None else _ahead


def make_ahead(ahead: bool | None) -> None:
    """Sets `are_made_ahead` for this process; None: by the platform."""
    global _ahead
    _ahead = ahead


def start(make: Callable[[], T]) -> "Future[T]":
    """Runs a function, such as the compilation of a lowered program, in another thread."""
    return _threads().submit(jax_settings.options()(make))


def wait(futures: "Sequence[Future]", progress: "ProgressLine | None" = None) -> None:
    """Waits for functions, or for Ctrl-C; their errors are not raised."""
    waiting = set(futures)
    try:
        while waiting:
            _, waiting = concurrent.futures.wait(waiting, WAIT_S)
            if progress is not None:
                progress.show(futures)
            runtime.check_interrupt()
    finally:
        for one in waiting:
            one.cancel()


@contextlib.contextmanager
def progress_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Gives each line of progress to a function, such as that of a progress bar."""
    global _show
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before


class ProgressLine:
    """One line on a terminal, such as "compiling: program 3 of 7, 12 s", after `QUIET_S`.

    Elsewhere, where a line cannot be written over, one is written when all is done.
    """

    def __init__(self, number: int, what: str = "compiling"):
        self.number, self.what = number, what
        self._begin, self._shown = time.monotonic(), ""
        self._overwrites = sys.stderr.isatty()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._shown and _show is None:
            seconds = time.monotonic() - self._begin
            told = f"{self.what}: {self.number} programs, {seconds:.0f} s"
            print(f"\r{told:{len(self._shown)}}" if self._overwrites else told, file=sys.stderr)

    def show(self, futures: "Sequence[Future]") -> None:
        """Shows how many are done."""
        seconds = time.monotonic() - self._begin
        if seconds < QUIET_S:
            return
        done = sum(future.done() for future in futures)
        now = f"{self.what}: program {min(done + 1, self.number)} of {self.number}, {seconds:.0f} s"
        if now != self._shown and _show is not None:
            _show(now)
        elif now != self._shown and self._overwrites:
            print(f"\r{now}", end="", file=sys.stderr, flush=True)
        self._shown = now


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Puts the collection of garbage off: tracing makes many objects, and nearly all stay."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    number = min(MOST_THREADS, os.cpu_count() or 1)
    return concurrent.futures.ThreadPoolExecutor(number, thread_name_prefix="compile")
