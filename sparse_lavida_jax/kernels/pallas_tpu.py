# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention for TPUs (Mosaic): forward, and the gradients of queries and of keys.

The grid is (groups of heads, active tiles); the list of active tiles is prefetched into scalar
memory and its length bounds the grid, so that a tile without a visible pair costs neither a copy
nor a step. Inside a tile each part is skipped, computed without a mask, or masked by
`visibility.visible`, which is traced unchanged.

The backward pass computes logits with keys down and queries across: log-sum-exp and the row sums
of `common.row_sums` are then rows of lanes, and no transposition is needed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_lavida_jax.kernels import common
from sparse_lavida_jax.kernels import tile_lists as tiles
from sparse_lavida_jax.kernels.common import LOG2_E, LOWEST, NOTHING_SEEN_LSE, Shape
from sparse_lavida_jax.kernels.tile_lists import Tables, TileList, TileSizes
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, is_padding, visible

LANES, SUBLANES = 128, 8
CONTRACT_LAST = (((1,), (1,)), ((), ()))
CONTRACT_FIRST = (((0,), (0,)), ((), ()))
MATMUL = (((1,), (0,)), ((), ()))


def _kv_heads(shape: Shape) -> int:
    """Key heads per program: as few as fill the lanes, or all of them."""
    for heads in range(1, shape.num_kv_heads):
        if shape.num_kv_heads % heads == 0 and heads * shape.head_dim % LANES == 0:
            return heads
    return shape.num_kv_heads


def _heads(shape: Shape) -> int:
    """Query heads per program."""
    return _kv_heads(shape) * shape.group


# ---------------------------------------------------------------------------------------------
# Inside a tile.


