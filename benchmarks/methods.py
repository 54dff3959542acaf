# SPDX-License-Identifier: Apache-2.0
"""The cases that attention is measured on, and all ways to compute it, as compiled programs."""

import dataclasses
import functools
import importlib
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from sparse_lavida_jax.kernels import attention, shapes, tile_lists
from sparse_lavida_jax.visibility import PAD_BLOCK, visible

HEADS, HEAD_DIM = 32, 128
TILE = tile_lists.TileSizes(128, 128, 128)  # the unit of "tile FLOPs"
BACKWARD_WORK = 2.5  # products in the backward pass (5) over those in the forward pass (2)
SHORT = 2048  # queries below which a single call is too short to be timed
CALLS = 8  # of a short shape in one program, each using the result of the one before
CHECKED_HEADS = (0, -1)  # heads are independent, and a float32 reference is large
IN_FLIGHT = 8  # calls started before waiting, so that the host's launch time is not counted
LAYERS, LAYER = 3, 1  # of the stacked cache, and the layer that is read
# These compute something else: no mask at all, or none inside segments. Only speed is compared.
UNMASKED = ("cudnn", "cudnn_segments", "cudnn_packed", "tokamax")

Numbers = tuple[np.ndarray, ...]  # q, k, v and the gradient of the output, [b s h d]
Key = TypeVar("Key")
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape at one batch size; all rows have the same tags.

    Attributes:
        backward: whether gradients are included.
        timed: whether calls of a short shape are chained to be timed; otherwise there is one.
    """

    name: str
    batch: int
    tags: shapes.RowTags
    heads: int = HEADS
    backward: bool = False
    timed: bool = True

    @property
    def task(self) -> str:
        return f"{self.name}/{'forward_backward' if self.backward else 'forward'}"

    @property
    def decodes(self) -> bool:
        """Whether keys and values are a layer of the stacked cache."""
        return self.name.startswith("decode")

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return len(self.tags.query_block), len(self.tags.key_block)

    @property
    def calls(self) -> int:
        return CALLS if self.timed and self.lengths[0] < SHORT else 1

    @property
    def fields(self) -> tuple[np.ndarray | None, ...]:
        """The tags, in the order of attention's arguments."""
        t = self.tags
        return t.query_block, t.query_horizon, t.key_block, t.query_segment, t.key_segment

    @functools.cached_property
    def mask(self) -> np.ndarray:
        """Which query sees which key [s t]; padding sees nothing."""
        queries, keys = (np.arange(length) for length in self.lengths)
        return np.asarray(rule(self.fields)(0, 0, queries[:, None], keys[None]))

    @functools.cached_property
    def flops(self) -> dict[str, float]:
        """FLOPs of visible pairs, of the tiles that contain any, and of all pairs."""
        made = tile_lists.make_tables(*self.arrays(1), sizes=TILE)
        tiles = float(tile_lists.active_share(made)) * made.by_query.flags.size
        pairs = {
            "useful": float(self.mask.sum()),
            "tile": tiles * TILE.queries * TILE.keys,
            "dense": float(self.mask.size),
        }
        work = 4.0 * HEAD_DIM * self.heads * self.batch * (1 + BACKWARD_WORK * self.backward)
        return {name: work * number for name, number in pairs.items()}

    @property
    def least_bytes(self) -> int:
        """Bytes of q, k, v and the output, once; with gradients, theirs and the output's too."""
        once = 2 * self.batch * self.heads * HEAD_DIM * 2 * sum(self.lengths)
        return once * (2 if self.backward else 1)

    def arrays(self, batch: int | None = None) -> tuple:
        """The tags as arguments of the kernels [b s]."""
        rows = batch or self.batch
        return tuple(
            x if x is None else jnp.asarray(np.repeat(x[None], rows, 0)) for x in self.fields
        )

    def numbers(self) -> Numbers:
        """q, k, v and the gradient of the output, [b s h d], float32 values of bfloat16."""
        rng, (s, t) = np.random.default_rng(0), self.lengths

        def draw(length: int) -> np.ndarray:
            shape = (self.batch, length, self.heads, HEAD_DIM)
            rounded = jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
            return np.asarray(rounded, np.float32)

        return draw(s), draw(t), draw(t), draw(s)


