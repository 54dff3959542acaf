# SPDX-License-Identifier: Apache-2.0
"""The sampler's own phase program at the release's widths, compiled for absent devices.

No array is made: the program is lowered from shapes. What a loop does to the cache is read from
the optimised HLO.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import tiny
from flax import nnx

from sparse_lavida_jax import config, sample, sequence
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.kernels.attention import slot_multiple
from sparse_lavida_jax.models import fuse, parameters
from sparse_lavida_jax.models import sharding as rules
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import presets, prompts
from sparse_lavida_jax.sampling.state import capacity, prefill, rows_of

CELLS, TEXT_LEN, TEXT_BLOCK_LEN = 1024, 256, 32
WORDS = 500  # of the prompt: no matrix has as many rows as it needs slots
# Instructions that pass on a buffer, or change it in place. A fusion is judged by its contents.
# Any other instruction with the cache as its result has made a copy.
IN_PLACE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "dynamic-update-slice", "fusion",
    "while", "conditional", "call", "optimization-barrier", "opt-barrier",
}  # fmt: skip

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)")
_BODY = re.compile(r"\bbody=%?([\w.-]+)")


def settings(**changes) -> config.Model:
    """Returns the widths of the release (spec Sec. 10.5), three joint layers and two split ones."""
    values = {
        "vocab_size": 126_464,
        "end_of_text_id": 126_081,
        "text_mask_id": 126_336,
        "width": 4096,
        "mlp_hidden": 12_288,
        "num_layers": 5,
        "dual_tower_layers": 2,
        "num_heads": 32,
        "head_dim": 128,
        "generation_width": 2048,
        "generation_mlp_hidden": 8192,
        "codebook_size": 8192,
        "codes_per_token": 4,
        "grid_size": 32,
        "compute_dtype": "bfloat16",
    }
    return config.Model(**(values | changes))


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled phase program.

    Attributes:
        hlo: optimised.
        cache_shapes: dimensions of the two buffers, of one layer of each, and with a leading 1.
        weight_shapes: of the matrices of a layer and their transposes.
        memory: on one device, according to the compiler.
    """

    hlo: str
    cache_shapes: frozenset[tuple[int, ...]]
    weight_shapes: frozenset[tuple[int, ...]]
    memory: Any


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Turns off type checks: trees of shapes are passed where annotations require arrays."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@unchecked()
def compiled(
    modality: sequence.Modality,
    model: config.Model,
    sharding: jax.sharding.NamedSharding,
    platform: str,
    *,
    by_layer: bool | None = None,
) -> Program:
    """Compiles the longest phase of a response: two rows, of guidance or of a batch.

    Args:
        sharding: of arrays that are not split; parameters and the cache are split over the axes
            of its mesh, if they have our names.
        by_layer: fused parameters (`fuse.for_inference`); None: as they are stored.
    """
    splits = "tensor" in sharding.mesh.axis_names

    def given(tree):
        """The same arrays on the described devices; parameters in their stored dtype."""

        def leaf(path, x):
            own, of_model = sharding, tree is model_shapes
            if splits and of_model:
                spec = rules.spec_of(parameters.leaf_name(path), x.shape, sharding.mesh)
                own = jax.sharding.NamedSharding(sharding.mesh, spec)
            elif splits and x.ndim == 4:  # keys and values
                spec = jax.sharding.PartitionSpec(None, None, None, "tensor")
                own = jax.sharding.NamedSharding(sharding.mesh, spec)
            wide = x.dtype == jnp.float32 and of_model
            return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if wide else x.dtype, sharding=own)

        return jax.tree_util.tree_map_with_path(leaf, tree)

    def parameters_of():
        stored = Denoiser(model, rngs=nnx.Rngs(0))
        if by_layer is None:
            return stored
        return fuse.for_inference(stored, task=modality, by_layer=by_layer)

    model_shapes = jax.eval_shape(parameters_of)
    asked = config.Sampling(preset="sparse", guidance=4.0, num_steps=64, shift=5.0)
    chosen = tiny.step_settings(asked, model, modality)
    requests = _requests(modality, model, 1 if modality == "image" else 2)
    known = np.stack([request.given for request in requests])
    plan = presets.plan(asked, chosen, model, known, TEXT_BLOCK_LEN, [0] * len(requests))
    inputs = tiny.sample_inputs(requests, model, chosen)
    prompt = prompts.batched(inputs, model)
    phase = max(plan, key=lambda part: len(part.block))
    steps = jax.tree.map(jnp.asarray, phase)
    stored = given(model_shapes)
    room, _ = capacity(
        prompts.padded_lengths(prompt), plan, chosen, slot_multiple(model.attention_implementation)
    )
    responses = np.zeros((len(requests), known.shape[1], model.codes_per_token), np.int32)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        state = jax.eval_shape(
            lambda *arrays: prefill(*arrays, settings=chosen, capacity=room),
            stored, responses, known.astype(np.int32), rows_of(inputs, chosen), prompt,
        )  # fmt: skip
        arrays = stored, given(state), given(steps), (given(jax.tree.map(jnp.asarray, prompt)),)
        lowered = sample.run_phase.trace(*arrays, settings=chosen).lower(
            lowering_platforms=(platform,)
        )
        done = lowered.compile()
    shapes = shapes_of(given(state).cache)
    stored_shapes = {x.shape for x in jax.tree.leaves(model_shapes)}
    assert not shapes & stored_shapes, "a matrix would be taken for the cache"
    own = {x.shape[-2:] for x in jax.tree.leaves(model_shapes.split_layers) if x.ndim >= 2}
    weights = {shape for shape in own if min(shape) >= 1024}
    return Program(
        done.as_text(),
        shapes,
        frozenset(weights | {shape[::-1] for shape in weights}),
        done.memory_analysis(),
    )


