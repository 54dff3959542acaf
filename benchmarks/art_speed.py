# SPDX-License-Identifier: Apache-2.0
r"""Seconds of drawing real art, sparse and dense: the layout, the image, and the whole request.

    python -m benchmarks.art_speed

Both sample the bundled model, whose weights do not matter for speed, in the same number of steps.
They take turns on the same prompts, so that a machine whose speed drifts affects both alike. Both
write a layout first. Both revise as often as the model does by default, or not at all.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import command, measurements
from sparse_lavida_jax import config
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs

MODEL, SUITE, SEED = "art", "art_speed", 55
BATCHES, RUNS = (1, 4), 9
PRESETS = {"sparse": "sparse", "dense_lean": "dense"}  # of each method

Seconds = dict[str, float]  # of each stage, and of the whole request


def main(_argv: list[str]) -> None:
    """Times both methods at each size, and writes a row for each."""
    keep_programs()
    bench, pipe = measurements.Bench(SUITE), SparseLaViDa.from_pretrained(MODEL)
    world, how = exact.world_of(pipe.settings), pipe.settings.sampling
    for batch, revisions in itertools.product(BATCHES, sorted({0, how.revisions})):
        words = [world.sample("draw", SEED, i, "held_out").prompt for i in range(batch)]
        sides = {
            method: dataclasses.replace(how, preset=preset, revisions=revisions)
            for method, preset in PRESETS.items()
        }
        begun = {method: timed(pipe, sampling, words) for method, sampling in sides.items()}
        told: dict[str, list[Seconds]] = {method: [] for method in PRESETS}
        for _ in range(RUNS):
            for method, sampling in sides.items():
                told[method].append(timed(pipe, sampling, words))
        for method, seconds in told.items():
            image = [one["image"] for one in seconds]
            row = {
                "model": MODEL, "method": method, "task": "draw", "batch": batch,
                "seconds": medians(seconds), "image_spread": [min(image), max(image)],
                "first_request_s": begun[method]["request"], "runs": RUNS,
                "steps": how.num_steps, "revisions": revisions,
                "note": "medians; the first request, which compiles, is not in them",
            }  # fmt: skip
            bench.write(f"draw/{method}/b{batch}/r{revisions}", row)
        sparse, dense = (medians(told[method]) for method in PRESETS)
        ratios = ", ".join(f"{part} {dense[part] / sparse[part]:.2f}" for part in sparse)
        print(f"{batch} together, {revisions} revisions: dense over sparse: {ratios}", flush=True)


def timed(pipe: SparseLaViDa, sampling: config.Sampling, words: Sequence[str]) -> Seconds:
    """Draws images; returns how long it took."""
    begin = time.perf_counter()
    drawn = pipe.generate([*words], sampling=sampling, as_written=True)
    return {**drawn.seconds, "request": time.perf_counter() - begin}


def medians(seconds: Sequence[Seconds]) -> Seconds:
    """Returns the median of each part."""
    return {part: float(np.median([one[part] for one in seconds])) for part in seconds[0]}


if __name__ == "__main__":
    command.run(main)
