# SPDX-License-Identifier: Apache-2.0
r"""The best plan of an image for each number of steps, found one setting after another.

    python -m benchmarks.plan_search --model=scenes --steps=1,2,4,8
    python -m benchmarks.plan_search --model=runs/art --given=layout --prompts=2000 --settings=

For each number of steps, the values of each of `SETTINGS` are tried with the best values found so
far of the others, beginning with those of the model, and the value that draws most prompts rightly
is kept. Prompts are of combinations that training never showed. In the world of real art, things
that are coherent are counted too, with the entropy of their styles: coherence bought by drawing
always the same style is none. With `--settings=` the model's own plan is scored. Rows that exist
are not made again.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
from absl import flags

from benchmarks import command, measurements
from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.evals.benchmarks import art
from sparse_lavida_jax.evals.scorers import wilson_interval
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs

MODEL = flags.DEFINE_string("model", "scenes", "A bundled model, or a model folder.")
STEPS = flags.DEFINE_list("steps", ["1", "2", "4", "8"], "Numbers of steps.")
GIVEN = flags.DEFINE_enum("given", "words", ["words", "layout"], "What images are drawn from.")
PROMPTS = flags.DEFINE_integer("prompts", 300, "Prompts of a score.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Of the images.", lower_bound=0)

SUITE, BATCH, PROMPT_SEED = "plan_search", 32, 56
Changes = dict[str, Any]  # of `config.Sampling`

# In the order in which they are searched.
SETTINGS: dict[str, list[Changes]] = {
    "counts": [
        {"schedule": schedule, "shift": shift, "order": order}
        for (schedule, shift), order in itertools.product(
            [("linear", 1.0), ("cosine", 1.0), ("shift", 2.0), ("shift", 4.0)],
            ["stratified", "halton", "random"],
        )
    ],
    "temperature": [{"temperature": one} for one in (0.0, 0.3, 0.6, 1.0)],
    "guidance": [{"guidance": one} for one in (0.0, 1.0, 2.0)],
    "registers": [{"registers_end": one} for one in (-1, 1, 0)],
}
SEARCHED = flags.DEFINE_list("settings", [*SETTINGS], "Settings to search, of these.")


def main(_: list[str]) -> None:
    """Searches, and writes a row for every plan that is tried."""
    keep_programs()
    if unknown := set(filter(None, SEARCHED.value)) - set(SETTINGS):
        raise flags.IllegalFlagValueError(
            f"--settings={','.join(sorted(unknown))} is unknown: choose of {', '.join(SETTINGS)}."
        )
    pipe = SparseLaViDa.from_pretrained(MODEL.value, batch_size=BATCH)
    for steps in map(int, STEPS.value):
        best = search(Scorer(pipe), steps, [name for name in SETTINGS if name in SEARCHED.value])
        print(f"best of {steps} steps: {best}", flush=True)


@dataclasses.dataclass
class Scorer:
    """Scores plans, or finds their rows."""

    pipe: SparseLaViDa

    def __post_init__(self):
        self.bench = measurements.Bench(SUITE)
        self.rows = {row["id"]: row for row in measurements.read_rows(SUITE)}

    def scored(self, steps: int, changes: Changes) -> dict[str, Any]:
        """Returns the row of a plan."""
        told = ",".join(f"{name}={value}" for name, value in changes.items()) or "own"
        name = f"{self.pipe.settings.name}/{GIVEN.value}/k{steps}/{told}/s{SEED.value}"
        row = self.rows.get(name)
        if row is None or row["prompts"] < PROMPTS.value:
            sampling = config.changed(self.pipe.settings.sampling, {"num_steps": steps, **changes})
            row = {"model": self.pipe.settings.name, "method": told, "steps": steps}
            row |= {"given": GIVEN.value, "seed": SEED.value, **changes}
            row |= score(self.pipe, sampling)
            self.bench.write(name, row)
            self.rows[name] = row
            print(name, f"{row['share']:.3f}", row.get("coherent", ""), flush=True)
        return row


def search(scorer: Any, steps: int, settings: list[str]) -> Changes:
    """Returns the best changes of the model's own plan, with as many steps as asked for."""
    best: Changes = {"merge_cells": 0} if settings else {}
    for name in settings or [""]:
        tried = [best | one for one in SETTINGS.get(name, [{}])]
        rows = [scorer.scored(steps, one) for one in tried]
        shares = [(row["share"], row.get("coherent", 0.0)) for row in rows]
        best = tried[shares.index(max(shares))]
    return best


def score(pipe: SparseLaViDa, sampling: config.Sampling) -> dict[str, Any]:
    """Returns how many prompts are drawn rightly, and how many things are coherent."""
    here, drawn, seconds = exact.world_of(pipe.settings), [], []
    samples = [
        here.sample("draw", PROMPT_SEED, number, "held_out") for number in range(PROMPTS.value)
    ]
    for start in range(0, len(samples), BATCH):
        requests = [
            pipe.requests("generate", one.prompt, as_written=True, sampling=sampling,
                          seed=number + (SEED.value << 32),
                          layout=one.layout if GIVEN.value == "layout" else False)[0]
            for number, one in enumerate(samples[start : start + BATCH], start)
        ]  # fmt: skip
        result = pipe.run(requests)
        drawn += result.pixels
        seconds.append(result.seconds["image"] / len(requests))
    judged = exact.tally("draw/held_out", samples, drawn, here)
    found: dict[str, Any] = {
        "prompts": judged.total, "correct": judged.correct, "share": judged.share,
        "interval_95": list(wilson_interval(judged.correct, judged.total)),
        "chance": judged.chance, "image_s": float(np.median(seconds[1:] or seconds)),
        "note": "seconds of an image are those of the loop, in batches of 32; the first compiles",
    }  # fmt: skip
    if here is not exact.SCENES:
        metrics = art.coherence(samples, [judge.read(image) for image in drawn])
        values = {one.name: one.value for one in metrics}
        found |= {
            "found": values["- things found"],
            "coherent": values["- things coherent"],
            "entropy_bits": values["- entropy of open styles, bits"],
        }
    return found


if __name__ == "__main__":
    command.run(main)
