# SPDX-License-Identifier: Apache-2.0
"""Times whole requests, from prompt to pixels or words, and runs suites of them row by row."""

import dataclasses
import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import measurements, suites, timing, work
from benchmarks.suites import RequestCase
from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.models import fuse, quantize, vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.stack import admit_kernel_for
from sparse_lavida_jax.programs.persistent_jit import persistent_jit
from sparse_lavida_jax.sampling.content_cache import ContentCache
from sparse_lavida_jax.sampling.prompts import padded_lengths

Row = dict[str, Any]
Split = dict[str, float]  # seconds for each part of a request
SPLIT = ("host", "prefill", "loop", "vq_encode", "vq_decode")
RANDOM_SCALE = 0.02  # of random weights, at least

M = TypeVar("M")


class Discarding(Denoiser):
    """In every pass, also computes what the released code computes and then discards."""

    def __call__(self, *streams, wanted, **how):
        """Returns the wanted hidden states, the same as from the model itself."""
        hidden, cache = super().__call__(*streams, wanted="both", **how)
        width = self.settings.width
        wide = [jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in hidden.values()]
        # The text head over all tokens of a pass (spec Sec. 2.4). The compiler removes whatever has
        # no effect on the result, but cannot assume that 0 times a value is 0.
        unread = 0.0 * jnp.max(self.text_logits(jnp.concatenate(wide, axis=1)))
        read = hidden[wanted]
        return {wanted: read + jnp.asarray(unread, read.dtype)}, cache


def discarding(model: Denoiser) -> Discarding:
    """Returns a model with the same parameters that computes as much as the released code."""
    made = object.__new__(Discarding)
    vars(made).update(vars(model))
    return made


@dataclasses.dataclass
class Subject:
    """A model and its image tokenizer; other forms of it are made when needed.

    Attributes:
        codec: None if there is none.
        vq_dtype: dtype for decoding images.
        unfused: makes the parameters as they are stored; None if that is not possible.
    """

    model: Denoiser
    settings: config.Config
    codec: vq.AnyVQ | None
    vq_dtype: str
    random_weights: bool
    unfused: Callable[[], Denoiser] | None = None

    @functools.cached_property
    def decoder(self) -> vq.AnyVQ | None:
        """The parameters for decoding images."""
        return self.codec and vq.for_decoding(self.codec, self.vq_dtype)

    def in_form(self, case: RequestCase) -> Denoiser:
        """Returns the model in the form that a row needs."""
        if case.discards:
            return discarding(self.model)
        if case.sampling.quantize:
            return quantize.quantized(self.model, case.sampling.quantize)
        if case.without not in ("fused", "by_layer"):
            return self.model
        if self.unfused is None:
            raise config.ConfigError(
                "the suite fastpath needs random weights: give --config and --random-weights."
            )
        unfused = self.unfused()
        return unfused if case.without == "fused" else fuse.for_inference(unfused, by_layer=False)


