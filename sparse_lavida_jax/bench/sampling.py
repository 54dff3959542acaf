# SPDX-License-Identifier: Apache-2.0
r"""Speed of sampling: every preset of the ablation, and Fast-dLLM for text, against dense.

    python -m sparse_lavida_jax.bench.sampling --checkpoint=scenes --batch=16
    python -m sparse_lavida_jax.bench.sampling --config=configs/lavida_o.py --random-weights

All presets run in turn on the same weights, so that a drifting machine drifts for all. What is
timed is plan, prefill and decoding of an image, or of a text response of the longest length; the
VQ decoder is not. Quality is not measured here: the values of the weights change no time, so a
model may be of random ones. The rows are read by `bench/table.py`, which forms the ratios; a table
of seconds, tokens and ratios is printed at the end.

    python -m sparse_lavida_jax.bench.sampling --suite=headline --config=configs/lavida_o.py \
        --random-weights

times whole requests, prompt in and pixels out (`bench/suites.py`): headline, ablation, batch, edit,
reasoning, quant, fastpath, cpu. A row is written as soon as it is measured; `--missing` goes on
with the newest run of this code, model, software and device, and measures the rows that it lacks.
What is measured in another way, with other `XLA_FLAGS` perhaps, gets a name: `--variant`.
"""

import dataclasses
import functools
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx

from sparse_lavida_jax import config, runtime, sample
from sparse_lavida_jax.bench import running, suite_cases, suites, table
from sparse_lavida_jax.bench.record import Bench, read_rows
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference.batching import tokens_passed
from sparse_lavida_jax.models import fuse, vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.prompts import Request
from sparse_lavida_jax.sequence import Kind, Response, Text

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "scenes", "A model folder, a run, or a bundled name."
)
CONFIG = flags.DEFINE_string("config", "", "A config file, in place of a checkpoint.")
RANDOM = flags.DEFINE_boolean("random-weights", False, "Of the model of --config.")
BATCH = flags.DEFINE_integer("batch", 16, "Images at a time.", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 7, "Timed runs of each preset.", lower_bound=5)
STEPS = flags.DEFINE_integer(
    "steps", 0, "Steps an image and a text block; by default those of the config."
)
GUIDANCE = flags.DEFINE_float("guidance", None, "Scale; by default that of the config.")
PRESETS = flags.DEFINE_list("presets", [], "Which to time; by default all.")

SUITE = flags.DEFINE_enum("suite", None, suite_cases.SUITES, "Rows of whole requests.")
MISSING = flags.DEFINE_boolean("missing", False, "Of a suite, only rows that the run lacks.")
VARIANT = flags.DEFINE_string("variant", "", "Behind the ids of a suite measured in another way.")
MINUTES = flags.DEFINE_float(
    "minutes", 0.0, "Of a suite, no further row is begun that would end later; 0: all are.",
    lower_bound=0.0,
)  # fmt: skip
VQ_DTYPE = flags.DEFINE_enum(
    "vq-dtype", "bfloat16", config.VQ_DTYPES, "Of the decoder of images, in a suite."
)

RANDOM_PROMPT = 128  # tokens of the prompt of a model of random weights
RANDOM_SCALE = 0.02  # of its weights, at least