def _each_part(flags, sums, compute, write, sizes: TileSizes) -> None:
    """Computes a tile part by part; also initializes and finishes its row.

    Args:
        sums: pairs of a buffer and its value at the start of a row.
        compute: called with the keys of every part that is not skipped, and whether it is masked.
        write: called when the row is complete.
    """
    now = flags[pl.program_id(1)]

    @pl.when(now & tiles.FIRST != 0)
    def _():
        for buffer, start in sums:
            buffer[...] = jnp.full_like(buffer, start)

    for part in range(sizes.keys // sizes.part):
        keys = slice(part * sizes.part, (part + 1) * sizes.part)
        kind = (now >> (tiles.CLASS_SHIFT + tiles.CLASS_BITS * part)) & (2**tiles.CLASS_BITS - 1)
        pl.when(kind == tiles.FULL)(functools.partial(compute, keys, False))
        pl.when(kind == tiles.PARTIAL)(functools.partial(compute, keys, True))
    pl.when(now & tiles.LAST != 0)(write)


def _each_head(shape: Shape):
    """Yields every query head of a program, its lanes, and those of the key head that it reads."""
    for head in range(_heads(shape)):
        own, shared = (
            slice(i * shape.head_dim, (i + 1) * shape.head_dim) for i in (head, head // shape.group)
        )
        yield head, own, shared


def _dot(a, b, dimensions):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _mask(query_tags, key_tags, keys: slice, *, keys_down: bool):
    """Returns who sees whom, [queries, keys of the part] or transposed."""
    if keys_down:
        block, horizon, segment = (query_tags[i : i + 1, :] for i in range(3))
        key_block, key_segment = key_tags[keys, 0:1], key_tags[keys, 2:3]
    else:
        block, horizon, segment = (query_tags[:, i : i + 1] for i in range(3))
        key_block, key_segment = key_tags[0:1, keys], key_tags[2:3, keys]
    return visible(block, horizon, key_block, segment, key_segment) & ~is_padding(block)


def _forward_kernel(
    batch, row, col, flags, layer, query_tags, key_tags, q, k, v, out, lse,
    maximum, total, accumulator, *, shape: Shape,
):  # fmt: skip
    del batch, row, col, layer

    def compute(keys, masked):
        mask = _mask(query_tags, key_tags, keys, keys_down=False) if masked else None
        for head, own, shared in _each_head(shape):
            logits = _dot(q[:, own], k[keys, shared], CONTRACT_LAST) * (shape.scale * LOG2_E)
            if mask is not None:
                logits = jnp.where(mask, logits, LOWEST)
            before = maximum[head, :, 0:1]
            after = jnp.maximum(before, logits.max(axis=1, keepdims=True))
            weights = jnp.exp2(logits - after)
            if mask is not None:  # a row that has seen nothing yet gives exp2(0)
                weights = jnp.where(mask, weights, 0.0)
            decay = jnp.exp2(before - after)
            sums = total[head, :, 0:1] * decay + weights.sum(axis=1, keepdims=True)
            maximum[head] = jnp.broadcast_to(after, maximum.shape[1:])
            total[head] = jnp.broadcast_to(sums, total.shape[1:])
            values = v[keys, shared]
            accumulator[:, own] = accumulator[:, own] * decay + _dot(
                weights.astype(values.dtype), values, MATMUL
            )

    def write():
        for head, own, _ in _each_head(shape):
            sums = total[head, :, 0:1]
            seen = sums > 0
            sums = jnp.where(seen, sums, 1.0)
            out[:, own] = jnp.where(seen, accumulator[:, own] / sums, 0.0).astype(out.dtype)
            logs = jnp.where(
                total[head] > 0, (maximum[head] + jnp.log2(sums)) / LOG2_E, NOTHING_SEEN_LSE
            )
            lse[head] = logs.T[0:1]

    sums = [(maximum, LOWEST), (total, 0), (accumulator, 0)]
    _each_part(flags, sums, compute, write, shape.sizes)


def _gradient_kernel(
    batch, row, col, flags, query_tags, key_tags, q, k, v, dout, lse, delta, *results,
    shape: Shape,
):  # fmt: skip
    """Sums up dq, or dk and dv: `results` are the outputs and a buffer for each."""
    del batch, row, col
    outputs, sums = results[: len(results) // 2], results[len(results) // 2 :]

    def compute(keys, masked):
        mask = _mask(query_tags, key_tags, keys, keys_down=True) if masked else None
        for head, own, shared in _each_head(shape):
            logits = _dot(k[keys, shared], q[:, own], CONTRACT_LAST) * (shape.scale * LOG2_E)
            weights = jnp.exp2(logits - lse[head] * LOG2_E)  # [keys, queries]
            if mask is not None:
                weights = jnp.where(mask, weights, 0.0)
            dp = _dot(v[keys, shared], dout[:, own], CONTRACT_LAST)
            ds = weights * (dp - delta[head]) * shape.scale  # of the unscaled logits
            if len(sums) == 1:
                theirs = k[keys, shared]
                sums[0][:, own] += _dot(ds.astype(theirs.dtype), theirs, CONTRACT_FIRST)
            else:
                dk, dv = sums
                dv[keys, shared] += _dot(weights.astype(q.dtype), dout[:, own], MATMUL)
                dk[keys, shared] += _dot(ds.astype(q.dtype), q[:, own], MATMUL)

    def write():
        for output, buffer in zip(outputs, sums, strict=True):
            output[...] = buffer[...].astype(output.dtype)

    _each_part(flags, [(buffer, 0) for buffer in sums], compute, write, shape.sizes)


# ---------------------------------------------------------------------------------------------
# Calls.


def _block(axes: str, shape: Shape, rows_are_keys: bool) -> pl.BlockSpec:
    """Returns which piece of an array with these axes a grid step reads or writes.

    Args:
        axes: their names, as below; an axis given by its size is read completely.
        rows_are_keys: whether the rows of the list are tiles of keys.
    """
    sizes = {
        "layer": None,
        "batch": None,
        "queries": shape.sizes.queries,
        "keys": shape.sizes.keys,
        "query_heads": _heads(shape),
        "query_width": _heads(shape) * shape.head_dim,
        "key_width": _kv_heads(shape) * shape.head_dim,
    }
    names = axes.split()

    def place(h, n, batch, row, col, flags, *layer):
        del flags

        def at(name: str):
            if name == "layer":
                return layer[0][0]
            if name == "batch":
                return batch[n]
            if name in ("queries", "keys"):
                return (row if (name == "keys") == rows_are_keys else col)[n]
            return h if name in sizes else 0

        return tuple(at(name) for name in names)

    return pl.BlockSpec(tuple(sizes[n] if n in sizes else int(n) for n in names), place)


def _call(
    kernel, shape: Shape, tile_list: TileList, prefetched, inputs, outputs, scratch, name,
    *, products: int, rows_are_keys: bool = False,
):  # fmt: skip
    """Runs a kernel over a tile list.

    Args:
        inputs: pairs (array, axes).
        outputs: pairs (ShapeDtypeStruct, axes).
        scratch: shapes of float32 buffers.
        products: number of matrix products per tile and head.
    """
    # Only one layer of a stack is read.
    read = sum(x.nbytes // (x.shape[0] if "layer" in axes else 1) for x, axes in inputs)
    entries = tile_list.flags.shape[0]  # an upper bound: the count is known only on the device
    pairs = shape.sizes.queries * shape.sizes.keys * shape.num_heads * entries
    listed = (tile_list.batch, tile_list.row, tile_list.col, tile_list.flags)
    return pl.pallas_call(
        functools.partial(kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(listed) + len(prefetched),
            grid=(shape.num_kv_heads // _kv_heads(shape), tile_list.count),
            in_specs=[_block(axes, shape, rows_are_keys) for _, axes in inputs],
            out_specs=[_block(axes, shape, rows_are_keys) for _, axes in outputs],
            scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in scratch],
        ),
        out_shape=[array for array, _ in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * shape.head_dim, transcendentals=pairs, bytes_accessed=read
        ),
        interpret=shape.interpret,
        name=name,
    )(*listed, *prefetched, *[array for array, _ in inputs])


def forward(q, k, v, layer, tables: Tables, shape: Shape):
    """Returns the output [b s (h d)] and its log-sum-exp [b h 1 s]; k and v are [n b t (h d)].

    Lengths must be whole numbers of tiles.
    """
    (down, _), (_, across) = tables.tags
    batch, length, _ = q.shape
    heads, size = _heads(shape), shape.sizes.queries
    if not shape.interpret:
        # Keeps the cache in place: for v5e the compiler would move all slots of some layers to
        # vector memory for a step, and back.
        k, v = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k, v))
    lse = jax.ShapeDtypeStruct((batch, shape.num_heads, 1, length), jnp.float32)
    return _call(
        _forward_kernel,
        shape,
        tables.by_query,
        [jnp.asarray(layer, jnp.int32).reshape(1)],
        [
            (down, f"batch queries {LANES}"),
            (across, f"batch {SUBLANES} keys"),
            (q, "batch queries query_width"),
            (k, "layer batch keys key_width"),
            (v, "layer batch keys key_width"),
        ],
        [
            (jax.ShapeDtypeStruct(q.shape, q.dtype), "batch queries query_width"),
            (lse, "batch query_heads 1 queries"),
        ],
        [(heads, size, LANES), (heads, size, LANES), (size, heads * shape.head_dim)],
        "step_causal_attention",
        products=2,
    )


def backward(q, k, v, tables: Tables, out, lse, cotangents, shape: Shape):
    """Returns the gradients of q [b s (h d)], k and v [b t (hk d)]."""
    ((_, across), (down, _)), (dout, _) = tables.tags, cotangents
    assert tables.by_key is not None, "the tables were made with gradients=False"
    delta = common.row_sums(out, cotangents, shape.num_heads)  # [b h 1 s]
    inputs = [
        (across, f"batch {SUBLANES} queries"),
        (down, f"batch keys {LANES}"),
        (q, "batch queries query_width"),
        (k, "batch keys key_width"),
        (v, "batch keys key_width"),
        (dout, "batch queries query_width"),
        (lse, "batch query_heads 1 queries"),
        (delta, "batch query_heads 1 queries"),
    ]
    (dq,) = _call(
        _gradient_kernel,
        shape,
        tables.by_query,
        [],
        inputs,
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), "batch queries query_width")],
        [(shape.sizes.queries, _heads(shape) * shape.head_dim)],
        "step_causal_attention_dq",
        products=3,
    )
    dk, dv = _call(
        _gradient_kernel,
        shape,
        tables.by_key,
        [],
        inputs,
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), "batch keys key_width") for x in (k, v)],
        [(shape.sizes.keys, _kv_heads(shape) * shape.head_dim)] * 2,
        "step_causal_attention_dkv",
        products=4,
        rows_are_keys=True,
    )
    return dq, dk, dv


