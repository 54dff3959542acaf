# SPDX-License-Identifier: Apache-2.0
"""What the speed of whole requests is measured on: prompt in, pixels or words out."""

import dataclasses
import functools
import hashlib
import operator
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.bench import record, work
from sparse_lavida_jax.bench.suite_cases import WORDS, Case, sizes
from sparse_lavida_jax.models import fuse, quantize, vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import plans, presets, prompts
from sparse_lavida_jax.sampling.prefixes import Prefixes
from sparse_lavida_jax.sampling.prompts import Request
from sparse_lavida_jax.sequence import Text

SPLIT = ("host", "prefill", "loop", "vq_encode", "vq_decode")
# Step settings of rows that take a change back (`suite_cases.changes`).
TAKEN_BACK = {"tables_ahead": {"tables_ahead": False}, "tiled_head": {"head_tile": 0}}


@dataclasses.dataclass
class Subject:
    """A model and its image tokenizer; other forms of it are made when they are asked for.

    Attributes:
        codec: encodes, and None where there is none.
        decoder: decodes; of another dtype perhaps (`vq.for_decoding`).
        unfused: makes the parameters as they are stored; None where that is not known.
    """

    model: Denoiser
    settings: config.Config
    codec: vq.VQModel | None
    decoder: vq.VQModel | None
    random_weights: bool
    unfused: Callable[[], Denoiser] | None = None

    def in_form(self, case: Case) -> Denoiser:
        """Returns the model as a row asks for it."""
        if case.sampling.quantize:
            return quantize.quantized(self.model, case.sampling.quantize)
        if case.without not in ("fused", "by_layer"):
            return self.model
        if self.unfused is None:
            raise config.ConfigError("the suite fastpath takes --config and --random-weights.")
        unfused = self.unfused()
        return unfused if case.without == "fused" else fuse.for_inference(unfused, by_layer=False)


