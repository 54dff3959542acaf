# SPDX-License-Identifier: Apache-2.0
"""The shards of a preparation over the machines of a Ray cluster.

Ray Data hands out the shards; each is made by `prepare.make`, as on one machine. The tables, the
pictures and the prepared folder have the same paths on all machines.
"""

import dataclasses
import json
from collections.abc import Iterator

from sparse_lavida_jax.data import prepare
from sparse_lavida_jax.data.prepare import Job, Outcome, Shard
from sparse_lavida_jax.data.recipe import PrepareError


class _Maker:
    """An actor with the image tokenizer in its memory."""

    def __init__(self, job: Job, shards: list[Shard]):
        self.job, self.shards = job, shards
        self.encoder = job.load_encoder()

    def __call__(self, row: dict) -> dict:
        shard = self.shards[row["id"]]
        outcome = prepare.make(self.job, self.encoder, shard)
        return {"stem": shard.stem, "outcome": json.dumps(dataclasses.asdict(outcome))}


def outcomes(job: Job, shards: list[Shard], workers: int) -> Iterator[tuple[str, Outcome]]:
    """Yields what became of shards as they are finished, in any order.

    Joins the cluster that RAY_ADDRESS names, or starts one on this machine.

    Args:
        workers: actors, each with an image tokenizer; 0: one.

    Raises:
        PrepareError: Ray is not installed, or a shard could not be made.
    """
    if not shards:
        return
    try:
        import ray
        import ray.data
        import ray.exceptions
    except ImportError as error:
        raise PrepareError(
            "prepare.engine=ray needs Ray: `pip install 'sparse-lavida-jax[ray]'`, or use"
            " prepare.engine=processes on one machine."
        ) from error
    job = dataclasses.replace(job, folder=job.folder.resolve())
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        made = ray.data.range(len(shards), override_num_blocks=len(shards)).map(
            _Maker,  # type: ignore[arg-type]
            fn_constructor_args=(job, shards),
            compute=ray.data.ActorPoolStrategy(size=max(1, min(workers, len(shards)))),
        )
        for row in made.iter_rows():
            yield row["stem"], Outcome(**json.loads(row["outcome"]))
    except ray.exceptions.RayError as error:
        cause = str(error).strip().splitlines()[-1]
        raise PrepareError(
            f"a shard could not be made: {cause} Run the same command again; what is finished"
            " stays."
        ) from error
    finally:
        if started:
            ray.shutdown()
