# SPDX-License-Identifier: Apache-2.0
"""Everything that attention may be computed by, each as a compiled program of one case."""

import dataclasses
import functools
import importlib
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax.bench import flex, timing
from sparse_lavida_jax.bench.cases import CHECKED_HEADS, HEAD_DIM, Case
from sparse_lavida_jax.kernels import attention, tables

IN_FLIGHT = 8  # calls started before waiting: what a launch costs the host is not attention
LAYERS, LAYER = 3, 1  # of the stacked cache, and the one that is read
# Another result: no mask at all, or none inside segments. Speed is all that is compared.
UNMASKED = ("cudnn", "cudnn_segments", "cudnn_packed", "tokamax")

Numbers = tuple[np.ndarray, ...]  # q, k, v and the gradient of the output, [b s h d]
Key = TypeVar("Key")
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """A method, compiled.

    Attributes:
        run: starts all calls and returns what `wait` waits for.
        calls: calls of attention in one run.
        outputs: output and gradients of the first call, of `CHECKED_HEADS`, float32.
        temp_bytes: memory in addition to arguments and results, by the compiler's account.
        note: what else must be known of its times.
    """

    run: Callable[[], Any]
    wait: Callable[[Any], Any]
    calls: int
    outputs: Callable[[], Numbers]
    temp_bytes: int | None = None
    note: str = ""


def methods(case: Case, *, dry: bool = False) -> dict[str, Callable[[Numbers], Program]]:
    """Returns what may be measured; which of it runs here shows when it is called."""
    library = functools.partial(functools.partial, by_library, case)
    if dry:
        kernel = "pallas_gpu" if jax.__version_info__ >= (0, 11) else "pallas_tpu"
        return {
            "kernel": functools.partial(ours, case, implementation=kernel),
            "blockwise": functools.partial(ours, case, implementation="blockwise"),
            "xla_mask": library("xla", masked=True),
        }
    found: dict[str, Callable[[Numbers], Program]] = {
        "kernel": functools.partial(ours, case),
        "blockwise": functools.partial(ours, case, implementation="blockwise"),
        "cudnn": library("cudnn", masked=False),
        "cudnn_mask": library("cudnn", masked=True),
        "tokamax": library("mosaic", masked=False),
        "tokamax_mask": library("mosaic", masked=True),
        "xla_mask": library("xla", masked=True),
    }
    if case.batch == 1:  # its compiler takes longer than all the others together
        kept: dict[str, Callable[[bool], flex.Made]] = {}
        found["flex"] = functools.partial(_flex, case, kept=kept, builds=False)
        found["flex_with_mask"] = functools.partial(_flex, case, kept=kept, builds=True)
    if case.tags.query_segment is not None:
        found["cudnn_segments"] = functools.partial(by_segment, case)
        found["cudnn_packed"] = functools.partial(packed, case)
    if case.mask.all():  # nothing for a mask to do
        same = ("kernel", "cudnn", "tokamax", "flex")
        found = {name: make for name, make in found.items() if name in same}
    return found


def ours(
    case: Case,
    numbers: Numbers,
    *,
    implementation: str | None = None,
    sizes: tables.TileSizes | tables.GpuSizes | None = None,
) -> Program:
    """Our kernel, or another of ours, on finished tables, as all layers but the first find them.

    Args:
        sizes: of tiles; by default those that a call would get.
    """
    tags = case.arrays()
    if sizes is None:
        make = functools.partial(
            attention.make_tables, head_dim=HEAD_DIM, implementation=implementation
        )
    else:
        make = functools.partial(tables.make_tables, sizes=sizes)
    made = jax.jit(make)(*tags)

    def attend(q, k, v, data):
        tags, made, layer = data
        out = attention.step_causal_attention(
            _merged(q), k, v, *tags[:3], num_heads=case.heads, query_segment=tags[3],
            key_segment=tags[4], tables=made, layer=layer, implementation=implementation,
        )  # fmt: skip
        assert isinstance(out, jax.Array)
        return out.reshape(q.shape)

    q, k, v, cotangent = numbers
    if case.decodes:
        k, v = (np.repeat(_merged(x)[None], LAYERS, axis=0) for x in (k, v))
        return compiled(case, attend, (q, k, v, cotangent), (tags, made, jnp.int32(LAYER)))

    def merging(q, k, v, data):
        return attend(q, _merged(k), _merged(v), data)

    return compiled(case, merging, numbers, (tags, made, None))