class Timed:
    """A row whose programs have been compiled by a first request.

    Attributes:
        first: seconds of that request, without those of compiling.
    """

    def __init__(self, subject: Subject, case: RequestCase):
        self.subject, self.case, self.model = subject, case, subject.in_form(case)
        self.content_cache = ContentCache() if case.keeps_prefix else None
        self.decoder = subject.decoder
        if subject.codec is not None and case.without == "vq_dtype":
            self.decoder = vq.for_decoding(subject.codec, "float32")
        held, compiled = _peak_bytes(), measurements.compiled()
        before, kept, begin = len(compiled.seconds), compiled.kept, time.perf_counter()
        self.first = self.request(0)
        own = compiled.seconds[before:]
        self.compiled = {
            "compile_s": time.perf_counter() - begin,
            "compilations_kept": compiled.kept - kept,
            "longest_compile_s": max(own, default=0.0),
        }
        self.compilations_timed, self.held_before = 0, held

    def timed(self, turn: int) -> Split:
        """Runs a request, and counts what it compiles."""
        before = len(measurements.compiled().seconds)
        split = self.request(turn)
        self.compilations_timed += len(measurements.compiled().seconds) - before
        return split

    def request(self, turn: int) -> Split:
        """Runs one request, with new words and seeds each turn.

        Returns:
            Seconds of its parts, without those of compiling.
        """
        case, model, settings = self.case, self.model, self.model.settings
        split: Split = dict.fromkeys(SPLIT, 0.0)
        compiling = measurements.compiled().seconds
        last, counted = time.perf_counter(), len(compiling)

        def ends(part: str) -> None:
            nonlocal last, counted
            before, last = last, time.perf_counter()
            split[part] = last - before - sum(compiling[counted:])
            counted = len(compiling)

        if case.image is not None and self.subject.codec is not None:
            shown = np.repeat(case.image[None], case.batch, 0)
            vq.encode_images(self.subject.codec, shown, case.batch)
            ends("vq_encode")
        seeds = range(turn * case.batch, (turn + 1) * case.batch)
        inputs, plan = (
            case.sample_inputs(settings, seeds, turn),
            case.timed_plan(settings, list(seeds)),
        )
        how, bucket = case.settings(settings), padded_lengths(case.prompt(settings))
        ends("host")
        prefilled = sample.prefill_batch(
            model, inputs, plan, settings=how, prompt_len=bucket, split_phases=case.split_phases,
            content_cache=self.content_cache,
        )  # fmt: skip
        state = jax.block_until_ready(prefilled.state)
        ends("prefill")
        assert state is not None
        for phase in prefilled.phases:
            state = sample.advance(model, prefilled, state, phase)
            if turn == 0:  # nothing runs while the next program is compiled
                jax.block_until_ready(state)
        responses = np.asarray(state.responses)
        ends("loop")
        if how.modality == "image" and self.decoder is not None:
            known = np.minimum(responses, settings.codebook_size - 1)  # steps may not be timed
            grid = sequence.codes_from_cells(known, settings.grid_size, settings.codes_side)
            vq.to_pixels(self.decoder, np.asarray(grid), batch=1)
            ends("vq_decode")
        return split

    def row(self, splits: list[Split], calibration: dict[str, Any]) -> Row:
        """Returns the values of the row."""
        case, model = self.case, self.subject.settings.model
        settings, need = case.settings(model), work.of_case(case, model)
        steps, timed = len(need.steps), case.timed_steps(model)
        operations = [one.operations for one in need.steps]
        scale = sum(operations) / sum(operations[timed.start : timed.stop])
        split = {name: statistics.median(one[name] for one in splits) for name in SPLIT}
        told = f"; {len(timed)} of {steps} steps timed, scaled by their operations"
        part = told if case.steps_timed else ""
        rows = case.batch * settings.guidance_rows if case.of_one else 1
        rates = max(calibration["matmul_tflops"].values()), calibration["copy_gbps"]
        held = _peak_bytes()
        return {
            "task": case.task,
            "method": case.method,
            "dtype": model.compute_dtype,
            "quantize": case.sampling.quantize,
            "batch": case.batch,
            "guidance_rows": settings.guidance_rows,
            "steps": steps,
            "steps_timed": len(timed),
            "registers": settings.num_registers,
            **timing.times([sum(one.values()) + (scale - 1) * one["loop"] for one in splits]),
            "split_s": split | {"loop": scale * split["loop"]},
            **self.compiled,
            "compilations_timed": self.compilations_timed,
            "tokens": {
                "useful": round(need.total("tokens") / rows),
                "padded": round(need.total("slots") / rows),
            },
            "flops": {"useful": need.total("operations"), "vq": self.vq_operations()},
            "bytes": {"weights": need.total("weights"), "kv": need.total("keys")}
            | {"parameters": fuse.parameter_bytes(self.model)},
            "loop_flops": sum(operations),
            "floor_s": need.floor_s(*rates),
            "calibration": calibration,
            # None if an earlier row of this process used more.
            "peak_memory_bytes": held if held > self.held_before else None,
            **({"logits": self.moved_logits()} if case.sampling.quantize else {}),
            "note": f"whole request; quality not measured{part}",
        }

    def vq_operations(self) -> float:
        """Returns the operations of the image tokenizer in a request."""
        runs = {
            "vq_encode": self.case.image is not None,
            "vq_decode": self.case.example.modality == "image",
        }
        if self.subject.codec is None or not any(runs.values()):
            return 0.0
        counted = work.of_image_tokenizer(self.subject.settings.vq)
        return self.case.batch * sum(counted[name] for name in runs if runs[name])

    def moved_logits(self) -> dict[str, float]:
        """Returns how far 8 bits move the logits of the first step, and how many argmaxes stay."""
        case, whole = self.case, self.subject.model
        settings, plan = case.settings(whole.settings), case.plan(whole.settings)
        inputs = case.sample_inputs(whole.settings, range(case.batch))
        now = jax.tree.map(jnp.asarray, plan[0])[0]

        def logits(model: Denoiser) -> np.ndarray:
            prefilled = sample.prefill_batch(model, inputs, plan, settings=settings)
            found, _ = _step_logits(
                model, prefilled.state, now, prefilled.prompts, prefilled.settings
            )
            return np.asarray(found)[np.asarray(now.decode) >= 0]

        plain, moved = logits(whole), logits(self.model)
        difference = np.abs(moved - plain)
        return {
            "largest": float(np.abs(plain).max()),
            "largest_difference": float(difference.max()),
            "mean_difference": float(difference.mean()),
            "argmax_agreement": float((moved.argmax(-1) == plain.argmax(-1)).mean()),
            "equal_tokens": self.equal_tokens(),
        }

    def equal_tokens(self) -> float:
        """Returns the share of codes, or words, that 8 bits leave equal in whole responses.

        Seeds are equal too. A token that differs changes what the later steps see.
        """
        case, whole, seeds = self.case, self.subject.model, range(RESPONSES)
        settings, plan = case.settings(whole.settings), case.plan(whole.settings, list(seeds))
        inputs = case.sample_inputs(whole.settings, seeds)
        made = [
            sample.sample(model, inputs, plan, settings=settings, stop_early=False)
            for model in (whole, self.model)
        ]
        return float((made[0] == made[1])[:, ~case.example.given].mean())


