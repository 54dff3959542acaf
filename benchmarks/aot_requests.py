# SPDX-License-Identifier: Apache-2.0
r"""Requests at full size, lowered and compiled for a GPU that is only described.

    python -m benchmarks.aot --device=h200
    python -m benchmarks.aot --device=h200 --requests=image --layers=0
    python -m benchmarks.aot --device=h200 --requests=tokenizer
    python -m benchmarks.aot --memory --requests=image,image_dense,tokenizer

Needs `pip install -e '.[aot-cuda]'` and `ptxas`, no GPU, and makes no arrays. The programs are
those of the sampler, with the parameters fused as on a GPU; all of their layers are lowered.
Only `--layers` of them are compiled, half of them split, as well as two fewer: what one pair of
layers adds is then counted for each pair. Nothing is timed but tracing and lowering: seconds are
predictions, in which every kernel takes max(operations / rate of products, bytes / bandwidth).
Operations of attention are those of all slots. Requests leave the image tokenizer out: the name
`tokenizer` is its encoder in float32 and its decoder in bfloat16, for one image of the largest
size. Convolutions of the encoder count at the same rate, so its time is too short on any GPU.

`--memory` writes what a request needs besides the parameters: its state, mostly the cache, from the
types of all layers, and the temporaries of the program that has most of them: one of the prompt, or
the widest step. These do not grow with the layers, so only `--layers` of them are compiled.
"""

import collections
import contextlib
import dataclasses
import gc
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from absl import flags, logging
from flax import nnx
from jax.sharding import NamedSharding

from benchmarks import hlo, suites, table, work
from benchmarks.described import DEVICES, DescribedGpu
from benchmarks.measurements import Bench
from benchmarks.suites import RequestCase
from sparse_lavida_jax import config, sample
from sparse_lavida_jax.models import fuse, parameters, quantize, vq
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.programs.persistent_jit import Call, finish
from sparse_lavida_jax.sampling import calls

SUITE, MEMORY_SUITE, TOKENIZER_SUITE = "aot_requests", "aot_memory", "aot_tokenizer"
# A name, and the suite and id of the request.
REQUESTS = {
    "image": ("headline", "t2i1024/sparse/b1"),
    "edit": ("edit", "edit1024/sparse/b1"),
    "reasoning": ("reasoning", "reasoning/sparse/b1/k8"),
    "batch_of_8": ("batch", "t2i1024/sparse/b8"),
}
# The same of the model as it was released; compiled only if they are asked for.
DENSE_REQUESTS = {
    "image_dense": ("headline", "t2i1024/dense_lean/b1"),
    "edit_dense": ("edit", "edit1024/dense_lean/b1"),
}
# The same with matrices in 8 bits; compiled only if they are asked for.
NARROW_REQUESTS = {
    f"{name}_{method}": (name, method)
    for name in ("image", "edit", "reasoning")
    for method in config.QUANTIZED
}
TOKENIZER = "tokenizer"
IMPLEMENTATION = "pallas_gpu"
LEAST_MATRIX = 1024  # rows and columns of a matrix of weights


DEVICE = flags.DEFINE_enum("device", "h200", DEVICES, "The GPU.")
ASKED = flags.DEFINE_list("requests", list(REQUESTS), "The requests.")
CONFIG = flags.DEFINE_string("config", "configs/lavida_o.py", "The config of the model.")
MEMORY = flags.DEFINE_boolean("memory", False, "Only the memory of each request.")
LAYERS = flags.DEFINE_integer(
    "layers", 6, "Layers that are compiled, an even number; 0: all.", lower_bound=0
)


@dataclasses.dataclass(frozen=True)
class LoweredProgram:
    """A program of a request, lowered for a described GPU.

    Attributes:
        name: of the sampler's function.
        width: tokens of the response that a row passes in a step, with registers; 0: none.
        lowered: the result of lowering with `jax`.
        seconds: to trace and to lower.
        runs: how often a request calls it.
        steps: all steps that these calls run.
    """

    name: str
    width: int
    lowered: jax.stages.Lowered
    seconds: float
    runs: int
    steps: int

    def modules(self) -> dict[str, int]:
        """Returns the modules of each kernel, by its name."""
        found = collections.Counter(_MODULE.findall(self.lowered.as_text()))
        return {name or other: number for (name, other), number in sorted(found.items())}


