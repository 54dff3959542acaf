# SPDX-License-Identifier: Apache-2.0
"""What commands say on a terminal: sentences and progress bars."""

import contextlib
import datetime
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import rich.console
import rich.progress

FAILURE = 1  # the exit code of what the machine could not do
_LONG = re.compile(r"(\S{600})\S{20,}")  # a name that no file has, or a number
LINE_SECONDS = 10  # between two lines of progress without a terminal


def say(sentence: str) -> None:
    """Writes a sentence to stderr, prefixed with the name of the program; cuts very long words."""
    shown = _LONG.sub(r"\1...", sentence).encode(errors="backslashreplace").decode()
    print(f"sparse_lavida_jax: {shown}", file=sys.stderr)


def say_json(values: Any) -> None:
    """Prints a line of JSON, with escapes for all but ASCII if the output cannot encode it."""
    line = json.dumps(values, ensure_ascii=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(values)
    print(line)


@contextlib.contextmanager
def output_escaped() -> Iterator[None]:
    """Escapes what the output cannot encode, and writes all of it at the end.

    Raises:
        SystemExit: its reader has ended, such as `head`.
        OSError: it cannot be written.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        print(end="", flush=True)
    except OSError as error:
        try:
            print(end="", flush=True)
        except OSError:  # Python flushes once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(FAILURE) from None
        raise


class _Sayer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextlib.contextmanager
def warnings_said() -> Iterator[None]:
    """Says what the package logs, such as warnings about unknown words, and only once."""
    log, sayer = logging.getLogger("sparse_lavida_jax"), _Sayer(logging.WARNING)
    log.addHandler(sayer)
    before, log.propagate = log.propagate, False  # some library adds a handler to the root
    try:
        yield
    finally:
        log.removeHandler(sayer)
        log.propagate = before


@contextlib.contextmanager
def unsaid(module: str) -> Iterator[None]:
    """Keeps the warnings of a module from being said; also as a decorator."""
    log = logging.getLogger(module)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Suppresses remarks and progress if `wanted`; exceptions pass through."""
    if not wanted:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def progress(title: str, *, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Shows a progress bar on a terminal, and a line every ten seconds elsewhere.

    Yields a function that takes the amount done, the total, and optionally a new title.

    Args:
        in_bytes: whether the amounts are bytes; otherwise they are counts of items.
    """
    console = rich.console.Console(stderr=True)
    column = rich.progress.DownloadColumn() if in_bytes else rich.progress.MofNCompleteColumn()
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        column,
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        number = bar.add_task(title, total=None)
        last_line = time.monotonic()

        def update(done: int, total: int, title: str | None = None) -> None:
            nonlocal last_line
            bar.update(number, description=title, completed=done, total=total)
            if bar.disable and time.monotonic() - last_line >= LINE_SECONDS:
                last_line = time.monotonic()
                (task,) = bar.tasks
                reached = (
                    f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
                    if in_bytes
                    else f"{done} of {total}"
                )
                left = task.time_remaining
                ends = "" if left is None else f", {datetime.timedelta(seconds=round(left))} left"
                say(f"{task.description}: {reached}{ends}")

        yield update
