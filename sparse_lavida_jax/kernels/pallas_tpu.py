# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention for TPUs (Mosaic): forward, and the gradients of queries and of keys.

The grid is (groups of heads, active tiles); the list of active tiles is prefetched into scalar
memory and its length bounds the grid, so that a tile that nobody can see costs nothing, neither a
copy nor a step. Inside a tile each part is skipped, computed plainly, or computed under
`visibility.visible`, which is traced here as it stands.

The backward pass computes logits with keys down and queries across: log-sum-exp and the row sums
of the output's gradient are then rows of lanes, and no transposition is needed.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from sparse_lavida_jax.kernels import tables as tiles
from sparse_lavida_jax.kernels.common import row_sums, whole_tiles
from sparse_lavida_jax.kernels.reference import NOTHING_SEEN_LSE
from sparse_lavida_jax.kernels.tables import TileList, TileSizes
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, AnyArray, is_padding, visible

LANES, SUBLANES = 128, 8
LOWEST = -1e30  # stands for minus infinity: differences of it stay numbers
LOG2_E = 1.4426950408889634
CONTRACT_LAST = (((1,), (1,)), ((), ()))
CONTRACT_FIRST = (((0,), (0,)), ((), ()))
MATMUL = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is compiled into the kernels.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the call.
        scale: of the logits.
        sizes: tiles.
        interpret: run in Python, or by the simulator; see `pl.pallas_call`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sizes: TileSizes
    interpret: Any = False

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_heads_a_program(self) -> int:
        """Key heads that one program holds: as few as fill the lanes, or all of them."""
        for heads in range(1, self.num_kv_heads):
            if self.num_kv_heads % heads == 0 and heads * self.head_dim % LANES == 0:
                return heads
        return self.num_kv_heads

    @property
    def heads_a_program(self) -> int:
        return self.kv_heads_a_program * self.group

    def own(self, head: int) -> slice:
        """Lanes of a query head of a program."""
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    def shared(self, head: int) -> slice:
        """Lanes of the key head that a query head of a program reads."""
        return self.own(head // self.group)


@flax.struct.dataclass
class Tags:
    """Tags as the kernels read them: a number for each sublane, or for each lane.

    Attributes:
        down: [b s 128] int32, lanes 0, 1, 2 hold block, horizon, segment.
        across: [b 8 s] int32, sublanes 0, 1, 2 hold the same.
    """

    down: Int[Array, "b s lanes"]
    across: Int[Array, "b sublanes s"]


def tags_of(block, horizon, segment, multiple: int) -> Tags:
    """Lays tags out for the kernels, filled up to whole tiles."""
    stacked = jnp.stack(
        [
            tiles.padded_tags(block, multiple, PAD_BLOCK),
            tiles.padded_tags(block if horizon is None else horizon, multiple, PAD_HORIZON),
            tiles.padded_tags(jnp.zeros_like(block) if segment is None else segment, multiple, 0),
        ],
        axis=1,
    )
    down = jnp.pad(stacked.swapaxes(1, 2), ((0, 0), (0, 0), (0, LANES - 3)))
    return Tags(down, jnp.pad(stacked, ((0, 0), (0, SUBLANES - 3), (0, 0))))


# ---------------------------------------------------------------------------------------------
# Inside a tile.


def _part_class(flags, part: int):
    return (flags >> (tiles.CLASS_SHIFT + tiles.CLASS_BITS * part)) & (2**tiles.CLASS_BITS - 1)


def _each_part(flags, sizes: TileSizes, compute) -> None:
    """Calls `compute(keys of the part, masked)` for every part that is not skipped."""
    for part in range(sizes.keys // sizes.part):
        keys = slice(part * sizes.part, (part + 1) * sizes.part)
        kind = _part_class(flags, part)
        pl.when(kind == tiles.FULL)(functools.partial(compute, keys, False))
        pl.when(kind == tiles.PARTIAL)(functools.partial(compute, keys, True))


def _dot(a, b, dimensions):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _mask_down(query_tags, key_tags, keys: slice):
    """[queries, keys of the part]."""
    block, horizon, segment = (query_tags[:, i : i + 1] for i in range(3))
    key_block, key_segment = key_tags[0:1, keys], key_tags[2:3, keys]
    return visible(block, horizon, key_block, segment, key_segment) & ~is_padding(block)


def _mask_across(query_tags, key_tags, keys: slice):
    """[keys of the part, queries]."""
    block, horizon, segment = (query_tags[i : i + 1, :] for i in range(3))
    key_block, key_segment = key_tags[keys, 0:1], key_tags[keys, 2:3]
    return visible(block, horizon, key_block, segment, key_segment) & ~is_padding(block)


def _forward_kernel(
    batch, row, col, flags, layer, query_tags, key_tags, q, k, v, out, lse, peak, total, summed,
    *, shape: Shape,
):  # fmt: skip
    del batch, row, col, layer
    now = flags[pl.program_id(1)]

    @pl.when(now & tiles.FIRST != 0)
    def _():
        peak[...] = jnp.full_like(peak, LOWEST)
        total[...] = jnp.zeros_like(total)
        summed[...] = jnp.zeros_like(summed)

    def compute(keys, masked):
        mask = _mask_down(query_tags, key_tags, keys) if masked else None
        for head in range(shape.heads_a_program):
            own, shared = shape.own(head), shape.shared(head)
            logits = _dot(q[:, own], k[keys, shared], CONTRACT_LAST) * (shape.scale * LOG2_E)
            if mask is not None:
                logits = jnp.where(mask, logits, LOWEST)
            before = peak[head, :, 0:1]
            after = jnp.maximum(before, logits.max(axis=1, keepdims=True))
            weights = jnp.exp2(logits - after)
            if mask is not None:  # a row that sees nothing yet has exp2(0)
                weights = jnp.where(mask, weights, 0.0)
            decay = jnp.exp2(before - after)
            sums = total[head, :, 0:1] * decay + weights.sum(axis=1, keepdims=True)
            peak[head] = jnp.broadcast_to(after, peak.shape[1:])
            total[head] = jnp.broadcast_to(sums, total.shape[1:])
            values = v[keys, shared]
            summed[:, own] = summed[:, own] * decay + _dot(
                weights.astype(values.dtype), values, MATMUL
            )

    _each_part(now, shape.sizes, compute)

    @pl.when(now & tiles.LAST != 0)
    def _():
        for head in range(shape.heads_a_program):
            sums = total[head, :, 0:1]
            seen = sums > 0
            sums = jnp.where(seen, sums, 1.0)
            own = shape.own(head)
            out[:, own] = jnp.where(seen, summed[:, own] / sums, 0.0).astype(out.dtype)
            logs = jnp.where(
                total[head] > 0, (peak[head] + jnp.log2(sums)) / LOG2_E, NOTHING_SEEN_LSE
            )
            lse[head] = logs.T[0:1]


def _query_gradient_kernel(
    batch, row, col, flags, query_tags, key_tags, q, k, v, pulled, lse, delta, dq, summed,
    *, shape: Shape,
):  # fmt: skip
    del batch, row, col
    now = flags[pl.program_id(1)]

    @pl.when(now & tiles.FIRST != 0)
    def _():
        summed[...] = jnp.zeros_like(summed)

    def compute(keys, masked):
        mask = _mask_across(query_tags, key_tags, keys) if masked else None
        for head in range(shape.heads_a_program):
            _, bent = _weights_and_bend(head, keys, mask, q, k, v, pulled, lse, delta, shape)
            shared = k[keys, shape.shared(head)]
            summed[:, shape.own(head)] += _dot(bent.astype(shared.dtype), shared, CONTRACT_FIRST)

    _each_part(now, shape.sizes, compute)

    @pl.when(now & tiles.LAST != 0)
    def _():
        dq[...] = summed[...].astype(dq.dtype)


def _key_gradient_kernel(
    batch, row, col, flags, query_tags, key_tags, q, k, v, pulled, lse, delta, dk, dv,
    summed_k, summed_v, *, shape: Shape,
):  # fmt: skip
    del batch, row, col
    now = flags[pl.program_id(1)]

    @pl.when(now & tiles.FIRST != 0)
    def _():
        summed_k[...] = jnp.zeros_like(summed_k)
        summed_v[...] = jnp.zeros_like(summed_v)

    def compute(keys, masked):
        mask = _mask_across(query_tags, key_tags, keys) if masked else None
        for head in range(shape.heads_a_program):
            own, shared = shape.own(head), shape.shared(head)
            weights, bent = _weights_and_bend(head, keys, mask, q, k, v, pulled, lse, delta, shape)
            summed_v[keys, shared] += _dot(weights.astype(q.dtype), pulled[:, own], MATMUL)
            summed_k[keys, shared] += _dot(bent.astype(q.dtype), q[:, own], MATMUL)

    _each_part(now, shape.sizes, compute)

    @pl.when(now & tiles.LAST != 0)
    def _():
        dk[...] = summed_k[...].astype(dk.dtype)
        dv[...] = summed_v[...].astype(dv.dtype)


def _weights_and_bend(head, keys, mask, q, k, v, pulled, lse, delta, shape: Shape):
    """Returns attention weights and the gradient of the unscaled logits, both [keys, queries]."""
    own, shared = shape.own(head), shape.shared(head)
    logits = _dot(k[keys, shared], q[:, own], CONTRACT_LAST) * (shape.scale * LOG2_E)
    weights = jnp.exp2(logits - lse[head] * LOG2_E)
    if mask is not None:
        weights = jnp.where(mask, weights, 0.0)
    rise = _dot(v[keys, shared], pulled[:, own], CONTRACT_LAST)
    return weights, weights * (rise - delta[head]) * shape.scale


# ---------------------------------------------------------------------------------------------
# Calls.


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Which piece of an array a grid step reads or writes.

    Attributes:
        shape: of the kernels.
        rows_are_keys: whether the rows of the list are tiles of keys.
    """

    shape: Shape
    rows_are_keys: bool = False

    def query(self, n, row, col):
        return (col if self.rows_are_keys else row)[n]

    def key(self, n, row, col):
        return (row if self.rows_are_keys else col)[n]

    def query_heads(self):
        """Queries and what has their shape, [b s (h d)]."""
        width = self.shape.heads_a_program * self.shape.head_dim
        return pl.BlockSpec(
            (None, self.shape.sizes.queries, width),
            lambda h, n, batch, row, col, *_: (batch[n], self.query(n, row, col), h),
        )

    def key_heads(self):
        """Keys and values, [b t (h d)]."""
        width = self.shape.kv_heads_a_program * self.shape.head_dim
        return pl.BlockSpec(
            (None, self.shape.sizes.keys, width),
            lambda h, n, batch, row, col, *_: (batch[n], self.key(n, row, col), h),
        )

    def stacked_key_heads(self):
        """Keys and values of one layer of [n b t (h d)]."""
        width = self.shape.kv_heads_a_program * self.shape.head_dim
        return pl.BlockSpec(
            (None, None, self.shape.sizes.keys, width),
            lambda h, n, batch, row, col, flags, layer: (
                layer[0], batch[n], self.key(n, row, col), h,
            ),
        )  # fmt: skip

    def query_row(self):
        """A number for each query and head, [b h 1 s]."""
        return pl.BlockSpec(
            (None, self.shape.heads_a_program, 1, self.shape.sizes.queries),
            lambda h, n, batch, row, col, *_: (batch[n], h, 0, self.query(n, row, col)),
        )

    def query_tags(self, *, down: bool):
        size = self.shape.sizes.queries
        if down:
            return pl.BlockSpec(
                (None, size, LANES),
                lambda h, n, batch, row, col, *_: (batch[n], self.query(n, row, col), 0),
            )
        return pl.BlockSpec(
            (None, SUBLANES, size),
            lambda h, n, batch, row, col, *_: (batch[n], 0, self.query(n, row, col)),
        )

    def key_tags(self, *, down: bool):
        size = self.shape.sizes.keys
        if down:
            return pl.BlockSpec(
                (None, size, LANES),
                lambda h, n, batch, row, col, *_: (batch[n], self.key(n, row, col), 0),
            )
        return pl.BlockSpec(
            (None, SUBLANES, size),
            lambda h, n, batch, row, col, *_: (batch[n], 0, self.key(n, row, col)),
        )


def _call(
    kernel, shape: Shape, tile_list: TileList, prefetched, inputs, outputs, scratch, name,
    *, products: int,
):  # fmt: skip
    """Runs a kernel over a tile list.

    Args:
        inputs: pairs (array, block).
        outputs: pairs (ShapeDtypeStruct, block).
        scratch: shapes of float32 buffers.
        products: of matrices, in a tile of a head.
    """
    read = sum(_size_read(array, block) * array.dtype.itemsize for array, block in inputs)
    entries = tile_list.flags.shape[0]  # the most there can be: the count is known on the device
    pairs = shape.sizes.queries * shape.sizes.keys * shape.num_heads * entries
    return pl.pallas_call(
        functools.partial(kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 + len(prefetched),
            grid=(shape.num_kv_heads // shape.kv_heads_a_program, tile_list.count),
            in_specs=[block for _, block in inputs],
            out_specs=[block for _, block in outputs],
            scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in scratch],
        ),
        out_shape=[array for array, _ in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * shape.head_dim,
            transcendentals=pairs,
            bytes_accessed=read,
        ),
        interpret=shape.interpret,
        name=name,
    )(
        tile_list.batch,
        tile_list.row,
        tile_list.col,
        tile_list.flags,
        *prefetched,
        *[array for array, _ in inputs],
    )


def _size_read(array, block: pl.BlockSpec) -> int:
    """Returns how many numbers of an array a kernel reads: of a stack those of a layer."""
    tile = tuple(block.block_shape or ())
    stacked = len(tile) == 4 and tile[:2] == (None, None)
    return array.size // array.shape[0] if stacked else array.size


def forward(
    q: Float[Array, "b s hd"],
    k: Float[Array, "n b t hkd"],
    v: Float[Array, "n b t hkd"],
    layer: Int[Array, ""] | int,
    query_tags: Tags,
    key_tags: Tags,
    tile_list: TileList,
    shape: Shape,
) -> tuple[Float[Array, "b s hd"], Float[Array, "b h one s"]]:
    """Returns the output and its log-sum-exp; lengths are whole numbers of tiles."""
    batch, length, _ = q.shape
    blocks, heads, size = _Blocks(shape), shape.heads_a_program, shape.sizes.queries
    if not shape.interpret:
        # A cache stays where it is: for v5e the compiler would hold those of some layers in the
        # vector memory for a step, all slots of them, and put them back.
        k, v = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k, v))
    return _call(
        _forward_kernel,
        shape,
        tile_list,
        [jnp.asarray(layer, jnp.int32).reshape(1)],
        [
            (query_tags.down, blocks.query_tags(down=True)),
            (key_tags.across, blocks.key_tags(down=False)),
            (q, blocks.query_heads()),
            (k, blocks.stacked_key_heads()),
            (v, blocks.stacked_key_heads()),
        ],
        [
            (jax.ShapeDtypeStruct(q.shape, q.dtype), blocks.query_heads()),
            (
                jax.ShapeDtypeStruct((batch, shape.num_heads, 1, length), jnp.float32),
                blocks.query_row(),
            ),
        ],
        [(heads, size, LANES), (heads, size, LANES), (size, heads * shape.head_dim)],
        "step_causal_attention",
        products=2,
    )


def backward(
    q, k, v, query_tags: Tags, key_tags: Tags, tables: tiles.Tables, out, lse, pulled, shape: Shape
):  # fmt: skip
    """Returns the gradients of q [b s (h d)], k and v [b t (hk d)].

    Args:
        pulled: gradients of the output and of its log-sum-exp.
    """
    pulled, pulled_lse = pulled
    delta = row_sums(out, pulled, pulled_lse, shape.num_heads)  # [b h 1 s]

    def inputs(blocks: _Blocks):
        return [
            (query_tags.across, blocks.query_tags(down=False)),
            (key_tags.down, blocks.key_tags(down=True)),
            (q, blocks.query_heads()),
            (k, blocks.key_heads()),
            (v, blocks.key_heads()),
            (pulled, blocks.query_heads()),
            (lse, blocks.query_row()),
            (delta, blocks.query_row()),
        ]

    blocks, sizes = _Blocks(shape), shape.sizes
    width = shape.heads_a_program * shape.head_dim
    (dq,) = _call(
        _query_gradient_kernel,
        shape,
        tables.by_query,
        [],
        inputs(blocks),
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), blocks.query_heads())],
        [(sizes.queries, width)],
        "step_causal_attention_dq",
        products=3,
    )
    blocks = _Blocks(shape, rows_are_keys=True)
    width = shape.kv_heads_a_program * shape.head_dim
    dk, dv = _call(
        _key_gradient_kernel,
        shape,
        tables.by_key,
        [],
        inputs(blocks),
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), blocks.key_heads()) for x in (k, v)],
        [(sizes.keys, width)] * 2,
        "step_causal_attention_dkv",
        products=4,
    )
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------
# The entry.


def attention(
    q: Float[Array, "b s hd"],
    k: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    v: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    query_block: Int[AnyArray, "b s"],
    query_horizon: Int[AnyArray, "b s"],
    key_block: Int[AnyArray, "b t"],
    query_segment: Int[Array, "b s"] | None,
    key_segment: Int[Array, "b t"] | None,
    *,
    shape: Shape,
    layer: Int[Array, ""] | int | None = None,
    tables: tiles.Tables | None = None,
) -> tuple[Float[Array, "b s hd"], Float[Array, "b h s"]]:
    """Returns the output and log-sum-exp of `kernels.attention.step_causal_attention`.

    Differentiable in q, k and v, but for a stacked cache.

    Args:
        tables: `make_tables` of the same tags and sizes; made here if there are none.
    """
    sizes = shape.sizes
    tables = tables or tiles.make_tables(
        query_block, query_horizon, key_block, query_segment, key_segment, sizes=sizes
    )
    if tables.sizes != sizes:
        raise ValueError(f"the tables are of {tables.sizes}, the call is of {sizes}.")
    query_tags = tags_of(query_block, query_horizon, query_segment, sizes.queries)
    key_tags = tags_of(key_block, None, key_segment, sizes.keys)
    length = q.shape[1]
    q = whole_tiles(q, sizes.queries)
    k, v = (whole_tiles(x, sizes.keys) for x in (k, v))
    if layer is not None:
        out, lse = forward(q, k, v, layer, query_tags, key_tags, tables.by_query, shape)
    else:
        tags, structure = jax.tree.flatten((query_tags, key_tags, tables))
        out, lse = _differentiable(shape, structure, q, k, v, tags)
    return out[:, :length], lse[:, :, 0, :length]


def _forward_of(shape, structure, q, k, v, tags):
    """Tags come as leaves: as gradients of integers JAX puts what no annotated class would hold."""
    query_tags, key_tags, tables = jax.tree.unflatten(structure, tags)
    return forward(q, k[None], v[None], 0, query_tags, key_tags, tables.by_query, shape)


def _remembered(shape, structure, q, k, v, tags):
    out, lse = _forward_of(shape, structure, q, k, v, tags)
    # Named, so that a rematerialisation policy may keep them and not run the kernel again.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, tags, out, lse)


def _pulled_back(shape, structure, remembered, pulled):
    q, k, v, tags, out, lse = remembered
    query_tags, key_tags, tables = jax.tree.unflatten(structure, tags)
    gradients = backward(q, k, v, query_tags, key_tags, tables, out, lse, pulled, shape)
    return (*gradients, None)


_differentiable = jax.custom_vjp(_forward_of, nondiff_argnums=(0, 1))
_differentiable.defvjp(_remembered, _pulled_back)