def rule(tags: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns the visibility rule in FlexAttention's form: a function of indices, on tags [s]."""
    query_block, query_horizon, key_block, query_segment, key_segment = tags

    def sees(batch, head, query, key):
        del batch, head
        segments = () if query_segment is None else (query_segment[query], key_segment[key])
        sees = visible(query_block[query], query_horizon[query], key_block[key], *segments)
        return sees & (query_block[query] != PAD_BLOCK)

    return sees


def reference(case: Case, numbers: Numbers) -> Numbers:
    """Returns output and gradients of `CHECKED_HEADS` in float32, with an explicit mask."""
    q, k, v, cotangent = (jnp.asarray(x[:, :, CHECKED_HEADS]) for x in numbers)
    mask = jnp.asarray(case.mask)[None, None]

    def attend(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    with jax.default_matmul_precision("highest"):
        out, gradients = jax.jit(_once, static_argnums=(0, 1))(
            attend, case.backward, q, k, v, cotangent, mask
        )
    return tuple(map(np.asarray, (out, *gradients)))


def difference(found: Numbers, wanted: Numbers, case: Case) -> float:
    """Returns the largest difference, of the output where a query sees anything and of gradients.

    For gradients larger than 1 it is relative.
    """
    seen = case.mask.any(axis=1).reshape(1, -1, 1, 1)
    (out, *gradients), (wanted_out, *wanted_gradients) = found, wanted
    outs = np.where(seen, out, 0), np.where(seen, wanted_out, 0)
    pairs = [outs, *zip(gradients, wanted_gradients, strict=True)]
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1)) for x, y in pairs)


# ---------------------------------------------------------------------------------------------
# Programs.


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled method.

    Attributes:
        run: starts all calls and returns what `wait` waits for.
        calls: calls of attention in one run.
        outputs: returns output and gradients of the first call, for `CHECKED_HEADS`, in float32.
        temp_bytes: memory besides arguments and results, according to the compiler.
        note: what else to know about its times.
    """

    run: Callable[[], Any]
    calls: int = 1
    outputs: Callable[[], Numbers] = tuple
    wait: Callable[[Any], Any] = jax.block_until_ready
    temp_bytes: int | None = None
    note: str = ""


def methods(case: Case, *, dry: bool = False) -> dict[str, Callable[[Numbers], Program]]:
    """Returns the methods to measure; a method that cannot run here fails when it is called."""
    library = functools.partial(functools.partial, by_library, case)
    kernel = interpreted() if dry else attention.device_kernel()  # whether admitted or not
    found: dict[str, Callable[[Numbers], Program]] = {
        "kernel": functools.partial(ours, case, implementation=kernel),
        "blockwise": functools.partial(ours, case, implementation="blockwise"),
        "xla_mask": library("xla", masked=True),
    }
    if dry:
        return found
    found |= {
        "cudnn": library("cudnn", masked=False),
        "cudnn_mask": library("cudnn", masked=True),
        "tokamax": library("mosaic", masked=False),
        "tokamax_mask": library("mosaic", masked=True),
    }
    if case.batch == 1:  # its compiler takes longer than all the others together
        found["flex"] = functools.partial(by_flex, case)
        found["flex_with_mask"] = functools.partial(by_flex, case, builds=True)
    if case.tags.query_segment is not None:
        found["cudnn_segments"] = functools.partial(by_segment, case)
        found["cudnn_packed"] = functools.partial(packed, case)
    if case.mask.all():  # a mask would have no effect
        same = ("kernel", "cudnn", "tokamax", "flex")
        found = {name: make for name, make in found.items() if name in same}
    return found


def interpreted() -> str:
    """Returns the kernel that this version of JAX can interpret without its device."""
    return "pallas_gpu" if jax.__version_info__ >= (0, 11) else "pallas_tpu"


def ours(
    case: Case,
    numbers: Numbers,
    *,
    implementation: str | None = None,
    sizes: tile_lists.TileSizes | tile_lists.GpuSizes | None = None,
) -> Program:
    """Compiles our kernel, or another of ours, with finished tables, as in all but the first layer.

    Args:
        sizes: of tiles; by default as in a normal call.
    """
    tags = case.arrays()
    how = {"head_dim": HEAD_DIM, "implementation": implementation, "sizes": sizes}
    made = jax.jit(functools.partial(attention.make_tables, **how))(*tags)

    def attend(q, k, v, data):
        tags, made, layer = data
        if layer is None:
            k, v = _merged(k), _merged(v)
        out = attention.step_causal_attention(
            _merged(q), k, v, *tags[:3], num_heads=case.heads, query_segment=tags[3],
            key_segment=tags[4], tables=made, layer=layer, implementation=implementation,
        )  # fmt: skip
        assert isinstance(out, jax.Array)
        return out.reshape(q.shape)

    layer = None
    if case.decodes:
        q, k, v, cotangent = numbers
        k, v = (np.repeat(_merged(x)[None], LAYERS, axis=0) for x in (k, v))
        numbers, layer = (q, k, v, cotangent), jnp.int32(LAYER)
    return compiled(case, attend, numbers, (tags, made, layer))


def by_library(case: Case, implementation: str, numbers: Numbers, *, masked: bool) -> Program:
    """Compiles `dot_product_attention` of JAX, by cuDNN or XLA, or tokamax's kernel (mosaic)."""
    library: Any = importlib.import_module("tokamax") if implementation == "mosaic" else jax.nn
    mask = jnp.asarray(case.mask)[None, None] if masked else None

    def attend(q, k, v, mask):
        return library.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    return compiled(case, attend, numbers, mask)


