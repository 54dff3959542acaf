# SPDX-License-Identifier: Apache-2.0
"""Distributes the shards of a preparation over local processes, or over a Ray cluster.

The tables, the images and the prepared folder have the same paths on all machines.
"""

import concurrent.futures
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from sparse_lavida_jax.mixture.recipe import PrepareError

Make = Callable[[int], dict[str, Any]]  # from the number of a shard to its outcome
Load = Callable[[], Make]  # returns a `Make`; called in a worker

_make: Make  # in a worker process


def _start(load: Load) -> None:
    global _make
    # Ctrl-C reaches every process of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _make = load()


def _made(number: int) -> dict[str, Any]:
    return _make(number)


def processes(load: Load, count: int, workers: int) -> Iterator[dict[str, Any]]:
    """Yields the outcomes of shards 0..count-1 as they are finished, in any order.

    Raises:
        PrepareError: a process died.
    """
    others, spawn = set(multiprocessing.active_children()), multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(min(workers, count), spawn, _start, (load,))
    try:
        waiting = [pool.submit(_made, number) for number in range(count)]
        for future in concurrent.futures.as_completed(waiting):
            yield future.result()
    except BrokenProcessPool as error:
        raise PrepareError(
            "a worker process died, perhaps for want of memory: lower prepare.workers or"
            " prepare.encode_batch and run the same command again. What is finished stays."
        ) from error
    finally:
        # The results of unfinished shards are not needed.
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        pool.shutdown(wait=True)


class _Actor:
    """A Ray worker that has loaded the encoder."""

    def __init__(self, load: Load):
        self.make = load()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return self.make(int(row["id"]))


def ray(load: Load, count: int, workers: int) -> Iterator[dict[str, Any]]:
    """Does what `processes` does, with Ray Data.

    Joins the cluster that RAY_ADDRESS names, or starts one on this machine.

    Args:
        workers: number of actors; 0: one.

    Raises:
        PrepareError: Ray is not installed, or a shard could not be made.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
        import ray.exceptions  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PrepareError(
            "prepare.engine=ray needs Ray: `pip install 'sparse-lavida-jax[ray]'`, or use"
            " prepare.engine=processes on one machine."
        ) from error
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        made = ray.data.range(count, override_num_blocks=count).map(
            _Actor,  # type: ignore[arg-type]
            fn_constructor_args=(load,),
            compute=ray.data.ActorPoolStrategy(size=max(1, min(workers, count))),
        )
        yield from made.iter_rows()
    except ray.exceptions.RayError as error:
        cause = str(error).strip().splitlines()[-1]
        raise PrepareError(
            f"a shard could not be made: {cause} Run the same command again; what is finished"
            " stays."
        ) from error
    finally:
        if started:
            ray.shutdown()
