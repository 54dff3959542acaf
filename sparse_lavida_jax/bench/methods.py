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

from sparse_lavida_jax.bench import timing
from sparse_lavida_jax.bench.cases import CHECKED_HEADS, HEAD_DIM, Case
from sparse_lavida_jax.kernels import attention, tables
from sparse_lavida_jax.visibility import PAD_BLOCK, visible

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
    found: dict[str, Callable[[Numbers], Program]] = {
        "kernel": functools.partial(ours, case),
        "blockwise": functools.partial(ours, case, implementation="blockwise"),
        "xla_mask": library("xla", masked=True),
    }
    if dry:
        return found | {"kernel": functools.partial(ours, case, implementation=interpreted())}
    found |= {
        "cudnn": library("cudnn", masked=False),
        "cudnn_mask": library("cudnn", masked=True),
        "tokamax": library("mosaic", masked=False),
        "tokamax_mask": library("mosaic", masked=True),
    }
    if case.batch == 1:  # its compiler takes longer than all the others together
        kept: list[Callable[[bool], Program]] = []
        found["flex"] = functools.partial(_flex, case, kept=kept, builds=False)
        found["flex_with_mask"] = functools.partial(_flex, case, kept=kept, builds=True)
    if case.tags.query_segment is not None:
        found["cudnn_segments"] = functools.partial(by_segment, case)
        found["cudnn_packed"] = functools.partial(packed, case)
    if case.mask.all():  # nothing for a mask to do
        same = ("kernel", "cudnn", "tokamax", "flex")
        found = {name: make for name, make in found.items() if name in same}
    return found


def interpreted() -> str:
    """Returns the kernel that this version of JAX can interpret where there is no device for it."""
    return "pallas_gpu" if jax.__version_info__ >= (0, 11) else "pallas_tpu"


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
    case: Case, numbers: Numbers, *, kept: list[Callable[[bool], Program]], builds: bool
) -> Program:
    """Both programs of a case are made of what is compiled once."""
    if not kept:
        kept.append(prepared_flex(case, numbers))
    return kept[0](builds)


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


# ---------------------------------------------------------------------------------------------
# FlexAttention, where PyTorch and CUDA are present.


def rule(tags: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns the visibility rule as FlexAttention takes it: of indices, on tensors of tags [s]."""
    query_block, query_horizon, key_block, query_segment, key_segment = tags

    def sees(batch, head, query, key):
        del batch, head
        segments = () if query_segment is None else (query_segment[query], key_segment[key])
        sees = visible(query_block[query], query_horizon[query], key_block[key], *segments)
        return sees & (query_block[query] != PAD_BLOCK)

    return sees


def prepared_flex(case: Case, numbers: Numbers) -> Callable[[bool], Program]:
    """Returns what makes a program of PyTorch's FlexAttention, on the same numbers and tags.

    It takes whether the BlockMask is made (compiled too) in every call, as tags that are new data
    need. Heads come before tokens, as FlexAttention likes them; all rows have the same tags, so
    that one BlockMask serves them all. The calls of a short shape are one CUDA graph.

    Raises:
        ModuleNotFoundError: there is no PyTorch.
        RuntimeError: it has no CUDA.
    """
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch has no CUDA")
    package: Any = importlib.import_module("torch.nn.attention.flex_attention")
    torch._dynamo.reset()  # guards of the cases before would be tried first
    attention = torch.compile(package.flex_attention, dynamic=False)
    make = torch.compile(package.create_block_mask, dynamic=False)
    q, k, v, cotangent = (
        torch.tensor(x, device="cuda", dtype=torch.bfloat16).transpose(1, 2).contiguous()
        for x in numbers
    )
    t = case.tags
    fields = (t.query_block, t.query_horizon, t.key_block, t.query_segment, t.key_segment)
    tags = tuple(None if tag is None else torch.tensor(tag, device="cuda") for tag in fields)
    lengths = len(t.query_block), len(t.key_block)
    block_mask = functools.partial(make, rule(tags), None, None, *lengths, device="cuda")
    made = block_mask()

    def once(q, k, v, builds):
        mask = block_mask() if builds else made
        if not case.backward:
            with torch.no_grad():
                return (attention(q, k, v, block_mask=mask),)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, block_mask=mask)
        return (out, *torch.autograd.grad(out, (q, k, v), cotangent))

    def all_calls():
        found = once(q, k, v, builds=False)
        for _ in range(case.calls - 1):
            found = once(*(found[1:] if case.backward else (found[0], k, v)), builds=False)
        return found

    def outputs():
        found = once(q, k, v, builds=False)
        heads = (x.transpose(1, 2)[:, :, list(CHECKED_HEADS)] for x in found)
        return tuple(x.detach().float().cpu().numpy() for x in heads)

    def wait(found):
        del found
        torch.cuda.synchronize()

    def program(builds: bool) -> Program:
        if builds:
            return Program(functools.partial(once, q, k, v, builds=True), wait, 1, outputs)
        run, note = _graph(torch, all_calls) if case.calls > 1 else (all_calls, "")
        return Program(run, wait, case.calls, outputs, note=note)

    return program


def _graph(torch: Any, run: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """Returns the calls as one CUDA graph, which the host starts at once; or as they are."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        return run, f"no CUDA graph ({str(error)[:80]}): short calls may wait for the host"
    return graph.replay, ""


def _merged(x):
    """[b s h d] with heads merged, as the model leaves them."""
    return x.reshape(*x.shape[:2], -1)


def _bounds(case: Case) -> np.ndarray:
    segment = case.tags.query_segment
    assert segment is not None
    return np.append(np.flatnonzero(np.diff(segment, prepend=-1)), len(segment))