_MODULE = re.compile(
    r"custom_call @mosaic_gpu[^\n]*?\\00(?!stable_)([a-z]\w*?)_mosaic_gpu\\00"
    r'|custom_call @__gpu\$xla\.gpu\.triton[^\n]*?name = "(\w+)"'
)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Turns off type checks, since types are passed where annotations require arrays."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def case_of(name: str, settings: config.Config) -> RequestCase:
    """Returns a request of `REQUESTS`.

    Raises:
        ConfigError: there is no such request, for a model of this size.
    """
    known_requests = REQUESTS | DENSE_REQUESTS
    whole, method = NARROW_REQUESTS.get(name, (name, ""))
    suite, row_id = known_requests.get(whole, ("headline", ""))
    found = [case for case in suites.cases(suite, settings) if case.id == row_id]
    if not found:
        known = ", ".join([*known_requests, *NARROW_REQUESTS])
        raise config.ConfigError(
            f"--requests={name}: choose one of {known}, with a --config at full size."
        )
    return suites.quantized(found[0], method) if method else found[0]


def model_types(
    settings: config.Model, task: fuse.Task, place: NamedSharding, method: str = ""
) -> Denoiser:
    """Returns the types of the parameters as a GPU holds them, in the dtype of products.

    Args:
        method: of `quantize.as_asked`.
    """

    def make() -> Denoiser:
        model = Denoiser(settings, rngs=nnx.Rngs(0))
        fused = fuse.for_inference(model, task=task, by_layer=True)
        dtype = jnp.dtype(settings.compute_dtype)
        held = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, fused)
        return quantize.as_asked(held, method)

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return jax.tree.map(placed, jax.eval_shape(make))


def programs(
    case: RequestCase, model: Denoiser, place: NamedSharding
) -> list[tuple[LoweredProgram, tuple]]:
    """Traces and lowers the programs of a request: the calls that the sampler itself makes.

    Returns:
        Each program, and the types of its arguments.
    """
    settings, plan = case.settings(model.settings), case.plan(model.settings)
    inputs = case.sample_inputs(model.settings, range(case.batch))
    laid_out = calls.prepared(model, inputs, plan, settings=settings, split_phases=True)
    phase_calls = [
        call for phase in laid_out.batch.phases for call in laid_out.batch.phase_calls(phase)
    ]
    runs, steps = collections.Counter(), collections.Counter()
    for call in phase_calls:
        runs[call.shapes] += 1
        steps[call.shapes] += int(call.options["number"])
    first = {call.shapes: call for call in reversed(phase_calls)}
    widths = [call.steps.width for call in first.values()]
    keys = [*first]
    found: list[tuple[LoweredProgram, tuple]] = []

    def typed(tree: Any) -> Any:
        def leaf(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=place)

        return jax.tree.map(leaf, tree)

    def lower(call: Call) -> Any:
        function: Any = call.function
        named = {
            name: value if name in function.static else typed(value)
            for name, value in call.named.items()
        }
        args = typed(call.args)
        gc.collect()
        begin = time.perf_counter()
        traced = function.trace(*args, **named)
        lowered = traced.lower(lowering_platforms=("cuda",))
        seconds = time.perf_counter() - begin
        number = len(found) - first_trip if function is sample.run_phase else None
        key = None if number is None else keys[number]
        program = LoweredProgram(
            name=function.__name__,
            width=0 if number is None else widths[number],
            lowered=lowered,
            seconds=seconds,
            runs=1 if key is None else runs[key],
            steps=0 if key is None else steps[key],
        )
        found.append((program, (args, named)))
        return typed(traced.out_info)

    first_trip = len(laid_out.parts) + 1 if laid_out.one_by_one else 1
    with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh), unchecked():
        finish(laid_out.all_calls(sample.run_phase, [*first.values()]), lower)
    return found


# ---------------------------------------------------------------------------------------------
# Costs.

Costs = dict[str, float]