def by_library(case: Case, implementation: str, numbers: Numbers, *, masked: bool) -> Program:
    """`dot_product_attention` of JAX, by cuDNN or XLA, or tokamax's kernel for this GPU, mosaic."""
    library: Any = importlib.import_module("tokamax") if implementation == "mosaic" else jax.nn
    mask = jnp.asarray(case.mask)[None, None] if masked else None

    def attend(q, k, v, mask):
        return library.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    return compiled(case, attend, numbers, mask)


def by_segment(case: Case, numbers: Numbers) -> Program:
    """cuDNN, a call for each segment of a packed row, without a mask inside it."""
    bounds = [int(bound) for bound in _bounds(case)]

    def attend(q, k, v, data):
        del data
        parts = []
        for start, stop in itertools.pairwise(bounds):
            own = slice(start, stop)
            parts.append(jax.nn.dot_product_attention(
                q[:, own], k[:, own], v[:, own], implementation="cudnn"
            ))  # fmt: skip
        return jnp.concatenate(parts, axis=1)

    return compiled(case, attend, numbers, None)


def packed(case: Case, numbers: Numbers) -> Program:
    """The mask of packed sequences of cuDNN itself; JAX has no public name for it."""
    cudnn: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    bounds = jnp.asarray(np.repeat(_bounds(case)[None], case.batch, axis=0), jnp.int32)

    def attend(q, k, v, bounds):
        lengths = jnp.diff(bounds, axis=1)
        return cudnn.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=bounds, kv_offsets=bounds,
            scale=HEAD_DIM**-0.5, mask_type=cudnn.MaskType.PADDING,
        )  # fmt: skip

    return compiled(case, attend, numbers, bounds)


def _flex(
    case: Case, numbers: Numbers, *, kept: dict[str, Callable[[bool], flex.Made]], builds: bool
) -> Program:
    """Both programs of a case are made of what is compiled once."""
    if "prepared" not in kept:
        kept["prepared"] = flex.prepare(case, numbers)
    run, wait, outputs, note = kept["prepared"](builds)
    return Program(run, wait, 1 if builds else case.calls, outputs, note=note)


def compiled(case: Case, attend: Attend, numbers: Numbers, data: Any) -> Program:
    """Compiles `attend(q, k, v, data)` for a case: masks, tags and tables are arguments.

    Calls of a short shape stand one after the other in the program, each on the results of the one
    before: on a device that takes less time than the host needs to start it, a call alone would
    measure the host.
    """
    leaves, structure = jax.tree.flatten(data)

    def once(q, k, v, cotangent, leaves) -> tuple[jax.Array, tuple]:
        data = jax.tree.unflatten(structure, leaves)
        if not case.backward:
            return attend(q, k, v, data), ()
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, data), q, k, v)
        return out, pull_back(cotangent)

    def all_calls(q, k, v, cotangent, leaves):
        out, gradients = first = once(q, k, v, cotangent, leaves)
        for _ in range(case.calls - 1):
            q, k, v = gradients or (out, k, v)
            out, gradients = once(q, k, v, cotangent, leaves)
        heads = jnp.array(CHECKED_HEADS)
        checked = [x[:, :, heads].astype(jnp.float32) for x in jax.tree.leaves(first)]
        return checked, (out, *gradients)

    arguments = (*(jnp.asarray(x, jnp.bfloat16) for x in numbers), leaves)
    program = jax.jit(all_calls).lower(*arguments).compile()
    memory = program.memory_analysis()
    return Program(
        functools.partial(program, *arguments),
        jax.block_until_ready,
        case.calls,
        lambda: tuple(np.asarray(x) for x in program(*arguments)[0]),
        None if memory is None else memory.temp_size_in_bytes,
    )


def timed(
    programs: dict[Key, Program], runs: int, in_flight: int = IN_FLIGHT
) -> dict[Key, list[float]]:
    """Returns seconds a call, `runs` of each program, in another random order every turn."""
    times: dict[Key, list[float]] = {method: [] for method in programs}
    for turn, method in timing.in_turn([*programs], runs + 1):
        program = programs[method]
        starts = max(1, in_flight // program.calls)
        begin = time.perf_counter()
        for _ in range(starts):
            last = program.run()
        program.wait(last)
        if turn:  # the first is to warm up
            times[method].append((time.perf_counter() - begin) / (starts * program.calls))
    return times


def _merged(x):
    """[b s h d] with heads merged, as the model leaves them."""
    return x.reshape(*x.shape[:2], -1)


def _bounds(case: Case) -> np.ndarray:
    segment = case.tags.query_segment
    assert segment is not None
    return np.append(np.flatnonzero(np.diff(segment, prepend=-1)), len(segment))
