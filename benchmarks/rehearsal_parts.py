# SPDX-License-Identifier: Apache-2.0
"""The parts of `bench/rehearsal.py`: each does one thing with a model and returns rows."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.bench import (
    memory,
    objectives,
    release,
    requests,
    serving,
    suites,
    timing,
    work,
)
from sparse_lavida_jax.checkpoints import manifest, model_folder, tensors
from sparse_lavida_jax.convert import from_torch, names, stand_in, to_torch
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.engine import Decoded, Engine, block_len
from sparse_lavida_jax.inference.results import SHOWN_KEY
from sparse_lavida_jax.models import denoiser, fuse, parameters, quantize
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sample import Progress
from sparse_lavida_jax.sequence import Source

Rows = dict[str, dict[str, Any]]
RELEASED, MODEL, INT8 = "released", "model", "int8"
# What is loaded: a folder, and the task that the parameters are for.
LOADED: dict[tuple[str, fuse.Task], str] = {
    (MODEL, "both"): "whole",
    (MODEL, "image"): "image",
    (INT8, "both"): "int8",
}
METHOD = "w8a8"
PROMPT, INSTRUCTION = "a robot in a field of flowers", "make the flowers blue"
QUESTION, PHRASES = "what is in the image?", ("the robot", "a flower")
# Steps that are timed, sparse and by other methods; 0: all.
STEPS_TIMED = {"image": (0, 2), "edit": (8, 1), "text": (4, 4)}
WITHIN = 0.05  # by which measured memory may differ from the plan
FREE_SHARE = 0.7  # of the free memory is planned for training


@dataclasses.dataclass(frozen=True)
class ReleaseRehearsal:
    """What is rehearsed.

    Attributes:
        folder: for the folders of the model.
        layers: an even number.
        tiny: whether widths are those of the tests.
        again: whether parts that have their rows run again.
    """

    folder: pathlib.Path
    layers: int
    tiny: bool
    again: bool

    @property
    def size(self) -> str:
        return "tiny" if self.tiny else "release"

    @functools.cached_property
    def settings(self) -> config.Config:
        """The settings of the model, sampled sparsely, with matrices as `METHOD` says."""
        given = release.settings(self.layers, tiny=self.tiny)
        sparse: dict[str, Any] = {"preset": "sparse", "text_preset": "sparse", "grid": "cell"}
        sparse |= {"text_step_ratio": 0.0, "edit_guidance": "source", "quantize": METHOD}
        few = {"num_steps": 2, "text_steps": 2, "text_block_len": 16} if self.tiny else {}
        block = {"text_block_len": 16, "max_answer_len": 16} if self.tiny else {}
        return config.changed(given, {"sampling": sparse | few, "data": block})

    @property
    def how(self) -> dict[str, Any]:
        """What the rows of a finished part have in common with those to be measured."""
        digest = hashlib.sha256(repr(self.settings).encode()).hexdigest()[:12]
        return {"size": self.size, "layers": self.layers, "settings": digest}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors of the released folder."""
        return 2 * sum(int(np.prod(one.shape)) for one in names.table(self.settings))

    @property
    def disk_bytes(self) -> int:
        """Bytes that folders need when most of them are there; exports are compared by the file."""
        shard = min(self.weight_bytes, tensors.SHARD_BYTES)
        return round(2 * self.weight_bytes + model_folder.FREE_SPACE_FACTOR * shard)

    def made(self, name: str, part: str) -> pathlib.Path:
        """Returns a folder that an earlier part made.

        Raises:
            ConfigError: it is not there.
        """
        if not (self.folder / name / "config.json").is_file():
            raise config.ConfigError(
                f"{self.folder / name} is not there: run --parts={part} first."
            )
        return self.folder / name


# ---------------------------------------------------------------------------------------------
# Folders.


def make_stand_in(asked: ReleaseRehearsal) -> Rows:
    """Writes a folder in the released format."""
    shutil.rmtree(asked.folder / RELEASED, ignore_errors=True)
    with _timed() as took:
        size = stand_in.write(asked.folder / RELEASED, asked.settings)
    return {"stand_in": _of_folder("written", size) | took}


