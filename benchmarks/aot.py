# SPDX-License-Identifier: Apache-2.0
"""Training and sampling at full size, compiled for TPUs that are only described.

This needs no hardware and no arrays: `libtpu` compiles from shapes on any Linux machine. So memory
per chip and traffic between chips are properties of the program. Time is not: seconds are
projected, from the compiler's estimate and the vendors' specifications.

`benchmarks.training --aot` calls this. For a GPU that is only described (`aot_requests.py`):

    python -m benchmarks.aot --device=h200
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import hlo, suites
from sparse_lavida_jax import config, sample
from sparse_lavida_jax.kernels import devices
from sparse_lavida_jax.kernels.attention import slot_multiple
from sparse_lavida_jax.models import fuse, parameters, sharding
from sparse_lavida_jax.models.denoiser import shapes as denoiser_shapes
from sparse_lavida_jax.programs.persistent_jit import OVER_TPUS
from sparse_lavida_jax.sampling.prompts import padded_lengths
from sparse_lavida_jax.sampling.state import capacity, prefill, rows_of
from sparse_lavida_jax.sequence import Response, Text
from sparse_lavida_jax.training import memory

MARGIN = 0.9  # share of a chip's memory that a program may use (ours)
KERNEL_SHARE = 0.5  # of its peak that attention is assumed to reach; the compiler has no figure
PROMPT_LEN = 250  # words in a prompt to draw
# 64 chips for training configs without a mesh; 8 or 4 for sampling.
TRAINING: dict[str, dict[str, int]] = {
    "v5p:4x4x4": {"data": 2, "fsdp": 16, "tensor": 2},
    "v6e:8x8": {"fsdp": 32, "tensor": 2},
}
SAMPLING: dict[str, dict[str, int]] = {"v5e:2x4": {"tensor": 8}, "v5p:2x2x1": {"tensor": 4}}


@dataclasses.dataclass(frozen=True)
class AotProgram:
    """A program for described chips.

    Attributes:
        topology: such as "v5p:4x4x4".
        axes: sizes of the mesh.
        program: the result of compiling with `jax`.
        inputs: its arguments, as shapes with shardings; the training state or model comes first.
        seconds: the time taken to compile.
    """

    topology: str
    axes: dict[str, int]
    program: Any
    inputs: Any
    seconds: float

    @property
    def chip(self) -> devices.Device:
        found = devices.device(f"TPU {self.topology.partition(':')[0]}")
        assert found is not None
        return found

    @functools.cached_property
    def text(self) -> str:
        return self.program.as_text()

    def memory(self) -> dict[str, int]:
        """Returns bytes per chip: inputs, outputs that do not reuse inputs, and temporaries."""
        found = self.program.memory_analysis()
        parts = {
            "arguments": found.argument_size_in_bytes,
            "results": found.output_size_in_bytes - found.alias_size_in_bytes,
            "temporaries": found.temp_size_in_bytes,
            "code": found.generated_code_size_in_bytes,
        }
        return parts | {"total": sum(parts.values())}

    def whole(self, least: int) -> list[str]:
        """Returns leaves of the state with at least `least` elements split over too few chips.

        Each should be split over all chips of the axes `fsdp` and `tensor`.
        """
        parts = self.axes.get("fsdp", 1) * self.axes.get("tensor", 1)
        return [
            name
            for name, x in parameters.by_name(self.inputs[0]).items()
            if x.size >= least and x.size < parts * math.prod(x.sharding.shard_shape(x.shape))
        ]

    def exchanged(self) -> dict[str, int]:
        """Returns bytes per kind of exchange in one call, from `hlo.collectives`."""
        found: dict[str, int] = {}
        for one in hlo.collectives(self.text):
            found[one.kind] = found.get(one.kind, 0) + one.bytes
        return found

    def projected(self) -> dict[str, float]:
        """Returns projected seconds per call; none of this is measured.

        The parts are the compiler's estimate for what it schedules, attention at `KERNEL_SHARE` of
        the peak, and exchanges at the full rate of all links. Overlapped: exchanges run in parallel
        with computation; apart: computation waits for them.
        """
        compute = hlo.cycles(self.text) / self.chip.hertz
        attention = hlo.kernel_flops(self.text) / (KERNEL_SHARE * self.chip.flops)
        exchange = sum(self.exchanged().values()) / self.chip.link
        return {
            "compute_s": compute,
            "attention_s": attention,
            "exchange_s": exchange,
            "overlapped_s": max(compute + attention, exchange),
            "apart_s": compute + attention + exchange,
        }

    def row(self, settings: config.Config, **values: Any) -> dict[str, Any]:
        """Returns the values of a row; without projected times after a quick compilation."""
        memory_bytes = self.chip.memory
        quickly = jax.config.values["jax_exec_time_optimization_effort"] < 0
        return {
            "status": "compiled",
            "model": settings.name,
            "dtype": settings.model.compute_dtype,
            "device": {
                "kind": f"TPU {self.topology.partition(':')[0]}",
                "count": math.prod(self.axes.values()),
                "memory_bytes": memory_bytes,
                "topology": self.topology,
                "described": True,
            },
            "mesh": self.axes,
            "compile_s": self.seconds,
            "bytes": self.memory() | {"allowed": MARGIN * memory_bytes},
            "exchanged_bytes": self.exchanged(),
            "projected": None if quickly else self.projected(),
            "cycles": {"all": hlo.cycles(self.text), "products": hlo.product_cycles(self.text)},
            "note": "compiled, never run: what is projected was not measured",
            **values,
        }


def full_run(settings: config.Config) -> config.Config:
    """Returns settings for a run on many TPUs: with their kernel, and layers that keep only inputs.

    Dtypes of masters, moments and gradient sums stay as in the config: float32 by default.
    """
    changes = {"remat": "layer", "attention_implementation": "pallas_tpu"}
    return config.changed(settings, {"model": changes})


def described(topology: str, axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of chips that are not present.

    Raises:
        ImportError: there is no `libtpu`.
    """
    from jax.experimental import topologies

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a lock file would stop a second one
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else it asks an absent metadata server
    chips = topologies.get_topology_desc(topology, "tpu").devices
    return Mesh(np.array(chips).reshape(*axes.values()), tuple(axes))


