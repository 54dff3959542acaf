# SPDX-License-Identifier: Apache-2.0
"""The shards of a preparation over the machines of a Ray cluster, handed out by Ray Data.

The tables, the images and the prepared folder have the same paths on all machines.
"""

from collections.abc import Callable, Iterator
from typing import Any

from sparse_lavida_jax.mixture.recipe import PrepareError

Make = Callable[[int], dict[str, Any]]  # of a shard by its number, to what became of it


class _Maker:
    """An actor that has loaded what shards need."""

    def __init__(self, load: Callable[[], Make]):
        self.make = load()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return self.make(int(row["id"]))


def outcomes(load: Callable[[], Make], count: int, workers: int) -> Iterator[dict[str, Any]]:
    """Yields what became of shards 0..count-1 as they are finished, in any order.

    Joins the cluster that RAY_ADDRESS names, or starts one on this machine.

    Args:
        load: makes, in an actor, what makes shards.
        workers: actors; 0: one.

    Raises:
        PrepareError: Ray is not installed, or a shard could not be made.
    """
    if not count:
        return
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
            _Maker,  # type: ignore[arg-type]
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