M = TypeVar("M")


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is timed: a model with one example of an image and one of a text."""

    model: Denoiser
    settings: config.Config
    examples: dict[str, Example]
    text_block_len: int


def of_checkpoint(folder_or_name: str) -> Subject:
    """Returns a trained model, asked for an image and for a text of its longest length."""
    pipe = SparseLaViDa.from_pretrained(folder_or_name, batch_size=BATCH.value)
    model, prompts = pipe.settings.model, pipe.prompts
    words = "a red circle above a blue square"
    examples = {"text": prompts.ask(words, (), prompts.long_answer_tokens)}
    if not model.understanding_only:
        blank = np.zeros((model.num_cells, model.codes_per_token), np.int32)
        examples = {"draw": prompts.draw(words, blank), **examples}
    return Subject(pipe.model, pipe.settings, examples, prompts.text_block_len)


def of_random_weights(settings: config.Config) -> Subject:
    """Returns a model of any size whose weights are random, made on the device as they are used."""
    model = settings.model
    ids = np.arange(RANDOM_PROMPT, dtype=np.int32) % min(model.text_mask_id, model.end_of_text_id)

    def example(kind: Kind, length: int, width: int) -> Example:
        parts = (Text(ids), Response(length))
        tokens, given = np.zeros((length, width), np.int32), np.zeros(length, bool)
        return Example(parts, tokens, given, kind, None, length)

    examples = {
        "draw": example("image", model.num_cells, model.codes_per_token),
        "text": example("text", settings.data.max_answer_len, 1),
    }
    return Subject(_random_model(model), settings, examples, settings.data.text_block_len)


def _random_model(settings: config.Model, task: fuse.Task | None = "both") -> Denoiser:
    """Fused for a task, as sampling finds the parameters of a model that was loaded.

    Args:
        task: None: as they are stored.
    """

    def make() -> Denoiser:
        model = Denoiser(settings, rngs=nnx.Rngs(0))
        return model if task is None else fuse.for_inference(model, task=task)

    return _random(make, jnp.dtype(settings.compute_dtype))


def _random(make: Callable[[], M], dtype: jnp.dtype) -> M:
    """Returns what `make` would, of random numbers: one array at a time is made.

    As large as those of a wide model; the matrices of a narrow one larger, or layers would make
    next to nothing of what goes in.
    """
    leaves, tree = jax.tree.flatten(jax.eval_shape(make))
    normal = jax.jit(
        lambda key, shape: (
            max(RANDOM_SCALE, shape[-2] ** -0.5) * jax.random.normal(key, shape, dtype)
        ),
        static_argnums=1,
    )
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [
        normal(key, leaf.shape) if leaf.ndim > 1 else jnp.ones(leaf.shape, dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def _whole_subject() -> suites.Subject:
    """Returns the model that suites measure, with its image tokenizer."""

    def decoder(codec: vq.VQModel | None) -> vq.VQModel | None:
        return None if codec is None else vq.for_decoding(codec, VQ_DTYPE.value)

    if RANDOM.value:
        settings = config.read(pathlib.Path(CONFIG.value))
        task = suite_cases.TASKS.get(SUITE.value or "", "both")
        model, codec = _random_model(settings.model, task), None
        sides = settings.model.grid_size * settings.model.codes_side * settings.vq.factor
        if sides == settings.vq.image_size:
            float32 = jnp.dtype("float32")
            codec = _random(lambda: vq.VQModel(settings.vq, rngs=nnx.Rngs(0)), float32)
        return suites.Subject(
            model, settings, codec, decoder(codec), random_weights=True,
            unfused=functools.partial(_random_model, settings.model, None),
        )  # fmt: skip
    pipe = SparseLaViDa.from_pretrained(CHECKPOINT.value)
    codec = None if pipe.codec is None or pipe.codec.vq is None else pipe.codec.vq
    settings = pipe.settings
    if codec is not None:
        settings = dataclasses.replace(settings, vq=codec.settings)
    return suites.Subject(pipe.model, settings, codec, decoder(codec), random_weights=False)


def main(argv: list[str]) -> None:
    """Times all presets, of images and then of text: writes a row for each, and a table of them.

    Or times a suite.
    """
    del argv
    logging.set_verbosity(logging.WARNING)  # of the array store
    runtime.keep_programs()
    known = (*config.PRESETS, *config.TEXT_PRESETS)
    if unknown := [name for name in PRESETS.value if name not in known]:
        sys.exit(f"bench.sampling: there is no preset {unknown[0]!r}: {', '.join(known)}.")
    if bool(CONFIG.value) != RANDOM.value:
        sys.exit(
            "bench.sampling: --config and --random-weights go together, as a file has no weights."
        )
    try:
        if SUITE.value:
            running.run_suite(
                _whole_subject(), SUITE.value, runs=RUNS.value, vq_dtype=VQ_DTYPE.value,
                variant=VARIANT.value, missing=MISSING.value, minutes=MINUTES.value,
            )  # fmt: skip
            return
        if RANDOM.value:
            subject = of_random_weights(config.read(pathlib.Path(CONFIG.value)))
        else:
            subject = of_checkpoint(CHECKPOINT.value)
    except (model_folder.CheckpointError, config.ConfigError) as error:
        sys.exit(f"bench.sampling: {error}")
    sampling, bench = subject.settings.sampling, Bench("sampling")
    if GUIDANCE.value is not None:
        sampling = dataclasses.replace(sampling, guidance=GUIDANCE.value)
    for task in subject.examples:
        names = config.PRESETS if task == "draw" else known
        field, default = (
            ("num_steps", sampling.num_steps) if task == "draw"
            else ("text_steps", sampling.text_steps)
        )  # fmt: skip
        steps = {field: STEPS.value or default}
        kind = "preset" if task == "draw" else "text_preset"
        samplings = {
            name: dataclasses.replace(sampling, **{kind: name}, **steps)
            for name in names
            if name in (PRESETS.value or known)
        }
        _measure(subject, bench, task, samplings, *steps.values())
    rows = [row for row in read_rows(bench.suite) if row["run"] == bench.run]
    print(f"\n{table.sampling_table(rows, seconds=True)}")


def _measure(
    subject: Subject, bench: Bench, task: str, samplings: dict[str, config.Sampling], steps: int
) -> None:
    """Times a batch of one example under every preset in turn, and writes a row for each.

    Args:
        steps: of an image, or of a text block.
    """
    settings, example = subject.settings, subject.examples[task]
    compile_s, times = {}, {name: [] for name in samplings}
    for name, sampling in samplings.items():
        compile_s[name] = _seconds(subject, example, sampling)
    for turn in range(RUNS.value):
        names = list(samplings)
        random.Random(turn).shuffle(names)
        for name in names:
            times[name].append(_seconds(subject, example, samplings[name]))
    for name, taken in times.items():
        how = presets.step_settings(samplings[name], settings.model, example.kind)
        tokens = tokens_passed(settings.model, samplings[name], example, subject.text_block_len)
        path = bench.write(
            f"{settings.name}/{task}/{name}/b{BATCH.value}/k{steps}/g{how.guidance_rows}",
            {
                "task": task,
                "method": name,
                "model": settings.name,
                "dtype": settings.model.compute_dtype,
                "batch": BATCH.value,
                "guidance_rows": how.guidance_rows,
                "steps": steps,
                "steps_timed": steps,
                "registers": settings.model.num_registers,
                "random_weights": RANDOM.value,
                "times_s": taken,
                "median_s": statistics.median(taken),
                "min_s": min(taken),
                "max_s": max(taken),
                "compile_s": compile_s[name],
                "tokens": {"useful": tokens},
                "note": "prefill and decoding loop; no VQ decoder, quality not measured",
            },
        )
        print(f"{path.name}: median {statistics.median(taken):.4f} s", flush=True)


def _seconds(subject: Subject, example: Example, sampling: config.Sampling) -> float:
    """Times one batch; a text is decoded to its last block, whether or not it has ended."""
    model, batch = subject.settings.model, BATCH.value
    settings = presets.step_settings(sampling, model, example.kind)
    requests = [
        Request(example.parts, example.response, example.given, example.pixels, seed)
        for seed in range(batch)
    ]
    begin = time.perf_counter()
    given = np.stack([request.given for request in requests])
    plan = presets.plan(sampling, settings, model, given, subject.text_block_len, range(batch))
    sample.sample(subject.model, requests, plan, settings=settings, stop_early=False)
    return time.perf_counter() - begin


if __name__ == "__main__":
    app.run(main)
