# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention for TPUs (Mosaic): forward, and the gradients of queries and of keys.

The grid is (groups of heads, active tiles); the list of active tiles is prefetched into scalar
memory and its length bounds the grid, so that a tile without a visible pair costs nothing, neither
a copy nor a step. Inside a tile each part is skipped, computed without a mask, or computed under
`visibility.visible`, which is traced here as it is.

The backward pass computes logits with keys down and queries across: log-sum-exp and the row sums
of `common.row_sums` are then rows of lanes, and no transposition is needed.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from sparse_lavida_jax.kernels import common
from sparse_lavida_jax.kernels import tables as tiles
from sparse_lavida_jax.kernels.common import LOG2_E, LOWEST, NOTHING_SEEN_LSE, Shape
from sparse_lavida_jax.kernels.tables import Tables, TileList, TileSizes
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, is_padding, visible

LANES, SUBLANES = 128, 8
CONTRACT_LAST = (((1,), (1,)), ((), ()))
CONTRACT_FIRST = (((0,), (0,)), ((), ()))
MATMUL = (((1,), (0,)), ((), ()))


class TpuShape(Shape):
    """A call on a TPU; `interpret` is that of `pl.pallas_call`."""

    sizes: TileSizes

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
class TpuTags:
    """Tags as the kernels read them: a number for each sublane, or for each lane.

    Attributes:
        down: [b s 128] int32, lanes 0, 1, 2 hold block, horizon, segment.
        across: [b 8 s] int32, sublanes 0, 1, 2 hold the same.
    """

    down: Int[Array, "b s lanes"]
    across: Int[Array, "b sublanes s"]


def tags_of(block, horizon, segment, multiple: int) -> TpuTags:
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
    return TpuTags(down, jnp.pad(stacked, ((0, 0), (0, SUBLANES - 3), (0, 0))))


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


def _mask(query_tags, key_tags, keys: slice, *, keys_down: bool):
    """Returns who sees whom, [queries, keys of the part], or the other way round."""
    if keys_down:
        block, horizon, segment = (query_tags[i : i + 1, :] for i in range(3))
        key_block, key_segment = key_tags[keys, 0:1], key_tags[keys, 2:3]
    else:
        block, horizon, segment = (query_tags[:, i : i + 1] for i in range(3))
        key_block, key_segment = key_tags[0:1, keys], key_tags[2:3, keys]
    return visible(block, horizon, key_block, segment, key_segment) & ~is_padding(block)


