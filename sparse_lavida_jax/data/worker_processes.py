# SPDX-License-Identifier: Apache-2.0
"""Processes that make the items of a dataset.

Arrays pass through anonymous files in memory, one per item that a process may be ahead. They need
no room in /dev/shm, which has 64 MB in a container, and vanish however a run ends.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import connection, reduction
from typing import Any

import jax
import numpy as np
from absl import flags

from sparse_lavida_jax import runtime

MOST = 16  # processes, unless a number is given
AHEAD = 2  # items that a process makes before they are taken


def default_number() -> int:
    """Returns how many processes suit this machine: none for a CPU, else most of the cores.

    A thread would share Python's lock with the loop that an accelerator waits for.
    """
    if jax.default_backend() == "cpu":
        return 0
    return max(1, min(MOST, len(os.sched_getaffinity(0)) - 2))


class WorkerProcesses:
    """Processes that make the items of a dataset from `begin` on, in turn.

    They ignore SIGINT and SIGTERM, which a terminal or `timeout` sends to them too, and end with
    this process, however it ends.

    Args:
        items: an indexable object that can be pickled; an item is a tree of NumPy arrays.
    """

    def __init__(self, items: Any, begin: int, count: int):
        self._next, self._workers = begin, list[_Worker]()
        atexit.register(self.close)  # before multiprocessing waits for all processes
        with _stop_signals_blocked():
            for _ in range(count):
                self._workers.append(_Worker(items))
        for index in range(begin, begin + AHEAD * count):
            self._ask(index)

    def __next__(self) -> Any:
        """Returns the next item, or raises the error of making it.

        Raises:
            ProcessError: the process that was making it has died.
        """
        turn, number = divmod(self._next, len(self._workers))
        item = self._workers[number].receive(turn)
        self._ask(self._next + AHEAD * len(self._workers))
        self._next += 1
        return item

    def _ask(self, index: int) -> None:
        turn, number = divmod(index, len(self._workers))
        self._workers[number].ask(index, turn)

    def close(self) -> None:
        """Ends the processes at once: nothing that they hold has to be saved."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.close()


class _Worker:
    def __init__(self, items: Any):
        spawn = multiprocessing.get_context("spawn")
        self._files = [_File(_new_file()) for _ in range(AHEAD)]
        self._connection, theirs = spawn.Pipe()
        arguments = (items, theirs, self._files)
        self.process = spawn.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, index: int, turn: int) -> None:
        with contextlib.suppress(OSError):  # it has died, which `receive` reports
            self._connection.send((index, turn % AHEAD))

    def receive(self, turn: int) -> Any:
        try:
            found = self._connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise runtime.ProcessError(
                f"a process that makes batches has died (exit code {self.process.exitcode}),"
                " perhaps for want of memory: lower data.workers and run the same command again."
            ) from error
        if isinstance(found, Exception):
            raise found
        shapes, tree = jax.tree.flatten(found)
        leaves: list[Any] = [np.empty(x.shape, x.dtype) if _is_array(x) else x for x in shapes]
        os.preadv(self._files[turn % AHEAD].number, [x for x in leaves if _is_array(x)], 0)
        return tree.unflatten(leaves)

    def close(self) -> None:
        self._connection.close()
        for file in self._files:
            os.close(file.number)


class _File:
    """The descriptor of an open file, which a process that is started with it inherits."""

    def __init__(self, number: Any):
        self.number: int = number if isinstance(number, int) else number.detach()

    def __reduce__(self):
        return _File, (reduction.DupFd(self.number),)


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batches")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Blocks SIGINT and SIGTERM meanwhile; processes started inside block them for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(items: Any, asks: connection.Connection, files: list[_File]) -> None:
    """Makes the items whose numbers arrive, until the other end is closed."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator is the run's
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads flags of its own
    with contextlib.suppress(EOFError, OSError):
        while True:
            index, place = asks.recv()
            asks.send(_made(items, index, files[place].number))


def _made(items: Any, index: int, file: int) -> Any:
    """Writes the arrays of an item to a file; returns it with their shapes, or an error."""
    try:
        leaves, tree = jax.tree.flatten(items[index])
        arrays: list[Any] = [np.ascontiguousarray(leaf) for leaf in leaves if _is_array(leaf)]
        os.pwritev(file, arrays, 0)
    except Exception as error:
        return error
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_array(x) else x for x in leaves]
    return tree.unflatten(shapes)