def costs(program: LoweredProgram, compiled: list[hlo.Kernel], rates: dict[str, float]) -> Costs:
    """Returns what all calls of a program in a request cost, and the kernels of one step."""
    found: dict[str, float] = collections.defaultdict(float)
    products, copies = rates["matmul_tflops"] * 1e12, rates["copy_gbps"] * 1e9
    for kernel in compiled:
        number = program.steps if kernel.in_step else program.runs
        found["predicted_s"] += number * kernel.seconds(products, copies)
        found["operations"] += number * kernel.runs * kernel.operations
        found["bytes"] += number * kernel.runs * kernel.bytes
        found["step_kernels"] += kernel.runs * kernel.in_step
        found[f"{kernel.kind}_s"] += number * kernel.seconds(products, copies)
    return dict(found)


def extrapolated(more: Costs, fewer: Costs, pairs: int) -> Costs:
    """Returns costs with so many pairs of layers added, each costing the difference of two."""
    return {name: more[name] + pairs * (more[name] - fewer.get(name, 0.0)) for name in more}


def copies(compiled: Sequence[hlo.Kernel], arguments: tuple) -> list[str]:
    """Returns the kernels of a step that copy the cache, or weights, whole or joined to others.

    They make an array with such a shape, or read a matrix and do not multiply with it.
    """
    shapes, multiplied = large_shapes(arguments), matrix_shapes(arguments)
    return [
        kernel.name
        for kernel in compiled
        if kernel.in_step
        and kernel.kind in ("copies", "others")
        and (shapes & {*kernel.made} or multiplied & {*kernel.read})
    ]


def matrix_shapes(arguments: tuple) -> frozenset[tuple[int, ...]]:
    """Returns the shapes of the matrices that a model multiplies with, without its embeddings."""
    named = parameters.by_name(arguments[0][0])
    ends = ("kernel", "kernel_t")
    kernels = {x.shape for name, x in named.items() if name.endswith(ends) and x.ndim == 2}
    return frozenset(shape for shape in kernels if min(shape) >= LEAST_MATRIX)


def large_shapes(arguments: tuple) -> frozenset[tuple[int, ...]]:
    """Returns the shapes of matrices and of the cache, whole and of one layer, and transposed."""
    args, _ = arguments
    model, state = args[:2]
    own = {x.shape for x in jax.tree.leaves(model) if x.ndim == 2 and min(x.shape) >= LEAST_MATRIX}
    cache = getattr(state, "cache", None)
    whole = {x.shape for x in jax.tree.leaves(cache) if x.ndim == 4}
    layers = {shape[1:] for shape in whole}
    return frozenset(
        own | {shape[::-1] for shape in own} | whole | layers | {(1, *one) for one in layers}
    )


def with_kernels(settings: config.Config) -> config.Config:
    """Returns settings with the kernels of the described GPU: none was admitted here."""
    names = ("attention_implementation", "step_implementation")
    return config.changed(settings, {"model": dict.fromkeys(names, IMPLEMENTATION)})