RESPONSES = 8  # compared token by token
_step_logits = functools.partial(jax.jit, static_argnums=4)(sample.step_logits)


def _peak_bytes() -> int:
    """Returns the peak memory of this process so far; 0 if the devices do not report it."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def measure(
    subject: Subject, cases: Sequence[RequestCase], *, runs: int, calibration: dict[str, Any]
) -> list[Row]:
    """Returns the values of rows: `runs` whole requests of each, with the rows taking turns."""
    timed = [Timed(subject, case) for case in cases]
    requests = {number: one.timed for number, one in enumerate(timed)}
    splits = timing.in_turn(requests, runs, first=1)
    return [one.row(splits[number], calibration) for number, one in enumerate(timed)]


def random_subject(
    settings: config.Config, task: fuse.Task, *, draws: bool, vq_dtype: str
) -> Subject:
    """Returns a model of random weights, fused for a task, after a check of the device's kernel.

    Args:
        draws: whether it has an image tokenizer, if the sizes of the config fit together.
    """
    admit_kernel_for(settings.model)
    dtype = jnp.dtype(settings.model.compute_dtype)

    def stored() -> Denoiser:
        return Denoiser(settings.model, rngs=nnx.Rngs(0))

    model = random_parameters(lambda: fuse.for_inference(stored(), task=task), dtype)
    sides, codec = settings.model.grid_size * settings.model.codes_side * settings.vq.factor, None
    if draws and sides == settings.vq.image_size:
        make = functools.partial(vq.VQModel, settings.vq)
        codec = random_parameters(lambda: make(rngs=nnx.Rngs(0)), jnp.dtype("float32"))
    unfused = functools.partial(random_parameters, stored, dtype)
    return Subject(model, settings, codec, vq_dtype, True, unfused)


def random_parameters(make: Callable[[], M], dtype: jnp.dtype) -> M:
    """Returns the module that `make` would, with random numbers, making one array at a time.

    The numbers are as large as those of a wide model; in matrices of a narrow one they are larger,
    or the layers would output next to nothing.
    """
    leaves, tree = jax.tree.flatten(jax.eval_shape(make))
    made = [
        _normal(np.int32(number), shape=leaf.shape, dtype=dtype)
        if leaf.ndim > 1
        else jax.device_put(np.ones(leaf.shape, dtype))
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, made)


@persistent_jit(static=("shape", "dtype"))
def _normal(number: Any, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    scale = max(RANDOM_SCALE, max(shape[-2], 1) ** -0.5)
    return scale * jax.random.normal(jax.random.fold_in(jax.random.key(0), number), shape, dtype)


# ---------------------------------------------------------------------------------------------
# Suites: finished rows, and the run they belong to.


def run_suite(
    subject: Subject,
    suite: str,
    cases: Sequence[RequestCase],
    *,
    runs: int,
    variant: str = "",
    missing: bool = False,
    minutes: float = 0.0,
) -> str:
    """Measures a suite, writing each row as soon as it is measured; returns the id of the run.

    Args:
        runs: timed requests per row.
        variant: appended to the ids of measurements under other conditions, such as other flags.
        missing: continues the newest run of this code, model, software and device, and measures
            what it lacks.
        minutes: see `timing.in_time`. Rows that take turns are started together.

    Raises:
        ConfigError: an existing row was measured in another way and would be lost.
    """
    bench = measurements.Bench(suite)
    how = {
        "model": subject.settings.name,
        "settings": hashlib.sha256(repr(subject.settings).encode()).hexdigest()[:12],
        "random_weights": subject.random_weights,
        "vq_dtype": subject.vq_dtype,
        "variant": variant,
    }
    wanted = {f"{case.id}/{variant}" if variant else case.id: case for case in cases}
    paths = {row_id: measurements.path_of(suite, f"{how['model']}/{row_id}") for row_id in wanted}
    there = {id_: measurements.read_row(path) for id_, path in paths.items() if path.exists()}
    _refuse_to_lose(there, subject.vq_dtype)
    if missing:
        bench, done = _newest_run(bench, there, how)
        wanted = {row_id: case for row_id, case in wanted.items() if row_id not in done}
    if not wanted:
        return bench.run
    calibration, in_turn = timing.calibrate(), suites.in_turn(suite)
    groups: dict[str, list[str]] = {}
    for row_id, case in wanted.items():
        groups.setdefault(case.task if in_turn else row_id, []).append(row_id)
    for name in timing.in_time([*groups], minutes, "--missing measures the rest."):
        of_ids = [wanted[row_id] for row_id in groups[name]]
        rows = measure(subject, of_ids, runs=runs, calibration=calibration)
        for row_id, row in zip(groups[name], rows, strict=True):
            path = bench.write(row_id, row | how, name=f"{how['model']}/{row_id}")
            print(
                f"{path.name}: median {row['median_s']:.4f} s, loop {row['split_s']['loop']:.4f} s,"
                f" floor {row['floor_s']:.4f} s, compiled in {row['compile_s']:.1f} s",
                flush=True,
            )
    return bench.run


def _refuse_to_lose(there: dict[str, Row], vq_dtype: str) -> None:
    now = (measurements.circumstances()["software"]["xla_flags"], vq_dtype)
    for row_id, row in there.items():
        found = (row["software"]["xla_flags"], row.get("vq_dtype", vq_dtype))
        if found != now:
            raise config.ConfigError(
                f"{row_id} is there, measured with XLA_FLAGS and --vq-dtype {found}, and now they"
                f" are {now}: name this way, such as --variant=cb_off, or delete the row."
            )


def _newest_run(
    bench: measurements.Bench, there: dict[str, Row], how: Row
) -> tuple[measurements.Bench, set[str]]:
    """Returns the run to continue, and its rows; rows are compared within a run."""
    now = measurements.circumstances()
    expected = how | {"code": bench.source["code"], "software": now["software"]}
    expected["host_cores"] = now["device"]["host_cores"]
    done: set[str] = set()
    for row_id, row in sorted(there.items(), key=lambda pair: pair[1]["created"], reverse=True):
        other = measurements.differing(row | {"host_cores": row["device"]["host_cores"]}, expected)
        if not done and not other:
            bench = dataclasses.replace(bench, run=row["run"])
        if not other and row["run"] == bench.run:
            done.add(row_id)
        else:
            told = f"other {', '.join(other)}" if other else "of another run"
            print(f"{row_id} is measured again: {told}", flush=True)
    return bench, done
