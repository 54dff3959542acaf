# SPDX-License-Identifier: Apache-2.0
r"""Speed of sampling: every preset of the ablation, and Fast-dLLM for text, against dense.

    python -m sparse_lavida_jax.bench.sampling --checkpoint=scenes --batch=16

All presets run in turn on the same weights, so that a drifting machine drifts for all. What is
timed is plan, prefill and decoding of a picture, or of a text response of the longest length; the
VQ decoder is not. Quality is not measured here. The rows are read by `bench/table.py`, which forms
the ratios.
"""

import dataclasses
import random
import statistics
import sys
import time

import numpy as np
from absl import app, flags, logging

from sparse_lavida_jax import checkpoint, config, presets, report, sample
from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.data.examples import Example
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompts import Request

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "scenes", "A model folder, a run, or a bundled name."
)
BATCH = flags.DEFINE_integer("batch", 16, "Pictures at a time.", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 7, "Timed runs of each preset.", lower_bound=5)
STEPS = flags.DEFINE_integer(
    "steps", 0, "Steps a picture and a text block; by default those of the config."
)


def main(argv: list[str]) -> None:
    """Times all presets, of pictures and then of text, and writes a row for each."""
    del argv
    logging.set_verbosity(logging.WARNING)  # of the array store
    try:
        pipe = SparseLaViDa.from_pretrained(CHECKPOINT.value, batch_size=BATCH.value)
    except checkpoint.CheckpointError as error:
        sys.exit(f"bench.sampling: {error}")
    settings, bench = pipe.settings, Bench("sampling")
    blank = np.zeros((settings.model.num_cells, settings.model.codes_per_token), np.int32)
    picture = pipe.encoder.image_example("a red circle above a blue square", blank)
    text = pipe.encoder.text_example(
        "a red circle above a blue square", length=settings.data.max_answer_len
    )
    steps = STEPS.value or settings.sampling.num_steps
    _measure(pipe, bench, "draw", picture, {
        name: dataclasses.replace(settings.sampling, preset=name, num_steps=steps)
        for name in config.PRESETS
    }, steps)  # fmt: skip
    steps = STEPS.value or settings.sampling.text_steps
    _measure(pipe, bench, "text", text, {
        name: dataclasses.replace(settings.sampling, text_preset=name, text_steps=steps)
        for name in (*config.PRESETS, *config.TEXT_PRESETS)
    }, steps)  # fmt: skip


def _measure(
    pipe: SparseLaViDa,
    bench: Bench,
    task: str,
    example: Example,
    samplings: dict[str, config.Sampling],
    steps: int,
) -> None:
    """Times a batch of one example under every preset in turn, and writes a row for each.

    Args:
        steps: of a picture, or of a text block.
    """
    settings = pipe.settings
    compile_s, times = {}, {name: [] for name in samplings}
    for name, sampling in samplings.items():
        compile_s[name] = _seconds(pipe, example, sampling)
    for turn in range(RUNS.value):
        names = list(samplings)
        random.Random(turn).shuffle(names)
        for name in names:
            times[name].append(_seconds(pipe, example, samplings[name]))
    for name, taken in times.items():
        path = bench.write(
            f"{settings.name}/{task}/{name}/b{BATCH.value}/k{steps}",
            {
                "task": task,
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
                "tokens": {"useful": report.tokens_passed(pipe, samplings[name], example)},
                "note": "prefill and decoding loop; no VQ decoder, quality not measured",
            },
        )
        print(f"{path.name}: median {statistics.median(taken):.4f} s")


def _seconds(pipe: SparseLaViDa, example: Example, sampling: config.Sampling) -> float:
    """Times one batch; a text is decoded to its last block, whether or not it has ended."""
    model, batch = pipe.settings.model, BATCH.value
    settings = presets.step_settings(sampling, model, example.kind)
    requests = [
        Request(example.parts, example.response, example.given, example.pixels, seed)
        for seed in range(batch)
    ]
    begin = time.perf_counter()
    given = np.stack([request.given for request in requests])
    plan = presets.plan(
        sampling, settings, model, given, pipe.settings.data.text_block_len, range(batch)
    )
    sample.sample(pipe.model, requests, plan, settings=settings, stop_early=False)
    return time.perf_counter() - begin


if __name__ == "__main__":
    app.run(main)