def convert(asked: ReleaseRehearsal) -> Rows:
    """Converts it to a model folder."""
    source = asked.made(RELEASED, "stand_in")
    with _timed() as took:
        done = from_torch.convert(source, asked.folder / MODEL)
    row = _of_folder("converted", asked.weight_bytes) | took
    return {"convert": row | {"parameters": done.num_parameters}}


def verify(asked: ReleaseRehearsal) -> Rows:
    """Compares the files of the model folder with their digests."""
    folder = asked.made(MODEL, "stand_in,convert")
    with _timed() as took:
        manifest.verify(folder)
    return {"verify": _of_folder("verified", asked.weight_bytes) | took}


def export(asked: ReleaseRehearsal) -> Rows:
    """Exports the model folder, and compares each file with the source before removing it.

    The source is removed too if everything in it came back bit for bit.
    """
    folder, source = asked.made(MODEL, "stand_in,convert"), asked.made(RELEASED, "stand_in")
    shutil.rmtree(asked.folder / "exported", ignore_errors=True)
    wanted = _tensors_of(source)
    number, different = len(wanted), []

    def take(path: pathlib.Path) -> None:
        for name, tensor in tensors.list_tensors(path).items():
            expected = wanted.pop(name, None)
            if expected is None or not _is_same(tensor, expected):
                different.append(name)
        path.unlink()

    with _timed() as took:
        to_torch.export(folder, asked.folder / "exported", take=take)
    small = [path for path in source.rglob("*.json") if path.name != tensors.INDEX]
    different += [
        path.name
        for path in small
        if path.read_bytes() != (asked.folder / "exported" / path.relative_to(source)).read_bytes()
    ]
    shutil.rmtree(asked.folder / "exported")
    if is_same := not (different or wanted):
        shutil.rmtree(source)
    told = {"tensors": number, "different": sorted([*different, *wanted])[:16]}
    row = _of_folder("exported", asked.weight_bytes) | took | told
    return {"export": row | {"checks": {"identical": is_same}}}


def narrow(asked: ReleaseRehearsal) -> Rows:
    """Copies the model folder with the matrices of its layers in int8."""
    with _timed() as took:
        folder = asked.made(MODEL, "stand_in,convert")
        model_folder.copy(folder, asked.folder / INT8, dtype="int8")
    size = _stored(asked.folder / INT8)
    return {"int8": _of_folder("rounded", size) | took}


def _stored(folder: pathlib.Path) -> int:
    """Returns the bytes of the parameters in a model folder."""
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))


def _of_folder(method: str, size: int) -> dict[str, Any]:
    sizes = {"bytes": {"disk": size}, "expected_bytes": {"total": release.MOST_BYTES}}
    return {"task": "folder", "method": method, "dtype": "bfloat16", **sizes}


def _tensors_of(folder: pathlib.Path) -> dict[str, tensors.Tensor]:
    listed = map(tensors.list_tensors, folder.glob("*.safetensors"))
    return {name: one for found in listed for name, one in found.items()}


