# SPDX-License-Identifier: Apache-2.0
r"""Exact scores of small models on the scenes, 95 % intervals included.

    python -m sparse_lavida_jax.bench.quality --checkpoint=scenes --prompts=2000
    python -m sparse_lavida_jax.bench.quality --checkpoint=runs/scenes_dense --method=dense

A row a task and method, in `bench/results/<device>/quality`. Scores do not depend on the device
beyond rounding; the device is recorded all the same.
"""

import dataclasses
import sys

from absl import app, flags, logging

from sparse_lavida_jax import checkpoint, presets
from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.data import tasks
from sparse_lavida_jax.evals import scenes
from sparse_lavida_jax.pipeline import SparseLaViDa

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "scenes", "A model folder, a run, or a bundled name."
)
PROMPTS = flags.DEFINE_integer("prompts", 2000, "Prompts a task.", lower_bound=1)
METHOD = flags.DEFINE_string("method", "", "A preset; by default what the model was trained for.")
ONLY = flags.DEFINE_list("tasks", [], "Tasks to score; by default all that were trained.")
HELD_OUT = ("draw", "edit", "answer", "point")


def main(argv: list[str]) -> None:
    """Scores every task and prints the table."""
    del argv
    logging.set_verbosity(logging.WARNING)  # of the array store
    try:
        pipe = SparseLaViDa.from_pretrained(CHECKPOINT.value, batch_size=32)
    except checkpoint.CheckpointError as error:
        sys.exit(f"bench.quality: {error}")
    settings = pipe.settings
    method = METHOD.value or presets.default_preset(settings.model)
    sampling = dataclasses.replace(settings.sampling, preset=method)
    bench = Bench("quality")
    trained = [task for task in settings.data.tasks if task in tasks.TASKS]
    wanted = [
        (task, split)
        for task in (ONLY.value or trained)
        for split in ("test", "held_out")
        if split == "test" or task in HELD_OUT
    ]
    results = []
    for task, split in wanted:
        result = scenes.evaluate(pipe, task, PROMPTS.value, split=split, sampling=sampling)
        results.append(result)
        bench.write(
            f"{settings.name}/{method}/{result.task}",
            {
                "task": result.task,
                "method": method,
                "model": settings.name,
                "checkpoint": pipe.source.sha256,
                "train_steps": settings.train.train_steps,
                "steps": sampling.num_steps,
                "registers": settings.model.num_registers,
                **scenes.as_json(result),
                "note": "exact scorers on pixels and text; says nothing about speed",
            },
        )
        print(scenes.table([result]).splitlines()[2], flush=True)
    print(scenes.table(results))


if __name__ == "__main__":
    app.run(main)