def rows(
    settings: config.Config, topologies: Sequence[str], batch: memory.BatchSize
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compiles the training step or the sampling programs; yields an id and values for each.

    Raises:
        ConfigError: unknown topology.
    """
    settings = full_run(settings)
    for topology in topologies:
        chips = topology.replace(":", "-")
        if topology in TRAINING:
            row_id = f"{settings.name}/train/{chips}/{settings.model.grad_reduce_dtype}"
            yield row_id, _training_row(settings, topology, batch)
        elif topology in SAMPLING:
            values = {"method": "sparse", "batch": 1, "guidance_rows": 2}
            prefill, phase = sampling(settings, topology, SAMPLING[topology])
            yield (
                f"{settings.name}/prefill/{chips}",
                prefill.row(settings, task="prefill", **values),
            )
            values |= {"task": "phase", "steps": len(phase.inputs[2].block)}
            yield f"{settings.name}/phase/{chips}", phase.row(settings, **values)
        else:
            known = ", ".join([*TRAINING, *SAMPLING])
            raise config.ConfigError(f"--targets={topology} is unknown: choose among {known}.")


def _training_row(
    settings: config.Config, topology: str, batch: memory.BatchSize
) -> dict[str, Any]:
    axes = training_axes(settings, topology)
    step = training(settings, topology, axes, batch)
    expected = expected_bytes(settings, axes, batch)
    dtype = settings.model.grad_reduce_dtype
    return step.row(
        settings,
        task="train_step",
        method=f"gradients summed in {'bfloat16' if dtype == 'compute' else dtype}",
        batch=batch.rows,
        expected_bytes=expected | {"total": sum(expected.values())},
    )


# ---------------------------------------------------------------------------------------------
# A training step.


def training_axes(settings: config.Config, topology: str) -> dict[str, int]:
    """Returns the mesh sizes of a config, or our own, for the chips used in training.

    Raises:
        ConfigError: the product of `train.mesh` is not the number of chips.
    """
    ours = TRAINING[topology]
    return memory.axes_of(settings.train.mesh or ours, math.prod(ours.values()))


def training(
    settings: config.Config, topology: str, axes: Mapping[str, int], batch: memory.BatchSize
) -> AotProgram:
    """Compiles one training step: `step.train_step`, called as in `train.py`.

    `JAX_EXEC_TIME_OPTIMIZATION_EFFORT=-1` halves the compilation time. It hardly changes memory or
    traffic, but changes the estimated time tenfold.
    """
    # Without these options, the compiler for v6e takes minutes longer. `launch/` sets them too.
    return step_on(settings, described(topology, axes), batch, topology, OVER_TPUS)


def step_on(
    settings: config.Config,
    mesh: Mesh,
    batch: memory.BatchSize,
    topology: str = "",
    options: dict[str, Any] | None = None,
) -> AotProgram:
    """Compiles one training step for the devices of a mesh, from shapes alone.

    No model is read: the one in `train.init_from` has the shapes of the config.

    Args:
        options: for the compiler.
    """
    state = jax.eval_shape(lambda: memory.first_state(settings))
    rows = jax.eval_shape(lambda: memory.rows(settings.model, batch))
    given = (
        sharding.over_state(_shape, state, mesh),
        _laid(rows, sharding.of_batch(rows, mesh)),
        _whole(jax.ShapeDtypeStruct((), jnp.float32), mesh),
    )
    begin = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = memory.lowered_step(settings, *given).compile(compiler_options=options)
    return AotProgram(topology, dict(mesh.shape), program, given, time.perf_counter() - begin)


def expected_bytes(
    settings: config.Config, axes: Mapping[str, int], batch: memory.BatchSize
) -> dict[str, float]:
    """Returns the bytes of results of all exchanges of a step on one device, by purpose.

    With W elements in the matrices of the layers, d, f, t devices along data, fsdp and tensor, c
    bytes per number in the compute dtype, r in the dtype in which gradients are summed, R rows of
    which a device has R / (d f), u and g tokens per row of widths e and e', and n layers:

        weights     2 W c / t                   gathered along fsdp, forward and again backward
        gradients   W r / t  +  W r / (t f)     summed along fsdp (the result is whole), then each
                                                device's part along data
        activations 14 n (R / d f) (u e + g e') c      along tensor, with remat: 9 gathered before
                                                matrices (forward, again, and for the gradient),
                                                5 summed after them
        heads       (c + 4 k) V e / t           gathered once, and the gradient summed in float32
                                                in each of k turns of the loss, for words and codes
        embeddings  R u e (c + 4) + R g' e' c   along fsdp, which splits both rows and widths:
                                                for all rows, with g' codes of images

    Nothing is exchanged along an axis with one device.
    """
    model = settings.model
    d, f, t = (axes.get(axis, 1) for axis in ("data", "fsdp", "tensor"))
    shapes = denoiser_shapes(model)
    sizes = {name: x.size for name, x in parameters.by_name(shapes).items()}
    layers = sum(n for name, n in sizes.items() if "_layers/" in name and name.endswith("/kernel"))
    c = jnp.dtype(model.compute_dtype).itemsize
    r = 4 if model.grad_reduce_dtype == "float32" else c
    text = batch.rows * batch.understanding * model.width
    image = batch.rows * batch.generation * model.generation_width
    lengths = batch.understanding, batch.generation * model.codes_per_token
    here = dataclasses.replace(batch, rows=math.ceil(batch.rows / (d * f)))
    heads = sum(
        sizes.get(name, 0) * (c + 4 * math.ceil(n / tile if tile else 1))
        for (name, tile), n in zip(memory.tiles(settings, here).items(), lengths, strict=True)
    )
    found = {
        "weights": (f > 1) * 2 * layers * c / t,
        "gradients": (f > 1) * layers * r / t + (d > 1) * layers * r / (t * f),
        "activations": (t > 1) * 14 * model.num_layers * (text + image) * c / (d * f),
        "heads": (f > 1) * heads / t,
        "embeddings": (f > 1) * (text * (c + 4) + image * model.codes_per_token * c),
    }
    return {name: float(number) for name, number in found.items()}


# ---------------------------------------------------------------------------------------------
# Sampling.


def sampling(
    settings: config.Config, topology: str, axes: Mapping[str, int], images: int = 1
) -> tuple[AotProgram, AotProgram]:
    """Compiles the two programs for an image: prefill, and the longest run of equal steps.

    With the parameters fused, and the options of the compiler, that the sampler uses on TPUs.
    """
    mesh, model = described(topology, axes), settings.model
    choose = sharding.over(mesh)

    def parameter(name, x):
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=choose(name, x.shape))

    case = suites.cases("headline", settings)[0]
    parts = (Text(np.arange(PROMPT_LEN)), Response(model.num_cells))
    example = dataclasses.replace(case.example, parts=parts)
    case = dataclasses.replace(case, example=example, batch=images)
    chosen, steps, prompt = case.settings(model), case.plan(model), case.prompt(model)
    room, _ = capacity(
        padded_lengths(prompt), steps, chosen, slot_multiple(model.attention_implementation)
    )
    longest = max(steps, key=lambda part: len(part.block))
    as_loaded = functools.partial(fuse.for_inference, by_layer=False, mesh=mesh)
    fused = jax.eval_shape(as_loaded, denoiser_shapes(model))
    own = parameters.mapped(parameter, fused)
    responses, known = (
        np.stack([x] * images).astype(np.int32) for x in (example.response, example.given)
    )
    requests = rows_of(case.sample_inputs(model, range(images)), chosen)
    rest = _whole((responses, known, requests, prompt), mesh)

    def compiled(traced, *given) -> AotProgram:
        begin = time.perf_counter()
        made = traced.lower(lowering_platforms=("tpu",)).compile()
        return AotProgram(topology, dict(axes), made, given, time.perf_counter() - begin)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = prefill.over_tpus.trace(own, *rest, settings=chosen, capacity=room)
        prefilled = compiled(traced, own, *rest)
        state = _laid(traced.out_info, prefilled.program.output_shardings)
        given = (own, state, _whole(longest, mesh), (rest[-1],))
        traced = sample.run_phase.over_tpus.trace(*given, settings=chosen)
        return prefilled, compiled(traced, *given)


def _laid(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(_shape, tree, shardings)


def _shape(leaf: Any, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _whole(tree: Any, mesh: Mesh) -> Any:
    """Returns the shapes of arrays that every chip holds in full."""
    shapes = jax.eval_shape(lambda tree: tree, tree)
    place = NamedSharding(mesh, PartitionSpec())
    return _laid(shapes, jax.tree.map(lambda _: place, shapes))


if __name__ == "__main__":
    from benchmarks import aot_requests, command

    command.run(aot_requests.main)