def _is_same(one: tensors.Tensor, other: tensors.Tensor) -> bool:
    """Whether tensors are equal bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = f"u{tensors.STORED[one.dtype].itemsize}"
    return np.array_equal(one.read().view(bits), other.read().view(bits))


@contextlib.contextmanager
def _timed() -> Iterator[dict[str, Any]]:
    """Yields a part of a row that afterwards holds the seconds, also those of the processor."""
    took: dict[str, Any] = {}
    begin, busy = time.perf_counter(), time.process_time()
    yield took
    took |= timing.times([time.perf_counter() - begin]) | {"cpu_s": time.process_time() - busy}


# ---------------------------------------------------------------------------------------------
# Loading.


def load(asked: ReleaseRehearsal, name: str, task: fuse.Task) -> Rows:
    """Loads parameters; compares the memory that the process then holds with the plan."""
    folder = asked.made(name, "stand_in,convert,int8")
    shapes = denoiser.shapes(asked.settings.model)

    def planned(shapes: Denoiser) -> Denoiser:
        model = quantize.quantized(shapes, "int8") if name == INT8 else shapes
        return model if task == "both" else fuse.for_inference(model, task=task)

    kept = jax.eval_shape(planned, shapes)
    expected = _bytes_in_memory(kept)
    # `fuse.for_inference` copies one matrix of all layers at a time.
    most = max(2 * leaf.size for leaf in jax.tree.leaves(kept))
    _check_room(expected + (most if task != "both" else 0), "loading")
    before = serving.memory(os.getpid()).get("rss_gb", 0.0)
    with _timed() as took:
        model = release.load_for(folder, task)
        jax.block_until_ready(jax.tree.leaves(model))
    held = round(1e9 * (serving.memory(os.getpid()).get("rss_gb", 0.0) - before))
    size = fuse.parameter_bytes(model)
    row = took | {
        "task": "load",
        "method": f"{name}/{task}",
        "dtype": "int8" if name == INT8 else "bfloat16",
        "bytes": {"disk": _stored(folder), "parameters": size, "held": held},
        "expected_bytes": {"total": expected},
        "checks": {
            "parameters": abs(size / expected - 1) <= WITHIN,
            "held": asked.tiny or abs(held / expected - 1) <= WITHIN,
        },
    }
    return {f"load_{LOADED[name, task]}": row}


def _bytes_in_memory(shapes: Denoiser) -> int:
    """Returns the bytes of all parameters: in bfloat16, except 8-bit matrices and their scales."""
    leaves = parameters.by_name(shapes)
    narrow = {name.rpartition("/")[0] for name, leaf in leaves.items() if leaf.dtype.itemsize == 1}
    return sum(
        leaf.size * (leaf.dtype.itemsize if name.rpartition("/")[0] in narrow else 2)
        for name, leaf in leaves.items()
    )


def _check_room(needed: int, what: str) -> None:
    """Refuses what does not fit into the free memory, in bytes.

    Raises:
        ConfigError: it does not.
    """
    free = _free_memory()
    if needed > free:
        raise config.ConfigError(
            f"{what} needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free: take"
            " fewer --layers, or end other programs."
        )


def _free_memory() -> float:
    """Returns the bytes of memory that are free, on Linux; elsewhere there is no limit."""
    path = pathlib.Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * int(found[0]) if found else float("inf")


# ---------------------------------------------------------------------------------------------
# Requests.


class Cancelled(Exception):
    """A request was cancelled by its callback."""


class Noting(Engine):
    """An engine that notes what it decodes: examples with their sampling settings."""

    noted: list[tuple[Any, config.Sampling]]

    def decode(self, examples, requests, sampling, **how) -> Decoded:
        self.noted = [(example, sampling) for example in examples]
        return super().decode(examples, requests, sampling, **how)


@functools.cache
def pipeline(asked: ReleaseRehearsal) -> SparseLaViDa:
    """Returns the model with matrices in int8, sampled as `ReleaseRehearsal.settings` says."""
    folder = asked.made(INT8, "stand_in,convert,int8")
    _check_room(_stored(folder), "the model in int8")
    pipe = SparseLaViDa.from_pretrained(folder, batch_size=1, dtype="bfloat16")
    pipe = pipe.with_sampling(asked.settings.sampling)
    pipe.engine = Noting(pipe.model, 1, pipe.prompts.text_block_len)
    return pipe


def request(asked: ReleaseRehearsal, task: str, *, cancels: bool = False) -> Rows:
    """Does a request twice, the second time from its record if it has one, and times that.

    Args:
        cancels: whether it is begun and cancelled before, to be asked for again.
    """
    pipe, begin = pipeline(asked), time.perf_counter()
    side = pipe.settings.vq.image_size
    shown = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    ask: Callable[..., Any] = {
        "generate": functools.partial(pipe.generate, PROMPT),
        "edit": functools.partial(pipe.edit, shown, INSTRUCTION),
        "ask": functools.partial(pipe.ask, shown, QUESTION),
        "ground": functools.partial(pipe.ground, shown, PHRASES),
        "inpaint": functools.partial(pipe.inpaint, shown, PROMPT, box=(0, 0, side // 2, side // 2)),
    }[task]
    seen: list[tuple[int, float]] = []

    def note(state: Progress) -> None:
        seen.append((state.steps, time.perf_counter()))
        if cancels and state.steps:
            raise Cancelled

    checks = {}
    if cancels:
        checks["cancelled"] = False
        try:
            ask(callback=note)
        except Cancelled:
            checks["cancelled"], cancels = True, False
    first = ask(callback=note)
    first_s = time.perf_counter() - begin
    seen.clear()
    with _timed() as took:
        if first.records:
            path = asked.folder / f"{task}.png"
            first.save(path)
            given = shown if first.records[0][SHOWN_KEY] else None
            again = pipe.replay(image_files.read_record(path), given, callback=note)
        else:
            again = ask(callback=note)
    checks["the same again"] = _are_same(first, again)
    checks["shapes"] = all(image.shape == shown.shape for image in again.pixels)
    checks["progress"] = [steps for steps, _ in seen] == sorted({steps for steps, _ in seen})
    assert isinstance(pipe.engine, Noting)
    needs = [
        work.of_case(_case(pipe, task, *one), pipe.settings.model) for one in pipe.engine.noted
    ]
    stages = sum(again.seconds.values())
    row = took | {
        "task": f"{task}{side}",
        "method": "sparse",
        "dtype": f"bfloat16, {METHOD}",
        "quantize": METHOD,
        "steps": seen[-1][0],
        "segments_s": [after - before for (_, before), (_, after) in itertools.pairwise(seen)],
        "split_s": again.seconds | {"rest": took["median_s"] - stages},
        "first_s": first_s,
        "tokens": {"useful": again.tokens_passed, "prompt": sum(map(sum, again.prompted))},
        "flops": {"useful": sum(one.total("operations") for one in needs)},
        "bytes": {"parameters": fuse.parameter_bytes(pipe.model)},
        "checks": checks,
        "note": "random weights; operations without the image tokenizer and the vision tower",
    }
    return {task: row}


def _are_same(one: Any, other: Any) -> bool:
    """Whether two results hold the same images, tokens, texts and boxes, to the bit."""
    pairs = zip(one.pixels + one.tokens, other.pixels + other.tokens, strict=True)
    said = (one.texts, one.boxes) == (other.texts, other.boxes)
    return said and all(itertools.starmap(np.array_equal, pairs))


def _case(pipe: SparseLaViDa, task: str, example: Any, how: config.Sampling) -> suites.RequestCase:
    """Returns what was decoded, to count its operations."""
    edits = any(isinstance(part, Source) for part in example.parts)
    most = how.text_block_len or pipe.prompts.text_block_len
    return suites.RequestCase(
        id=task,
        task=task,
        method="sparse",
        example=example,
        sampling=how,
        text_block_len=block_len(len(example.response), most),
        image=np.zeros((1, 1, 3), np.uint8) if edits else None,
    )


# ---------------------------------------------------------------------------------------------
# Sparse against dense.


def presets(asked: ReleaseRehearsal, kind: str) -> Rows:
    """Times a sparse request, and a few steps of each of the others, one after another."""
    pipe, settings = pipeline(asked), asked.settings
    model = quantize.as_asked(pipe.model, METHOD)  # so that no row has to ask for it
    plain = dataclasses.replace(settings.sampling, quantize="")
    settings = dataclasses.replace(settings, sampling=plain)
    assert pipe.codec is not None
    whole = requests.Subject(model, settings, pipe.codec.vq, "float32", True)
    # What a sparse request takes for the image tokenizer, the others take too.
    partial = dataclasses.replace(whole, codec=None)
    calibration = timing.calibrate()
    # One request each takes minutes, so none is spent on compiling alone.
    timed = {
        case.method: requests.Timed(whole if case.method == "sparse" else partial, case)
        for case in _cases(kind, settings)
    }
    codec = {name: timed["sparse"].first[name] for name in ("vq_encode", "vq_decode")}
    of_codec, rows = timed["sparse"].vq_operations(), {}
    for method, one in timed.items():
        row = one.row([one.first | codec], calibration)
        del row["compilations_timed"], row["compile_s"]  # their seconds are left out
        row |= {"dtype": f"bfloat16, {METHOD}", "quantize": METHOD}
        row["flops"]["vq"] = of_codec
        rows[f"presets_{kind}/{method}"] = row | {"note": f"random weights; {row['note']}"}
    return rows


def _cases(kind: str, settings: config.Config) -> Iterator[suites.RequestCase]:
    """Yields requests by every method, whole if sparse images."""
    if kind == "image":
        others = [one for one in suites.cases("ablation", settings) if one.method != "sparse"]
        found = [*suites.cases("headline", settings), *others]
    elif kind == "edit":
        # With the words of every token at once, the released way needs 5 GB more.
        found = [one for one in suites.cases("edit", settings) if "released" not in one.method]
    else:
        cases = suites.cases("reasoning", settings)
        found = [one for one in cases if one.sampling.text_steps == 8 and "lean" not in one.method]
    for case in found:
        yield dataclasses.replace(case, steps_timed=STEPS_TIMED[kind][case.method != "sparse"])


# ---------------------------------------------------------------------------------------------
# Training.


def train(asked: ReleaseRehearsal, way: str) -> Rows:
    """Does a training step with as many layers as fit, and compares its memory with the plan."""
    free = FREE_SHARE * _free_memory()
    for layers in range(asked.layers, 0, -2):
        settings = _trained(dataclasses.replace(asked, layers=layers).settings, way)
        examples = objectives.random_examples(settings.model, settings.seed)
        found = objectives.batches(settings, examples, 1, 1)
        streams = [found[0].understanding, found[0].generation]
        lengths = [0 if one is None else one.index.shape[1] for one in streams]
        plan = memory.plan(settings, memory.BatchSize(1, *lengths))
        if plan.total <= free:
            break
    else:
        raise config.ConfigError(
            f"two layers need {plan.total / 1e9:.1f} GB, and {free / 1e9:.1f} are free for them."
        )
    begin = serving.memory(os.getpid()).get("rss_gb", 0.0)
    trainer = objectives.Trainer(settings, found)
    params = requests.random_parameters(
        lambda: Denoiser(settings.model, rngs=nnx.Rngs(0)), jnp.dtype("float32")
    )
    leaves = jax.tree.leaves(memory.first_state(settings, params))
    del params
    state = sum(leaf.nbytes for leaf in leaves)
    with contextlib.suppress(OSError):  # making them took more: the peak counts from here on
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    seconds, loss = trainer.run(leaves, 0)
    peak = 1e9 * (serving.memory(os.getpid()).get("peak_rss_gb", 0.0) - begin)
    fits = asked.tiny or peak <= (1 + WITHIN) * plan.total
    row = timing.times([seconds]) | {
        "task": "train",
        "method": way,
        "dtype": settings.model.compute_dtype,
        "layers_trained": layers,
        "compile_s": trainer.compile_s,
        "trained": plan.trained,
        "bytes": {"state": state, "temporaries": trainer.temporaries, "held": round(peak)},
        "expected_bytes": dataclasses.asdict(plan) | {"total": plan.total},
        **objectives.counted(found, settings.model),
        "checks": {"loss": bool(np.isfinite(loss)), "memory": fits},
        "note": f"random weights; {layers} layers, as fit into 70 % of the free memory",
    }
    return {way: row}


def _trained(settings: config.Config, way: str) -> config.Config:
    """Returns the settings of a training step, in float32 on CPUs."""
    steps = settings.sampling.num_steps
    diffusion = {"blocks": "plan", "plan_steps": (steps,), "merge_cells": 2 * steps}
    changes: dict[str, Any] = {"diffusion": diffusion, "train": {"loss_chunk": 512}}
    changes |= {"sampling": {"quantize": ""}}
    ways = memory.ways(config.changed(settings, changes))
    found = ways["LoRA of rank 16" if way == "lora" else "generation branch"]
    if jax.default_backend() == "cpu":
        wide = {"model": {"compute_dtype": "float32"}, "optimizer": {"frozen_dtype": "float32"}}
        found = config.changed(found, wide)
    return objectives.methods(found)["step_causal"]


# ---------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[ReleaseRehearsal], Rows]] = {
    "stand_in": make_stand_in,
    "convert": convert,
    "verify": verify,
    "export": export,
    "int8": narrow,
    **{
        f"load_{what}": functools.partial(load, name=name, task=task)
        for (name, task), what in LOADED.items()
    },
    "generate": functools.partial(request, task="generate", cancels=True),
    "edit": functools.partial(request, task="edit"),
    "ask": functools.partial(request, task="ask", cancels=True),
    "ground": functools.partial(request, task="ground"),
    "inpaint": functools.partial(request, task="inpaint"),
    "presets_image": functools.partial(presets, kind="image"),
    "presets_edit": functools.partial(presets, kind="edit"),
    "presets_text": functools.partial(presets, kind="text"),
    "lora": functools.partial(train, way="lora"),
    "branch": functools.partial(train, way="branch"),
}
