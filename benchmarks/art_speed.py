# SPDX-License-Identifier: Apache-2.0
r"""Seconds of drawing real art, sparse and dense: the layout, the image, and the whole request.

    python -m benchmarks.art_speed

Both sample the bundled model, whose weights do not matter for speed, with the same plans: the
model's own, the same without revisions, that of `--quality=low`, and the best that was found for a
quarter of its steps and revisions. They take turns on the same prompts, so that a machine whose
speed drifts affects all alike. Both write a layout first.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks import command, measurements
from sparse_lavida_jax import config
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.sampling.options import quality_options

MODEL, SUITE, SEED = "art", "art_speed", 55
BATCHES, RUNS = (1, 4), 9
PRESETS = {"sparse": "sparse", "dense_lean": "dense"}  # of each method
OWN = "own"
QUARTER = {"num_steps": 2, "revisions": 2, "schedule": "linear"}  # of 12 and 4 (docs/few_steps.md)

Seconds = dict[str, float]  # of each stage, and of the whole request


def main(_argv: list[str]) -> None:
    """Times both methods with each plan at each size, and writes a row for each."""
    keep_programs()
    bench, pipe = measurements.Bench(SUITE), SparseLaViDa.from_pretrained(MODEL)
    world = exact.world_of(pipe.settings)
    sides = {
        (method, plan): config.changed(sampling, {"preset": preset})
        for plan, sampling in plans(pipe.settings).items()
        for method, preset in PRESETS.items()
    }
    for batch in BATCHES:
        words = [world.sample("draw", SEED, i, "held_out").prompt for i in range(batch)]
        begun = {side: timed(pipe, sampling, words) for side, sampling in sides.items()}
        told: dict[tuple[str, str], list[Seconds]] = {side: [] for side in sides}
        for _ in range(RUNS):
            for side, sampling in sides.items():
                told[side].append(timed(pipe, sampling, words))
        middle = {side: medians(seconds) for side, seconds in told.items()}
        for (method, plan), seconds in told.items():
            image, sampling = [one["image"] for one in seconds], sides[method, plan]
            row = {
                "model": MODEL, "method": method, "task": "draw", "batch": batch,
                "seconds": middle[method, plan], "image_spread": [min(image), max(image)],
                "first_request_s": begun[method, plan]["request"], "runs": RUNS,
                "steps": sampling.num_steps, "revisions": sampling.revisions,
                "image_to_own": middle[method, plan]["image"] / middle[method, OWN]["image"],
                "note": "medians; the first request, which compiles, is not in them",
            }  # fmt: skip
            bench.write(f"draw/{method}/b{batch}/{plan}", row)
        for plan in plans(pipe.settings):
            sparse, dense = (middle[method, plan] for method in PRESETS)
            ratios = ", ".join(f"{part} {dense[part] / sparse[part]:.2f}" for part in sparse)
            share = f"{sparse['image'] / middle['sparse', OWN]['image']:.2f} of its own plan's"
            print(
                f"{batch} together, {plan}: image {share}; dense over sparse: {ratios}", flush=True
            )


def plans(settings: config.Config) -> dict[str, config.Sampling]:
    """Returns the plans of a model that are timed."""
    own = settings.sampling
    low = quality_options("low", own, settings.model.num_cells)
    low["num_steps"] = low.pop("steps")
    changes = {OWN: {}, "unrevised": {"revisions": 0}, "low": low, "quarter": QUARTER}
    return {plan: config.changed(own, one) for plan, one in changes.items()}


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
