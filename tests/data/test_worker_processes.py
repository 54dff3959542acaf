# SPDX-License-Identifier: Apache-2.0
"""Processes that make batches: the same items, and a clean end whatever happens to them."""

import multiprocessing
import os
import pathlib
import signal
import time

import jax
import numpy as np
import pytest

from sparse_lavida_jax import runtime
from sparse_lavida_jax.data import worker_processes
from sparse_lavida_jax.data.worker_processes import AHEAD, WorkerProcesses

BAD = 9


class Items:
    """Item i is a tree of arrays and other things."""

    def __getitem__(self, i):
        if i == BAD:
            raise ValueError("this item cannot be made")
        arrays = np.arange(i, dtype=np.float32), np.full((3, 2, 2), i, np.uint8)[:, ::-1]
        return {"arrays": arrays, "nothing": None, "work": f"of {i}", "flag": np.array(i % 2 == 0)}


def opened(count, begin=0):
    return WorkerProcesses(Items(), begin, count)


def processes(workers):
    return [worker.process for worker in workers._workers]


def test_items_come_in_order_whatever_the_number_of_processes():
    for count, begin in ((1, 0), (2, 3), (3, 1)):
        workers = opened(count, begin)
        for i in range(begin, begin + 6):
            found = next(workers)
            expected = Items()[i]
            assert (found["work"], found["nothing"]) == (expected["work"], None)
            for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                np.testing.assert_array_equal(one, other)
                assert isinstance(one, str) or one.dtype == other.dtype
        workers.close()
        assert not any(process.is_alive() for process in processes(workers))


def test_arrays_pass_through_memory_without_a_name(monkeypatch):
    """A full /dev/shm, 64 MB in a container, changes nothing."""
    workers = opened(1)
    next(workers)
    links = [os.readlink(f"/proc/self/fd/{file.number}") for file in workers._workers[0]._files]
    assert len(links) == AHEAD and all(link.startswith("/memfd:batches") for link in links)
    workers.close()
    monkeypatch.delattr(os, "memfd_create")
    workers = opened(1)
    assert next(workers)["work"] == "of 0"
    path = pathlib.Path(f"/proc/self/fd/{workers._workers[0]._files[0].number}")
    assert os.readlink(path).endswith("(deleted)")
    workers.close()


def test_an_error_of_making_an_item_is_raised_where_it_is_asked_for():
    workers = opened(2, begin=BAD - 1)
    next(workers)
    with pytest.raises(ValueError, match="this item cannot be made"):
        next(workers)
    workers.close()


def test_a_killed_process_is_a_sentence_and_no_hang():
    workers = opened(2)
    next(workers)
    victim = processes(workers)[1]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    begin = time.monotonic()
    with pytest.raises(runtime.ProcessError, match=r"exit code -9.*: lower data\.workers and run"):
        for _ in range(3 * AHEAD):
            next(workers)
    assert time.monotonic() - begin < 30
    workers.close()
    assert not any(process.is_alive() for process in processes(workers))


def test_signals_of_a_terminal_or_of_timeout_do_not_end_them():
    """Not even while they start."""
    workers = opened(2)
    for _ in range(2):
        for process in processes(workers):
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGTERM)
        next(workers)
    assert all(process.is_alive() for process in processes(workers))
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    workers.close()
    assert not set(processes(workers)) & set(multiprocessing.active_children())


def test_the_number_of_processes_follows_the_device(monkeypatch):
    assert worker_processes.default_number() == 0
    monkeypatch.setattr(worker_processes.jax, "default_backend", lambda: "gpu")
    for cores, number in ((1, 1), (2, 1), (8, 6), (64, 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        assert worker_processes.default_number() == number
