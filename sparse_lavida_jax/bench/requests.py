# SPDX-License-Identifier: Apache-2.0
"""Times whole requests, prompt in, pixels or words out, and runs suites of them row by row."""

import dataclasses
import functools
import hashlib
import itertools
import json
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.bench import record, suites, timing, work
from sparse_lavida_jax.bench.suites import RequestCase
from sparse_lavida_jax.models import fuse, quantize, vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import draw, plans, presets
from sparse_lavida_jax.sampling.prefixes import Prefixes
from sparse_lavida_jax.sampling.prompts import padded_lengths
from sparse_lavida_jax.sampling.state import num_registers

Row = dict[str, Any]
SPLIT = ("host", "prefill", "loop", "vq_encode", "vq_decode")


class Discarding(Denoiser):
    """Computes in every pass what the released code computes, and throws away what nobody reads."""

    def __call__(self, *streams, wanted, **how):
        """Returns the wanted hidden states, which are those of the model itself."""
        hidden, cache = super().__call__(*streams, wanted="both", **how)
        width = self.settings.width
        wide = [jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in hidden.values()]
        # The text head over all tokens of a pass (spec Sec. 2.4). The compiler drops what nothing
        # depends on, but may not know that 0 times it is 0.
        unread = 0.0 * jnp.max(self.text_logits(jnp.concatenate(wide, axis=1)))
        read = hidden[wanted]
        return {wanted: read + jnp.asarray(unread, read.dtype)}, cache


def discarding(model: Denoiser) -> Discarding:
    """Returns a model with the same parameters that throws away as much as the released code."""
    made = object.__new__(Discarding)
    vars(made).update(vars(model))
    return made


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

    def in_form(self, case: RequestCase) -> Denoiser:
        """Returns the model as a row asks for it."""
        if case.discards:
            return discarding(self.model)
        if case.sampling.quantize:
            return quantize.quantized(self.model, case.sampling.quantize)
        if case.without not in ("fused", "by_layer"):
            return self.model
        if self.unfused is None:
            raise config.ConfigError("the suite fastpath takes --config and --random-weights.")
        unfused = self.unfused()
        return unfused if case.without == "fused" else fuse.for_inference(unfused, by_layer=False)


@dataclasses.dataclass
class _Warm:
    """A row whose programs are compiled, and what its requests took so far.

    Attributes:
        compiled: of the request that compiled, what a row says of it.
        peak_before: bytes that this process held at most, before this request.
        cores: processors that each request had on average; fewer where others use the machine.
    """

    case: RequestCase
    model: Denoiser
    prefixes: Prefixes | None
    peak_before: int
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)
    compilations_timed: int = 0
    splits: list[dict[str, float]] = dataclasses.field(default_factory=list)
    cores: list[float] = dataclasses.field(default_factory=list)


def measure(
    subject: Subject, cases: Sequence[RequestCase], *, runs: int, calibration: dict[str, Any]
) -> list[Row]:
    """Returns the values of rows: of each `runs` whole requests after one that compiles.

    Rows are timed in turn (`timing.in_turn`).
    """
    warm = [_warmed(subject, case) for case in cases]
    for turn, one in timing.in_turn(warm, runs):
        before, begin = len(record.compiled().seconds), time.process_time()
        split, _ = _request(subject, one.model, one.case, 1 + turn, one.prefixes)
        one.splits.append(split)
        one.cores.append((time.process_time() - begin) / sum(split.values()))
        one.compilations_timed += len(record.compiled().seconds) - before
    return [_row(subject, one, calibration) for one in warm]


def _warmed(subject: Subject, case: RequestCase) -> _Warm:
    prefixes = Prefixes() if case.keeps_prefix else None
    warm = _Warm(case, subject.in_form(case), prefixes, _peak_bytes() or 0)
    compiled = record.compiled()
    before, kept, begin = len(compiled.seconds), compiled.kept, time.perf_counter()
    _, canvas = _request(subject, warm.model, case, 0, prefixes)
    seconds, own = time.perf_counter() - begin, compiled.seconds[before:]
    digest = hashlib.sha256(canvas.tobytes()).hexdigest()
    warm.compiled = {
        "ids_sha256": None if case.steps_timed else digest,
        "compile_s": seconds,
        "compilations": len(own),
        "compilations_kept": compiled.kept - kept,
        "longest_compile_s": max(own, default=0.0),
    }
    return warm