def prepare(q, k, v, sizes: TileSizes):
    """Pads to whole tiles."""
    return common.whole_tiles(q, sizes.queries), *(
        common.whole_tiles(x, sizes.keys) for x in (k, v)
    )


def laid_out(tags: common.Tags, sizes: TileSizes):
    """Returns the tags of queries and those of keys, each in two layouts."""
    query_block, query_horizon, key_block, query_segment, key_segment = tags
    return (
        _down_and_across(query_block, query_horizon, query_segment, sizes.queries),
        _down_and_across(key_block, None, key_segment, sizes.keys),
    )


def _down_and_across(block, horizon, segment, multiple: int):
    """Returns tags down, [b s 128], and across, [b 8 s]: block, horizon and segment of each.

    They are padded to whole tiles.
    """
    stacked = jnp.stack(
        [
            tiles.padded_tags(block, multiple, PAD_BLOCK),
            tiles.padded_tags(block if horizon is None else horizon, multiple, PAD_HORIZON),
            tiles.padded_tags(jnp.zeros_like(block) if segment is None else segment, multiple, 0),
        ],
        axis=1,
    )
    down = jnp.pad(stacked.swapaxes(1, 2), ((0, 0), (0, 0), (0, LANES - 3)))
    return down, jnp.pad(stacked, ((0, 0), (0, SUBLANES - 3), (0, 0)))