def measure(
    subject: Subject, cases: Sequence[Case], *, runs: int, calibration: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns the values of rows: of each `runs` whole requests behind one that compiles.

    Rows are timed in turn, in another order every turn, so that a machine that others use too is as
    busy for all of them.
    """
    warm = [_warmed(subject, case) for case in cases]
    for turn in range(runs):
        for one in random.Random(turn).sample(warm, len(warm)):
            before, begin = len(record.compiled().seconds), time.process_time()
            split, _ = _request(subject, one.model, one.case, one.settings, 1 + turn, one.prefixes)
            one.splits.append(split)
            one.cores.append((time.process_time() - begin) / sum(split.values()))
            one.compilations_timed += len(record.compiled().seconds) - before
    return [_row(subject, one, calibration) for one in warm]


@dataclasses.dataclass
class _Warm:
    """A row whose programs are compiled, and what its requests took so far.

    Attributes:
        ids_sha256: of the response to the request that compiled.
        compile_s: seconds of that request.
        compiled, kept: seconds of its programs; how many of them were compiled before.
        peak_before: bytes that this process held at most, before it.
        cores: processors that each request had on average; fewer where others use the machine.
    """

    case: Case
    model: Denoiser
    settings: presets.StepSettings
    prefixes: Prefixes | None
    ids_sha256: str
    compile_s: float
    compiled: list[float]
    kept: int
    peak_before: int
    compilations_timed: int = 0
    splits: list[dict[str, float]] = dataclasses.field(default_factory=list)
    cores: list[float] = dataclasses.field(default_factory=list)


def _warmed(subject: Subject, case: Case) -> _Warm:
    model = subject.in_form(case)
    settings = dataclasses.replace(
        presets.step_settings(
            case.sampling, subject.settings.model, case.example.kind,
            has_source=case.image is not None,
        ),
        discards=case.discards, **TAKEN_BACK.get(case.without or "", {}),
    )  # fmt: skip
    prefixes = Prefixes() if case.keeps_prefix else None
    compiled, peak = record.compiled(), _peak_bytes() or 0
    before, kept, begin = len(compiled.seconds), compiled.kept, time.perf_counter()
    _, canvas = _request(subject, model, case, settings, 0, prefixes)
    seconds, own = time.perf_counter() - begin, compiled.seconds[before:]
    digest = hashlib.sha256(canvas.tobytes()).hexdigest()
    return _Warm(
        case, model, settings, prefixes, digest, seconds, own, compiled.kept - kept, peak
    )  # fmt: skip


def _peak_bytes() -> int | None:
    """Returns what this process held at most so far; None where devices do not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _row(subject: Subject, warm: _Warm, calibration: dict[str, Any]) -> dict[str, Any]:
    case, model, settings, splits = warm.case, warm.model, warm.settings, warm.splits
    plan = _plan(case, settings, range(case.batch), subject.settings.model)
    prompt = _prompt(case, settings, subject.settings.model)
    itemsize = 1 if case.sampling.quantize else 0
    need = work.of_request(
        subject.settings.model, settings, plan, prompt, weight_bytes=itemsize,
        kept=case.keeps_prefix,
    )  # fmt: skip
    steps = sum(part.num_steps for part in plan)
    scale = steps / (case.steps_timed or steps)
    times = [sum(one.values()) + (scale - 1) * one["loop"] for one in splits]
    split = {name: statistics.median(one[name] for one in splits) for name in SPLIT}
    split["loop"] *= scale
    peak = _peak_bytes()
    return {
        "task": case.task,
        "method": case.method,
        "dtype": subject.settings.model.compute_dtype,
        "quantize": case.sampling.quantize,
        "batch": case.batch,
        "guidance_rows": settings.guidance_rows,
        "steps": steps,
        "steps_timed": case.steps_timed or steps,
        "registers": settings.num_registers,
        "ids_sha256": None if case.steps_timed else warm.ids_sha256,
        "times_s": times,
        "median_s": statistics.median(times),
        "min_s": min(times),
        "max_s": max(times),
        "split_s": split,
        "process_s": statistics.median(map(operator.mul, warm.cores, times)),
        "compile_s": warm.compile_s,
        "compilations": len(warm.compiled),
        "compilations_kept": warm.kept,
        "longest_compile_s": max(warm.compiled, default=0.0),
        "compilations_timed": warm.compilations_timed,
        "tokens": {"useful": need.total("tokens"), "padded": need.total("slots"), "loss": 0},
        "flops": {name: need.total(name) for name in ("useful", "padded")},
        "bytes": {
            "weights": need.total("weights"),
            "kv": need.total("keys"),
            "parameters": fuse.parameter_bytes(model),
        },
        "loop_flops": sum(one.useful for one in need.steps),
        "floor_s": need.floor_s(
            max(calibration["matmul_tflops"].values()), calibration["copy_gbps"]
        ),
        "calibration": calibration,
        # None where an earlier row of this process held more.
        "peak_memory_bytes": peak if peak and peak > warm.peak_before else None,
        **_error(subject, model, case, settings, plan),
        "note": "whole request; quality not measured"
        + (f"; {case.steps_timed} of {steps} equal steps timed" if case.steps_timed else ""),
    }


def _request(
    subject: Subject,
    model: Denoiser,
    case: Case,
    settings: presets.StepSettings,
    turn: int,
    prefixes: Prefixes | None,
) -> tuple[dict[str, float], Int[np.ndarray, "b l g"]]:
    """Runs one request, other words and seeds every turn; returns seconds of its parts, and ids."""
    split: dict[str, float] = dict.fromkeys(SPLIT, 0.0)
    clock = _Clock()
    if case.image is not None and subject.codec is not None:
        vq.encode_images(subject.codec, np.repeat(case.image[None], case.batch, 0), case.batch)
        split["vq_encode"] = clock()
    seeds = range(turn * case.batch, (turn + 1) * case.batch)
    requests = _requests(case, seeds, turn)
    plan = _plan(case, settings, seeds, model.settings)
    if case.steps_timed:
        plan = [_middle(plan, case.steps_timed)]
    bucket = _bucket(_prompt(case, settings, model.settings))
    split["host"] = clock()
    begun = sample.begin(
        model, requests, plan, settings=settings, prompt_len=bucket, prefixes=prefixes
    )
    state = jax.block_until_ready(begun.state)
    split["prefill"] = clock()
    assert state is not None
    for segment in plan:
        state = sample.advance(model, begun, state, segment, in_trips=case.in_trips)
    canvas = np.asarray(state.canvas)
    split["loop"] = clock()
    decoder = subject.codec if case.without == "vq_dtype" else subject.decoder
    if settings.kind == "image" and decoder is not None:
        side = model.settings.codes_side
        known = np.minimum(canvas, model.settings.codebook_size - 1)  # of steps not timed
        grid = sequence.codes_from_cells(known, model.settings.grid_size, side)
        vq.decode_codes(decoder, np.asarray(grid), batch=1)
        split["vq_decode"] = clock()
    return split, canvas


class _Clock:
    """Returns the seconds since it was last asked."""

    def __init__(self):
        self.last = time.perf_counter()

    def __call__(self) -> float:
        before, self.last = self.last, time.perf_counter()
        return self.last - before


def _requests(case: Case, seeds, turn: int = 0) -> list[Request]:
    example = case.example
    # Fewer words within the bucket, which is what lets requests share programs.
    fewer = turn % 8 if case.without is None else 0
    parts = tuple(
        Text(part.ids[: len(part.ids) - fewer]) if isinstance(part, Text) else part
        for part in example.parts
    )
    shown = example.views or example.pixels
    return [Request(parts, example.response, example.given, shown, seed) for seed in seeds]


def _plan(case: Case, settings, seeds, model: config.Model) -> list[plans.Segment]:
    given = np.stack([case.example.given] * case.batch)
    return presets.plan(case.sampling, settings, model, given, case.text_block_len, list(seeds))


def _prompt(case: Case, settings, model: config.Model) -> prompts.Prompt:
    return prompts.prepare(
        _requests(case, range(case.batch)),
        settings.kind,
        model,
        settings.guidance_rows,
        edit_guidance=settings.edit_guidance,
        with_given=not settings.preset.passes_given,
    )


def _bucket(prompt: prompts.Prompt) -> tuple[int, int]:
    generation = 0 if prompt.generation is None else prompt.generation.index.shape[1]
    return prompt.understanding.index.shape[1], generation


def _middle(plan: list[plans.Segment], number: int) -> plans.Segment:
    longest = max(plan, key=lambda part: part.num_steps)
    start = max(longest.num_steps - number, 0) // 2
    return longest.steps(start, start + number)


def _error(subject: Subject, model: Denoiser, case: Case, settings, plan) -> dict[str, Any]:
    """Returns how far 8 bits move the logits of each step, and how many modes stay.

    Both models decode what the whole one draws, each with a cache of its own making. Of a model of
    full size only the first step: every width of a step would be compiled anew.
    """
    if not case.sampling.quantize:
        return {}
    small = sizes(subject.settings.model)[0] < WORDS
    steps = [part.steps(i, i + 1) for part in plan for i in range(part.num_steps)]
    requests, run = _requests(case, range(case.batch)), _one_step()
    begun = [
        sample.begin(which, requests, plan, settings=settings) for which in (subject.model, model)
    ]
    states, found = [one.state for one in begun], []
    for part in steps if small else steps[:1]:
        now = sample.StepTokens(
            *(jnp.asarray(getattr(part, f.name))[0] for f in dataclasses.fields(sample.StepTokens))
        )
        program = dataclasses.replace(
            begun[0].program, guided=bool(part.guided[0]), refreshing=bool(part.refresh[0]),
            num_registers=presets.num_registers(part, begun[0].program),
        )  # fmt: skip
        (plain, after), (moved, other) = (
            run(which, state, now, begun[0].prompt, program)
            for which, state in zip((subject.model, model), states, strict=True)
        )
        states = [after, dataclasses.replace(after, cache=other.cache)]
        there = np.asarray(now.decode) >= 0
        found.append(_moved(np.asarray(plain)[there], np.asarray(moved)[there]))
    by_step = {name: [one[name] for one in found] for name in found[0]}
    return {
        "logits": {
            "largest": max(by_step["largest"]),
            "largest_difference": max(by_step["largest_difference"]),
            "mean_difference": statistics.mean(by_step["mean_difference"]),
            "argmax_agreement": statistics.mean(by_step["argmax_agreement"]),
            "by_step": by_step,
        }
    }


def _moved(plain: np.ndarray, moved: np.ndarray) -> dict[str, float]:
    difference = np.abs(moved - plain)
    return {
        "largest": float(np.abs(plain).max()),
        "largest_difference": float(difference.max()),
        "mean_difference": float(difference.mean()),
        "argmax_agreement": float((moved.argmax(-1) == plain.argmax(-1)).mean()),
    }


@functools.cache
def _one_step() -> Callable[..., Any]:
    """A step that also returns its logits."""

    def run(model, state, now, prompt, settings):
        logits, _ = sample.step_logits(model, state, now, prompt, settings)
        policy = sample.policy_of(settings.choice)
        return logits, sample.step(model, state, now, prompt, policy=policy, settings=settings)

    return jax.jit(run, static_argnums=4)