def _peak_bytes() -> int | None:
    """Returns what this process held at most so far; None where devices do not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _row(subject: Subject, warm: _Warm, calibration: dict[str, Any]) -> Row:
    case, model = warm.case, subject.settings.model
    settings, plan, prompt = case.settings(model), case.plan(model), case.prompt(model)
    counting = {"kept": case.keeps_prefix, "discards": case.discards}
    weight_bytes = 1 if case.sampling.quantize else 0
    need = work.of_request(model, settings, plan, prompt, weight_bytes=weight_bytes, **counting)
    steps = sum(part.num_steps for part in plan)
    scale = steps / (case.steps_timed or steps)
    times = [sum(one.values()) + (scale - 1) * one["loop"] for one in warm.splits]
    split = {name: statistics.median(one[name] for one in warm.splits) for name in SPLIT}
    split["loop"] *= scale
    peak = _peak_bytes()
    tokens = {"useful": need.total("tokens"), "padded": need.total("slots"), "loss": 0}
    part = f"; {case.steps_timed} of {steps} equal steps timed" if case.steps_timed else ""
    matmul_tflops = max(calibration["matmul_tflops"].values())
    return {
        "task": case.task,
        "method": case.method,
        "dtype": model.compute_dtype,
        "quantize": case.sampling.quantize,
        "batch": case.batch,
        "guidance_rows": settings.guidance_rows,
        "steps": case.steps or steps,
        "steps_timed": case.steps or case.steps_timed or steps,
        "registers": settings.num_registers,
        **timing.times(times),
        "split_s": split,
        "process_s": statistics.median(map(operator.mul, warm.cores, times)),
        **warm.compiled,
        "compilations_timed": warm.compilations_timed,
        "tokens": {"useful": case.tokens_of_one(model)} if case.steps else tokens,
        "flops": {name: need.total(name) for name in ("useful", "padded")},
        "bytes": {
            "weights": need.total("weights"),
            "kv": need.total("keys"),
            "parameters": fuse.parameter_bytes(warm.model),
        },
        "loop_flops": sum(one.useful for one in need.steps),
        "floor_s": need.floor_s(matmul_tflops, calibration["copy_gbps"]),
        "calibration": calibration,
        # None where an earlier row of this process held more.
        "peak_memory_bytes": peak if peak and peak > warm.peak_before else None,
        **_error(subject, warm.model, case, settings, plan),
        "note": f"whole request; quality not measured{part}",
    }


def _request(
    subject: Subject, model: Denoiser, case: RequestCase, turn: int, prefixes: Prefixes | None
) -> tuple[dict[str, float], Int[np.ndarray, "b l g"]]:
    """Runs one request, other words and seeds every turn; returns seconds of its parts, and ids."""
    split: dict[str, float] = dict.fromkeys(SPLIT, 0.0)
    last = time.perf_counter()

    def ends(part: str) -> None:
        nonlocal last
        before, last = last, time.perf_counter()
        split[part] = last - before

    if case.image is not None and subject.codec is not None:
        vq.encode_images(subject.codec, np.repeat(case.image[None], case.batch, 0), case.batch)
        ends("vq_encode")
    seeds, settings = range(turn * case.batch, (turn + 1) * case.batch), model.settings
    requests, plan = case.requests(seeds, turn), case.timed_plan(settings, list(seeds))
    how, bucket = case.settings(settings), padded_lengths(case.prompt(settings))
    ends("host")
    begun = sample.begin(model, requests, plan, settings=how, prompt_len=bucket, prefixes=prefixes)
    state = jax.block_until_ready(begun.state)
    ends("prefill")
    assert state is not None
    for segment in plan:
        state = sample.advance(model, begun, state, segment, in_trips=case.in_trips)
    canvas = np.asarray(state.canvas)
    ends("loop")
    decoder = subject.codec if case.without == "vq_dtype" else subject.decoder
    if how.kind == "image" and decoder is not None:
        known = np.minimum(canvas, settings.codebook_size - 1)  # of steps not timed
        grid = sequence.codes_from_cells(known, settings.grid_size, settings.codes_side)
        vq.decode_codes(decoder, np.asarray(grid), batch=1)
        ends("vq_decode")
    return split, canvas


def _error(
    subject: Subject,
    model: Denoiser,
    case: RequestCase,
    settings: presets.StepSettings,
    plan: list[plans.Segment],
) -> dict[str, Any]:
    """Returns how far 8 bits move the logits of each step, and how many modes stay.

    Both models decode what the whole one draws, each with a cache of its own making. Of a model of
    full size only the first step: every width of a step would be compiled again.
    """
    if not case.sampling.quantize:
        return {}
    small = suites.sizes(subject.settings.model)[0] < suites.WORDS
    steps = [part.steps(i, i + 1) for part in plan for i in range(part.num_steps)]
    requests, both = case.requests(range(case.batch)), (subject.model, model)
    begun = [sample.begin(which, requests, plan, settings=settings) for which in both]
    states, found = [one.state for one in begun], []
    names = [field.name for field in dataclasses.fields(sample.StepTokens)]
    for part in steps if small else steps[:1]:
        now = sample.StepTokens(*(jnp.asarray(getattr(part, name))[0] for name in names))
        program = dataclasses.replace(
            begun[0].program,
            guided=bool(part.guided[0]),
            refreshing=bool(part.refresh[0]),
            num_registers=num_registers(part, begun[0].program),
        )
        (plain, after), (moved, other) = (
            _one_step(which, state, now, begun[0].prompt, program)
            for which, state in zip(both, states, strict=True)
        )
        states = [after, dataclasses.replace(after, cache=other.cache)]
        there = np.asarray(now.decode) >= 0
        plain, moved = np.asarray(plain)[there], np.asarray(moved)[there]
        difference = np.abs(moved - plain)
        found.append(
            {
                "largest": float(np.abs(plain).max()),
                "largest_difference": float(difference.max()),
                "mean_difference": float(difference.mean()),
                "argmax_agreement": float((moved.argmax(-1) == plain.argmax(-1)).mean()),
            }
        )
    by_step = {name: [one[name] for one in found] for name in found[0]}
    over_all = {name: statistics.mean(values) for name, values in by_step.items()}
    largest = {name: max(by_step[name]) for name in ("largest", "largest_difference")}
    return {"logits": over_all | largest | {"by_step": by_step}}


@functools.partial(jax.jit, static_argnums=4)
def _one_step(model, state, now, prompt, settings):
    """A step that also returns its logits."""
    logits, _ = sample.step_logits(model, state, now, prompt, settings)
    policy = draw.policy_of(settings.choice)
    return logits, sample.step(model, state, now, prompt, policy=policy, settings=settings)


# ---------------------------------------------------------------------------------------------
# Suites: finished rows, and the run that they are of.


def run_suite(
    subject: Subject,
    suite: str,
    cases: Sequence[RequestCase],
    *,
    runs: int,
    vq_dtype: str,
    variant: str = "",
    missing: bool = False,
    minutes: float = 0.0,
) -> str:
    """Measures a suite and writes a row as soon as it is measured; returns the id of the run.

    Args:
        runs: timed requests of each row.
        vq_dtype: of the subject's decoder of images.
        variant: after the ids of what is measured in another way, with other flags perhaps.
        missing: goes on with the newest run of this code, model, software and device, and measures
            what it lacks.
        minutes: no row is begun that would end later, if it takes as long as the longest so far;
            0: all are. Rows that are timed in turn are begun together.

    Raises:
        ConfigError: a row that is there was measured in another way and would be lost.
    """
    bench = record.Bench(suite)
    how = {
        "model": subject.settings.name,
        "settings": hashlib.sha256(repr(subject.settings).encode()).hexdigest()[:12],
        "random_weights": subject.random_weights,
        "vq_dtype": vq_dtype,
        "variant": variant,
    }
    wanted = {f"{case.id}/{variant}" if variant else case.id: case for case in cases}
    paths = {row_id: record.path_of(suite, f"{how['model']}/{row_id}") for row_id in wanted}
    there = {id_: json.loads(path.read_text()) for id_, path in paths.items() if path.exists()}
    _refuse_to_lose(there, vq_dtype)
    if missing:
        bench, done = _newest_run(bench, there, how)
        wanted = {row_id: case for row_id, case in wanted.items() if row_id not in done}
    if not wanted:
        return bench.run
    calibration = timing.calibrate()
    together = [[row_id] for row_id in wanted]
    if suites.in_turn(suite):
        by_task = itertools.groupby(wanted, lambda row_id: wanted[row_id].task)
        together = [[*ids] for _, ids in by_task]
    begin, longest = time.monotonic(), 0.0
    for number, ids in enumerate(together):
        begun = time.monotonic() - begin
        if minutes and number and begun + longest > 60 * minutes:
            left = list(itertools.chain(*together[number:]))
            print(f"no time for {', '.join(left)}: --missing measures the rest.", flush=True)
            break
        of_ids = [wanted[row_id] for row_id in ids]
        rows = measure(subject, of_ids, runs=runs, calibration=calibration)
        for row_id, row in zip(ids, rows, strict=True):
            path = bench.write(row_id, row | how, name=f"{how['model']}/{row_id}")
            print(
                f"{path.name}: median {row['median_s']:.4f} s, loop {row['split_s']['loop']:.4f} s,"
                f" floor {row['floor_s']:.4f} s, compiled in {row['compile_s']:.1f} s",
                flush=True,
            )
        longest = max(longest, time.monotonic() - begin - begun)
    return bench.run


def _refuse_to_lose(there: dict[str, Row], vq_dtype: str) -> None:
    now = (record.circumstances()["software"]["xla_flags"], vq_dtype)
    for row_id, row in there.items():
        found = (row["software"]["xla_flags"], row.get("vq_dtype", vq_dtype))
        if found != now:
            raise config.ConfigError(
                f"{row_id} is there, measured with XLA_FLAGS and --vq-dtype {found}, and now they"
                f" are {now}: name this way, such as --variant=cb_off, or delete the row."
            )


def _newest_run(
    bench: record.Bench, there: dict[str, Row], how: Row
) -> tuple[record.Bench, set[str]]:
    """Returns the run to go on with, and its rows; rows are compared within a run."""
    now = record.circumstances()
    expected = how | {"code": bench.source["code"], "software": now["software"]}
    expected["host_cores"] = now["device"]["host_cores"]
    done: set[str] = set()
    for row_id, row in sorted(there.items(), key=lambda pair: pair[1]["created"], reverse=True):
        row_of = row | {"host_cores": row["device"]["host_cores"]}
        other = record.differing(row_of, expected)
        if not done and not other:
            bench = dataclasses.replace(bench, run=row["run"])
        if not other and row["run"] == bench.run:
            done.add(row_id)
        else:
            told = f"other {', '.join(other)}" if other else "of another run"
            print(f"{row_id} is measured again: {told}", flush=True)
    return bench, done