def _forward_kernel(
    batch, row, col, flags, layer, query_tags, key_tags, q, k, v, out, lse,
    maximum, total, accumulator, *, shape: TpuShape,
):  # fmt: skip
    del batch, row, col, layer
    now = flags[pl.program_id(1)]

    @pl.when(now & tiles.FIRST != 0)
    def _():
        maximum[...] = jnp.full_like(maximum, LOWEST)
        total[...] = jnp.zeros_like(total)
        accumulator[...] = jnp.zeros_like(accumulator)

    def compute(keys, masked):
        mask = _mask(query_tags, key_tags, keys, keys_down=False) if masked else None
        for head in range(shape.heads_a_program):
            own, shared = shape.own(head), shape.shared(head)
            logits = _dot(q[:, own], k[keys, shared], CONTRACT_LAST) * (shape.scale * LOG2_E)
            if mask is not None:
                logits = jnp.where(mask, logits, LOWEST)
            before = maximum[head, :, 0:1]
            after = jnp.maximum(before, logits.max(axis=1, keepdims=True))
            weights = jnp.exp2(logits - after)
            if mask is not None:  # a row that sees nothing yet has exp2(0)
                weights = jnp.where(mask, weights, 0.0)
            decay = jnp.exp2(before - after)
            sums = total[head, :, 0:1] * decay + weights.sum(axis=1, keepdims=True)
            maximum[head] = jnp.broadcast_to(after, maximum.shape[1:])
            total[head] = jnp.broadcast_to(sums, total.shape[1:])
            values = v[keys, shared]
            accumulator[:, own] = accumulator[:, own] * decay + _dot(
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
            out[:, own] = jnp.where(seen, accumulator[:, own] / sums, 0.0).astype(out.dtype)
            logs = jnp.where(
                total[head] > 0, (maximum[head] + jnp.log2(sums)) / LOG2_E, NOTHING_SEEN_LSE
            )
            lse[head] = logs.T[0:1]


def _query_gradient_kernel(
    batch, row, col, flags, query_tags, key_tags, q, k, v, dout, lse, delta, dq, accumulator,
    *, shape: TpuShape,
):  # fmt: skip
    del batch, row, col
    now = flags[pl.program_id(1)]

    @pl.when(now & tiles.FIRST != 0)
    def _():
        accumulator[...] = jnp.zeros_like(accumulator)

    def compute(keys, masked):
        mask = _mask(query_tags, key_tags, keys, keys_down=True) if masked else None
        for head in range(shape.heads_a_program):
            _, ds = _weights_and_ds(head, keys, mask, q, k, v, dout, lse, delta, shape)
            shared = k[keys, shape.shared(head)]
            accumulator[:, shape.own(head)] += _dot(ds.astype(shared.dtype), shared, CONTRACT_FIRST)

    _each_part(now, shape.sizes, compute)

    @pl.when(now & tiles.LAST != 0)
    def _():
        dq[...] = accumulator[...].astype(dq.dtype)


def _key_gradient_kernel(
    batch, row, col, flags, query_tags, key_tags, q, k, v, dout, lse, delta, dk, dv,
    dk_sum, dv_sum, *, shape: TpuShape,
):  # fmt: skip
    del batch, row, col
    now = flags[pl.program_id(1)]

    @pl.when(now & tiles.FIRST != 0)
    def _():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    def compute(keys, masked):
        mask = _mask(query_tags, key_tags, keys, keys_down=True) if masked else None
        for head in range(shape.heads_a_program):
            own, shared = shape.own(head), shape.shared(head)
            weights, ds = _weights_and_ds(head, keys, mask, q, k, v, dout, lse, delta, shape)
            dv_sum[keys, shared] += _dot(weights.astype(q.dtype), dout[:, own], MATMUL)
            dk_sum[keys, shared] += _dot(ds.astype(q.dtype), q[:, own], MATMUL)

    _each_part(now, shape.sizes, compute)

    @pl.when(now & tiles.LAST != 0)
    def _():
        dk[...] = dk_sum[...].astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


def _weights_and_ds(head, keys, mask, q, k, v, dout, lse, delta, shape: TpuShape):
    """Returns attention weights and dS, the gradient of the unscaled logits: [keys, queries]."""
    own, shared = shape.own(head), shape.shared(head)
    logits = _dot(k[keys, shared], q[:, own], CONTRACT_LAST) * (shape.scale * LOG2_E)
    weights = jnp.exp2(logits - lse[head] * LOG2_E)
    if mask is not None:
        weights = jnp.where(mask, weights, 0.0)
    dp = _dot(v[keys, shared], dout[:, own], CONTRACT_LAST)
    return weights, weights * (dp - delta[head]) * shape.scale


# ---------------------------------------------------------------------------------------------
# Calls.


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Which piece of an array a grid step reads or writes.

    Attributes:
        shape: of the kernels.
        rows_are_keys: whether the rows of the list are tiles of keys.
    """

    shape: TpuShape
    rows_are_keys: bool = False

    def _size(self, keys: bool) -> int:
        return self.shape.sizes.keys if keys else self.shape.sizes.queries

    def _at(self, keys: bool, n, row, col):
        """Returns which tile of keys, or of queries, the entry n of the list computes."""
        return (row if keys == self.rows_are_keys else col)[n]

    def heads(self, *, keys: bool, stacked: bool = False):
        """Queries or keys and what has their shape, [b s (h d)]; of one layer of [n b t (h d)]."""
        heads = self.shape.kv_heads_a_program if keys else self.shape.heads_a_program
        tile = (None, self._size(keys), heads * self.shape.head_dim)

        def place(h, n, batch, row, col, flags, *layer):
            at = (batch[n], self._at(keys, n, row, col), h)
            return (layer[0][0], *at) if stacked else at

        return pl.BlockSpec((None, *tile) if stacked else tile, place)

    def query_row(self):
        """A number for each query and head, [b h 1 s]."""
        return pl.BlockSpec(
            (None, self.shape.heads_a_program, 1, self.shape.sizes.queries),
            lambda h, n, batch, row, col, *_: (batch[n], h, 0, self._at(False, n, row, col)),
        )

    def tags(self, *, keys: bool, down: bool):
        """`TpuTags.down` or `TpuTags.across`."""
        size = self._size(keys)

        def place(h, n, batch, row, col, *_):
            tile = self._at(keys, n, row, col)
            return (batch[n], tile, 0) if down else (batch[n], 0, tile)

        return pl.BlockSpec((None, size, LANES) if down else (None, SUBLANES, size), place)


def _call(
    kernel, shape: TpuShape, tile_list: TileList, prefetched, inputs, outputs, scratch, name,
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
    tags: tuple[TpuTags, TpuTags],
    tables: Tables,
    shape: TpuShape,
) -> tuple[Float[Array, "b s hd"], Float[Array, "b h one s"]]:
    """Returns the output and its log-sum-exp; lengths are whole numbers of tiles."""
    query_tags, key_tags = tags
    batch, length, _ = q.shape
    blocks, heads, size = _Blocks(shape), shape.heads_a_program, shape.sizes.queries
    if not shape.interpret:
        # A cache stays where it is: for v5e the compiler would hold those of some layers in the
        # vector memory for a step, all slots of them, and put them back.
        k, v = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k, v))
    return _call(
        _forward_kernel,
        shape,
        tables.by_query,
        [jnp.asarray(layer, jnp.int32).reshape(1)],
        [
            (query_tags.down, blocks.tags(keys=False, down=True)),
            (key_tags.across, blocks.tags(keys=True, down=False)),
            (q, blocks.heads(keys=False)),
            (k, blocks.heads(keys=True, stacked=True)),
            (v, blocks.heads(keys=True, stacked=True)),
        ],
        [
            (jax.ShapeDtypeStruct(q.shape, q.dtype), blocks.heads(keys=False)),
            (
                jax.ShapeDtypeStruct((batch, shape.num_heads, 1, length), jnp.float32),
                blocks.query_row(),
            ),
        ],
        [(heads, size, LANES), (heads, size, LANES), (size, heads * shape.head_dim)],
        "step_causal_attention",
        products=2,
    )


def backward(q, k, v, tags, tables: Tables, out, lse, cotangents, shape: TpuShape):
    """Returns the gradients of q [b s (h d)], k and v [b t (hk d)]."""
    (query_tags, key_tags), (dout, _) = tags, cotangents
    delta = common.row_sums(out, cotangents, shape.num_heads)  # [b h 1 s]

    def inputs(blocks: _Blocks):
        return [
            (query_tags.across, blocks.tags(keys=False, down=False)),
            (key_tags.down, blocks.tags(keys=True, down=True)),
            (q, blocks.heads(keys=False)),
            (k, blocks.heads(keys=True)),
            (v, blocks.heads(keys=True)),
            (dout, blocks.heads(keys=False)),
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
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), blocks.heads(keys=False))],
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
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), blocks.heads(keys=True)) for x in (k, v)],
        [(sizes.keys, width)] * 2,
        "step_causal_attention_dkv",
        products=4,
    )
    return dq, dk, dv


def prepare(q, k, v, tags: common.Tags, sizes: TileSizes):
    """Fills everything up to whole tiles, and lays the tags out."""
    query_block, query_horizon, key_block, query_segment, key_segment = tags
    query_tags = tags_of(query_block, query_horizon, query_segment, sizes.queries)
    key_tags = tags_of(key_block, None, key_segment, sizes.keys)
    q = common.whole_tiles(q, sizes.queries)
    k, v = (common.whole_tiles(x, sizes.keys) for x in (k, v))
    return q, k, v, (query_tags, key_tags)


attention = common.entry(prepare, forward, backward)