def with_layers(settings: config.Config, number: int) -> config.Config:
    """Returns settings for a model with fewer layers, half of them split."""
    changes = {"num_layers": number, "dual_tower_layers": number // 2}
    return config.changed(settings, {"model": changes})


def row_of(
    name: str,
    settings: config.Config,
    device: DescribedGpu,
    place: NamedSharding,
    *,
    layers: int = 6,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Returns the values of the row of a request.

    Args:
        layers: see `--layers`.
        tell: is called with a line for each program.

    Raises:
        ConfigError: there is no such request, or the number of layers cannot be compiled.
    """
    settings = with_kernels(settings)
    case, depth = case_of(name, settings), settings.model.num_layers
    if layers and (layers % 2 or not 4 <= layers <= depth):
        raise config.ConfigError(f"--layers={layers}: 0, or an even number of 4 to {depth}.")
    task: fuse.Task = "image" if case.example.modality == "image" else "both"

    def lowered(settings: config.Config) -> list[tuple[LoweredProgram, tuple]]:
        return programs(
            case, model_types(settings.model, task, place, case.sampling.quantize), place
        )

    rates, whole = device.rates["measured"], lowered(settings)
    depths = [layers, layers - 2] if layers and layers < depth else []
    cut = [lowered(with_layers(settings, number)) for number in depths] or [whole]
    told, most_kernels = [], 0.0
    total: dict[str, float] = collections.defaultdict(float)
    for index, (program, _) in enumerate(whole):
        text = program.lowered.as_text()
        found = []
        for one, arguments in (of_depth[index] for of_depth in cut):
            begin = time.perf_counter()
            compiled = hlo.kernels(one.lowered.compile().as_text() or "")
            compile_s = time.perf_counter() - begin
            found.append((costs(program, compiled, rates), copies(compiled, arguments)))
            tell(f"{name}: {one.name}, width {one.width}: compiled in {compile_s:.0f} s")
        own, made = found[0]
        layer_kernels = own.get("step_kernels", 0.0) / depth
        if len(found) == 2:  # those of two layers, half of them split
            fewer = found[1][0].get("step_kernels", 0.0)
            layer_kernels = (own.get("step_kernels", 0.0) - fewer) / 2
            own = extrapolated(own, found[1][0], (depth - depths[0]) // 2)
        told.append(
            {
                "name": program.name,
                "width": program.width,
                "trace_and_lower_s": program.seconds,
                "stablehlo_mb": len(text.encode()) / 1e6,
                "modules": program.modules(),
                "layer_kernels": layer_kernels,
                "copies": made,
                "steps": program.steps,
                "runs": program.runs,
                **own,
            }
        )
        for key, value in own.items():
            total[key] += value
        most_kernels = max(most_kernels, own.get("step_kernels", 0.0))
    need = work.of_case(case, settings.model)
    compiled_layers = f"{depths[0]} and {depths[1]}" if depths else "all"
    return {
        "request": name,
        "task": case.task,
        "method": case.method,
        "batch": case.batch,
        "model": settings.name,
        "dtype": settings.model.compute_dtype,
        "device": {"kind": device.kind, "count": 1, "described": True},
        "programs": told,
        "kernels_per_layer": most_kernels / depth,
        "operations": total["operations"],
        "bytes": total["bytes"],
        "floor_s": need.floor_s(*rates.values()),
        "predicted_s": total["predicted_s"],
        "predicted_by_kind": {
            kind: total[f"{kind}_s"] for kind in ("products", "attention", "copies", "others")
        },
        "rates": device.rates,
        "layers_compiled": compiled_layers,
        "note": "predicted, not measured: each kernel at the measured rates; without the image"
        f" tokenizer; lowered with all layers, compiled with {compiled_layers}",
    }


def memory_of(
    name: str, settings: config.Config, place: NamedSharding, *, layers: int = 6
) -> dict[str, Any]:
    """Returns the values of the row with the memory of a request, or of the image tokenizer.

    Args:
        layers: see `--memory`.

    Raises:
        ConfigError: there is no such request.
    """
    note = "compiled, never run"
    if name == TOKENIZER:
        return {"request": name, "bytes": _tokenizer_bytes(settings.vq, place), "note": note}
    settings = with_kernels(settings)
    case = case_of(name, settings)
    task: fuse.Task = "image" if case.example.modality == "image" else "both"

    def lowered(settings: config.Config) -> list[tuple[LoweredProgram, tuple]]:
        return programs(
            case, model_types(settings.model, task, place, case.sampling.quantize), place
        )

    held = [(one.name, _bytes(args[1:])) for one, (args, _) in lowered(settings)]
    parts = sum(number for name, number in held if name == "gather")  # next to what is made of them
    cut = [one for one, _ in lowered(with_layers(settings, layers) if layers else settings)]
    widest = [max(cut, key=lambda one: one.width), *(one for one in cut if not one.width)]
    return {
        "request": name,
        "task": case.task,
        "method": case.method,
        "batch": case.batch,
        "bytes": {
            "state": parts + max(number for name, number in held if name != "gather"),
            "temporaries": max(_temporaries(one.lowered) for one in widest),
        },
        "layers_compiled": str(layers or "all"),
        "note": note,
    }


def _tokenizer_bytes(settings: config.VQ, place: NamedSharding) -> dict[str, int]:
    """Returns the parameters, and the temporaries to encode and to decode the largest image."""
    found = {"parameters": _bytes(vq.shapes(settings))}
    for program in tokenizer_programs(settings, place, "float32"):
        found[program.name] = _temporaries(program.lowered)
    return found


def tokenizer_programs(
    settings: config.VQ, place: NamedSharding, dtype: str
) -> Iterator[LoweredProgram]:
    """Traces and lowers the programs that encode and decode an image of the largest size.

    Args:
        dtype: of the decoder.
    """

    def typed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    encoder, side = vq.shapes(settings), settings.image_size
    decoder = jax.eval_shape(lambda model: vq.for_decoding(model, dtype), encoder)
    codes = side // settings.factor
    for name, call, model, x in (
        (
            "encode",
            lambda model, x: model.encode(vq.to_float(x)),
            encoder,
            jax.ShapeDtypeStruct((1, side, side, 3), np.uint8),
        ),
        (
            "decode",
            lambda model, x: vq.to_uint8(model.decode(x)),
            decoder,
            jax.ShapeDtypeStruct((1, codes, codes), np.int32),
        ),
    ):
        begin = time.perf_counter()
        with unchecked():
            traced = jax.jit(call).trace(jax.tree.map(typed, model), typed(x))
        lowered = traced.lower(lowering_platforms=("cuda",))
        yield LoweredProgram(name, 0, lowered, time.perf_counter() - begin, runs=1, steps=0)


def tokenizer_rows(
    settings: config.Config, device: DescribedGpu, place: NamedSharding
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields an id and the values of a row for each program of the image tokenizer."""
    for program in tokenizer_programs(settings.vq, place, "bfloat16"):
        compiled = program.lowered.compile()
        kernels = hlo.kernels(compiled.as_text() or "")
        found = costs(program, kernels, device.rates["measured"])
        memory: Any = compiled.memory_analysis()
        yield (
            program.name,
            {
                "task": program.name,
                "model": settings.name,
                "dtype": "bfloat16" if program.name == "decode" else "float32",
                "batch": 1,
                "image_size": settings.vq.image_size,
                "device": {"kind": device.kind, "count": 1, "described": True},
                "kernels": sum(kernel.runs for kernel in kernels),
                "operations": found["operations"],
                "bytes_moved": found["bytes"],
                "bytes": {"temporaries": memory.temp_size_in_bytes},
                "predicted_s": found["predicted_s"],
                "predicted_by_kind": {
                    kind: found[f"{kind}_s"] for kind in ("products", "copies", "others")
                },
                "rates": device.rates,
                "note": "predicted, not measured: each kernel at the measured rates",
            },
        )


def _temporaries(lowered: jax.stages.Lowered) -> int:
    found: Any = lowered.compile().memory_analysis()
    return found.temp_size_in_bytes


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


LINE = ("request", "programs", "kernels_per_layer", "floor_s", "predicted_s")
PROGRAM = (
    "name", "width", "trace_and_lower_s", "stablehlo_mb", "modules", "layer_kernels", "copies",
)  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    """Returns the JSON line that is printed last for a request."""
    told = {name: row[name] for name in LINE}
    told["programs"] = [{name: one[name] for name in PROGRAM} for one in row["programs"]]
    return json.dumps(_rounded(told))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [*map(_rounded, value)] if isinstance(value, list) else value


def main(_: list[str]) -> None:
    """Writes a row for every request; prints its programs, and a line of JSON."""
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_platforms", "cpu")  # a GPU that is here is left alone
    try:
        device, bench = DEVICES[DEVICE.value], Bench(SUITE)
        settings, place = config.read(pathlib.Path(CONFIG.value)), device.place()
        for name in ASKED.value:
            if MEMORY.value:
                row = memory_of(name, settings, place, layers=LAYERS.value)
                device_row = {"device": {"kind": device.kind, "count": 1, "described": True}}
                Bench(MEMORY_SUITE).write(name, row | device_row)
                print(f"{name}: {row['bytes']}", flush=True)
                continue
            if name == TOKENIZER:
                rows = Bench(TOKENIZER_SUITE)
                for row_id, row in tokenizer_rows(settings, device, place):
                    rows.write(row_id, row)
                print(f"\n{table.table(TOKENIZER_SUITE, rows.rows())}", flush=True)
                continue
            row = row_of(name, settings, device, place, layers=LAYERS.value, tell=_tell)
            bench.write(name, row)
            programs_told = [{**row, **one} for one in row["programs"]]
            print(f"\n{table.table('aot_programs', programs_told)}", flush=True)
            print(f"\n{table.table(SUITE, [row])}\n\n{line_of(row)}", flush=True)
    except config.ConfigError as error:
        sys.exit(f"benchmarks.aot: {error}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