def shapes_of(cache) -> frozenset[tuple[int, ...]]:
    """Returns the shapes of keys and values: of all layers, of one, and with a leading 1."""
    keys = (cache.joint[0], cache.split[0])
    whole = {shape for x in keys for shape in (x.shape, x.sharding.shard_shape(x.shape))}
    layers = {shape[1:] for shape in whole}
    return frozenset(whole | layers | {(1, *shape) for shape in layers})


def _requests(modality: sequence.Modality, model: config.Model, number: int) -> list[Example]:
    length, codes = (CELLS, model.codes_per_token) if modality == "image" else (TEXT_LEN, 1)
    parts = (sequence.Text(np.arange(WORDS)), sequence.Response(length))
    nothing = np.zeros((length, codes), np.int32)
    one = tiny.example(parts, nothing, np.zeros(length, bool), modality)
    return [one] * number


def loop_bodies(hlo: str) -> dict[str, list[tuple[str, str]]]:
    """Returns (result, opcode) of every instruction inside loops, by computation."""
    computations: dict[str, list[tuple[str, str]]] = {}
    calls: dict[str, set[str]] = {}
    bodies: set[str] = set()
    name = ""
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            name = opened[1]
            computations[name], calls[name] = [], set()
        elif found := _INSTRUCTION.match(line):
            computations[name].append((found[1], found[2]))
            calls[name].update(_CALLED.findall(line))
            bodies.update(_BODY.findall(line))
    inside, waiting = set(), list(bodies)
    while waiting:
        name = waiting.pop()
        if name not in inside:
            inside.add(name)
            waiting += calls[name]
    return {name: computations[name] for name in sorted(inside)}


def copies(hlo: str, shapes: frozenset[tuple[int, ...]]) -> list[str]:
    """Returns every instruction inside a loop that makes a new array of one of `shapes`."""
    return [
        f"{name}: {result} {opcode}"
        for name, result, opcode in _of_shapes(hlo, shapes)
        if opcode not in IN_PLACE
    ]


def weights_made(hlo: str, shapes: frozenset[tuple[int, ...]]) -> list[str]:
    """Returns instructions inside loops, other than products, that make matrices of `shapes`.

    Such an instruction slices a layer from a stack, copies it, or changes its type or layout.
    """
    products = {
        name for name, instructions in loop_bodies(hlo).items()
        if any(opcode == "dot" for _, opcode in instructions)
        and not any(opcode in ("while", "fusion") for _, opcode in instructions)
    }  # fmt: skip
    # The slice of a stack has a leading 1.
    both = shapes | {(1, *shape) for shape in shapes}
    return [
        f"{name}: {result} {opcode}"
        for name, result, opcode in _of_shapes(hlo, both)
        if name not in products
        and opcode not in IN_PLACE - {"fusion", "dynamic-update-slice"}
        and not result.startswith("(")
    ]


def weights_copied(hlo: str, shapes: frozenset[tuple[int, ...]]) -> list[str]:
    """Returns instructions of loops that make matrices of `shapes`, except inside fusions.

    On a TPU a product fetches its matrix from the stack itself, in fusions inside its own.
    """
    bodies = {name for line in hlo.splitlines() for name in _BODY.findall(line)}
    return [
        f"{name}: {result} {opcode}"
        for name, result, opcode in _of_shapes(hlo, shapes)
        if name in bodies and opcode == "fusion" and not result.startswith("(")
    ]


def in_place(hlo: str, shapes: frozenset[tuple[int, ...]]) -> list[str]:
    """Returns the writes into such arrays inside loops; there must be some to check."""
    return [
        f"{name}: {result} {opcode}"
        for name, result, opcode in _of_shapes(hlo, shapes)
        if opcode == "dynamic-update-slice"
    ]


def _of_shapes(hlo: str, shapes) -> Iterator[tuple[str, str, str]]:
    texts = [f"[{','.join(map(str, shape))}]" for shape in shapes]
    for name, instructions in loop_bodies(hlo).items():
        for result, opcode in instructions:
            if any(text in result for text in texts):
                yield name, result, opcode