def by_segment(case: Case, numbers: Numbers) -> Program:
    """Compiles cuDNN's attention, one call per segment of a packed row, without a mask."""
    own = [slice(*map(int, pair)) for pair in itertools.pairwise(_bounds(case))]

    def attend(q, k, v, data):
        del data
        alone = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        return jnp.concatenate([alone(q[:, at], k[:, at], v[:, at]) for at in own], axis=1)

    return compiled(case, attend, numbers, None)


def packed(case: Case, numbers: Numbers) -> Program:
    """Compiles cuDNN's own mask for packed sequences; JAX has no public name for it."""
    cudnn: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    bounds = jnp.asarray(np.repeat(_bounds(case)[None], case.batch, axis=0), jnp.int32)

    def attend(q, k, v, bounds):
        lengths = jnp.diff(bounds, axis=1)
        return cudnn.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=bounds, kv_offsets=bounds,
            scale=HEAD_DIM**-0.5, mask_type=cudnn.MaskType.PADDING,
        )  # fmt: skip

    return compiled(case, attend, numbers, bounds)


def compiled(case: Case, attend: Attend, numbers: Numbers, data: Any) -> Program:
    """Compiles `attend(q, k, v, data)` for a case: masks, tags and tables are arguments.

    Several calls of a short shape are chained in the program, each on the results of the one
    before: if a device takes less time for a call than the host takes to start it, timing single
    calls would measure the host.
    """
    leaves, structure = jax.tree.flatten(data)

    def all_calls(q, k, v, cotangent, leaves):
        data = jax.tree.unflatten(structure, leaves)
        once = functools.partial(_once, attend, case.backward)
        out, gradients = first = once(q, k, v, cotangent, data)
        for _ in range(case.calls - 1):
            q, k, v = gradients or (out, k, v)
            out, gradients = once(q, k, v, cotangent, data)
        heads = jnp.array(CHECKED_HEADS)
        checked = [x[:, :, heads].astype(jnp.float32) for x in jax.tree.leaves(first)]
        return checked, (out, *gradients)

    arguments = (*(jnp.asarray(x, jnp.bfloat16) for x in numbers), leaves)
    program = jax.jit(all_calls).lower(*arguments).compile()
    memory = program.memory_analysis()
    return Program(
        functools.partial(program, *arguments),
        case.calls,
        lambda: tuple(np.asarray(x) for x in program(*arguments)[0]),
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
    )


