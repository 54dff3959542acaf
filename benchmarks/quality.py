# SPDX-License-Identifier: Apache-2.0
r"""Exact scores of small models on the scenes, with 95 % intervals.

    python -m benchmarks.quality --checkpoint=scenes --prompts=2000
    python -m benchmarks.quality --checkpoint=runs/scenes_dense --method=dense
    python -m benchmarks.quality --checkpoint=scenes --card=scenes-with-card

Writes one row per task and method to `results/<device>/quality`. Scores depend on the device only
through rounding; it is recorded all the same. With --card nothing is scored: the rows of the
checkpoint go into the README of a copy of its folder.
"""

import dataclasses

from absl import flags, logging

from benchmarks import card, command
from benchmarks.measurements import Bench
from sparse_lavida_jax import config
from sparse_lavida_jax.evals import exact, scorers
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.scenes import tasks

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "scenes", "A model folder, a run, or a bundled name."
)
PROMPTS = flags.DEFINE_integer("prompts", 2000, "Prompts per task.", lower_bound=1)
METHOD = flags.DEFINE_string("method", "", "Preset; default: the one the model was trained for.")
ONLY = flags.DEFINE_list("tasks", [], "Tasks to score; default: all that were trained.")
CARD = flags.DEFINE_string("card", "", "The copy to write, which may be the model folder itself.")
HELD_OUT = ("draw", "edit", "answer", "point")


def main(_: list[str]) -> None:
    """Scores every task and prints the table, or writes it into the card of the model."""
    logging.set_verbosity(logging.WARNING)  # messages of the array store
    if CARD.value:
        card.write(CHECKPOINT.value, CARD.value, METHOD.value)
    else:
        _score()


def _score() -> None:
    pipe = SparseLaViDa.from_pretrained(CHECKPOINT.value, batch_size=32)
    settings = pipe.settings
    asked = ONLY.value or [task for task in settings.data.tasks if task in tasks.TASKS]
    unknown = set(asked) - set(tasks.TASKS)
    if unknown or not asked:
        told = f"has no task {', '.join(sorted(unknown))}" if asked else "learned none of the tasks"
        raise config.ConfigError(f"{settings.name} {told}; scored are {', '.join(tasks.TASKS)}.")
    method = METHOD.value or presets.default_preset(settings.model)
    sampling = dataclasses.replace(settings.sampling, preset=method)
    bench, metrics = Bench("quality"), []

    def write(result: exact.TaskResult, **more: float) -> None:
        metrics.extend(result.metrics)
        row = {
            "method": method,
            "model": settings.name,
            "checkpoint": pipe.source.sha256,
            "train_steps": settings.train.train_steps,
            "steps": sampling.num_steps,
            "registers": settings.model.num_registers,
            **exact.as_json(result),
            **more,
            "note": "exact scorers on pixels and text; says nothing about speed",
        }
        bench.write(f"{settings.name}/{method}/{result.task.replace(' ', '_')}", row)
        print(scorers.table(result.metrics).splitlines()[2], flush=True)

    for task in asked:
        for split in ("test", "held_out")[: 1 + (task in HELD_OUT)]:
            write(exact.evaluate(pipe, task, PROMPTS.value, split=split, sampling=sampling))
        if task == "draw":
            result, layouts = exact.evaluate_several(pipe, PROMPTS.value // 4, sampling=sampling)
            write(result, layouts=layouts)
            print(f"{layouts:.2f} different layouts in four images of a prompt", flush=True)
    print(scorers.table(metrics))


if __name__ == "__main__":
    command.run(main)
