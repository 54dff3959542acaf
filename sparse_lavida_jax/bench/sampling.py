# SPDX-License-Identifier: Apache-2.0
r"""Speed of sampling a picture: every preset of the ablation against the dense baseline.

    python -m sparse_lavida_jax.bench.sampling --checkpoint=scenes --batch=16

All presets run in turn on the same weights, so that a drifting machine drifts for all. What is
timed is prefill and decoding of image tokens; planning in text and the VQ decoder are not. Quality
is not measured here. The rows are read by `bench/table.py`, which forms the ratios.
"""

import dataclasses
import random
import statistics
import sys
import time

import numpy as np
from absl import app, flags

from sparse_lavida_jax import checkpoint, config, report
from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.pipeline import SparseLaViDa

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "scenes", "A model folder, a run, or a bundled name."
)
BATCH = flags.DEFINE_integer("batch", 16, "Pictures at a time.", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 7, "Timed runs of each preset.", lower_bound=5)
STEPS = flags.DEFINE_integer("steps", 0, "Steps a picture; by default those of the config.")


def main(argv: list[str]) -> None:
    """Times all presets and writes a row for each."""
    del argv
    try:
        pipe = SparseLaViDa.from_pretrained(CHECKPOINT.value, batch_size=BATCH.value)
    except checkpoint.CheckpointError as error:
        sys.exit(f"bench.sampling: {error}")
    settings = pipe.settings
    steps = STEPS.value or settings.sampling.num_steps
    blank = np.zeros((settings.model.num_cells, settings.model.codes_per_token), np.int32)
    example = pipe.encoder.image_example("a red circle above a blue square", blank)
    examples = [example] * BATCH.value
    samplings = {
        name: dataclasses.replace(settings.sampling, preset=name, num_steps=steps)
        for name in config.PRESETS
    }
    compile_s, times = {}, {name: [] for name in samplings}
    for name, sampling in samplings.items():
        compile_s[name] = _seconds(pipe, examples, sampling)
    for turn in range(RUNS.value):
        names = list(samplings)
        random.Random(turn).shuffle(names)
        for name in names:
            times[name].append(_seconds(pipe, examples, samplings[name]))
    bench = Bench("sampling")
    for name, taken in times.items():
        chosen = pipe.with_sampling(samplings[name])
        path = bench.write(
            f"{settings.name}/{name}/b{BATCH.value}/k{steps}",
            {
                "task": "draw",
                "method": name,
                "model": settings.name,
                "dtype": settings.model.compute_dtype,
                "batch": BATCH.value,
                "guidance_rows": 1,
                "steps": steps,
                "steps_timed": steps,
                "registers": settings.model.num_registers,
                "times_s": taken,
                "median_s": statistics.median(taken),
                "min_s": min(taken),
                "max_s": max(taken),
                "compile_s": compile_s[name],
                "tokens": {"useful": report.tokens_passed(chosen, name, example)},
                "note": "prefill and image loop; no planning, no VQ decoder, quality not measured",
            },
        )
        print(f"{path.name}: median {statistics.median(taken):.4f} s")


def _seconds(pipe: SparseLaViDa, examples: list, sampling: config.Sampling) -> float:
    begin = time.perf_counter()
    pipe.run(examples, sampling=sampling)
    return time.perf_counter() - begin


if __name__ == "__main__":
    app.run(main)