def _once(attend: Attend, backward: bool, q, k, v, cotangent, data) -> tuple[jax.Array, tuple]:
    """Returns the output of a call and, with `backward`, its gradients."""
    if not backward:
        return attend(q, k, v, data), ()
    out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, data), q, k, v)
    return out, pull_back(cotangent)


def by_flex(case: Case, numbers: Numbers, *, builds: bool = False) -> Program:
    """Compiles PyTorch's FlexAttention, on the same numbers and tags.

    Heads come before tokens, as FlexAttention prefers; all rows have the same tags, so that one
    BlockMask serves them all. The calls of a short shape are one CUDA graph, which the host starts
    at once, if PyTorch can record it.

    Args:
        builds: whether the BlockMask is made in every call, as new tags would require.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
        RuntimeError: it has no CUDA.
    """
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch has no CUDA")
    package: Any = importlib.import_module("torch.nn.attention.flex_attention")
    if not builds:  # that case runs later, and must not discard what this one compiled
        torch._dynamo.reset()  # guards from earlier cases would be tried first
    attention = torch.compile(package.flex_attention, dynamic=False)
    make = torch.compile(package.create_block_mask, dynamic=False)
    q, k, v, cotangent = (
        torch.tensor(x, device="cuda", dtype=torch.bfloat16).transpose(1, 2).contiguous()
        for x in numbers
    )
    tags = tuple(x if x is None else torch.tensor(x, device="cuda") for x in case.fields)
    block_mask = functools.partial(make, rule(tags), None, None, *case.lengths, device="cuda")
    made = block_mask()

    def once(q, k, v):
        mask = block_mask() if builds else made
        if not case.backward:
            with torch.no_grad():
                return (attention(q, k, v, block_mask=mask),)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, block_mask=mask)
        return (out, *torch.autograd.grad(out, (q, k, v), cotangent))

    def outputs():
        heads = (x.transpose(1, 2)[:, :, list(CHECKED_HEADS)] for x in once(q, k, v))
        return tuple(x.detach().float().cpu().numpy() for x in heads)

    def wait(found):
        del found
        torch.cuda.synchronize()

    run, calls, note = functools.partial(once, q, k, v), 1 if builds else case.calls, ""
    if calls > 1:

        def all_calls():
            found = once(q, k, v)
            for _ in range(calls - 1):
                found = once(*(found[1:] if case.backward else (found[0], k, v)))

        torch.cuda.synchronize()
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(aside):  # code must have run once before a graph records it
            all_calls()
        aside.synchronize()
        try:
            with torch.cuda.graph(graph):
                all_calls()
            run = graph.replay
        except RuntimeError as error:
            run = all_calls
            note = f"no CUDA graph ({str(error)[:80]}): short calls may wait for the host"
    return Program(run, calls, outputs, wait, note=note)


def timed(
    programs: Mapping[Key, Program], runs: int, in_flight: int = IN_FLIGHT
) -> dict[Key, list[float]]:
    """Returns seconds per call, `runs` for each program, in a new random order every turn."""

    def seconds(program: Program, turn: int) -> float:
        del turn
        starts = max(1, in_flight // program.calls)
        begin = time.perf_counter()
        for _ in range(starts):
            last = program.run()
        program.wait(last)
        return (time.perf_counter() - begin) / (starts * program.calls)

    calls = {key: functools.partial(seconds, program) for key, program in programs.items()}
    taken = timing.in_turn(calls, runs + 1)
    return {key: own[1:] for key, own in taken.items()}  # the first run is a warm-up


def _merged(x):
    """Returns [b s h d] with heads merged, as the model stores them."""
    return x.reshape(*x.shape[:2], -1)


def _bounds(case: Case) -> np.ndarray:
    segment = case.tags.query_segment
    assert segment is not None
    return np.append(np.flatnonzero(np.diff(segment, prepend=-1)), len(segment))
