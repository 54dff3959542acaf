# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention for other GPUs than Hopper (Pallas on Triton): forward, and gradients.

A program holds a tile of rows: queries in the forward pass and for their gradient, keys for that of
keys and values. It goes through its list (`tile_lists.RowLists`): first the tiles without a mask,
then those masked by `visibility.visible`, in two loops, of which only the second has mask code.
Triton copies the next tiles into shared memory while one is computed.

We wrote our own because tokamax's kernel (0.0.17), on the same backend, takes an array of all
pairs, computes what it hides, and reads no layer of a stacked cache in place (docs/kernels.md). Jax
has deprecated the backend since 0.11; a version without it runs attention in blocks.

Supports bfloat16 and float16, with heads of width 64 or 128.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sparse_lavida_jax.kernels import common
from sparse_lavida_jax.kernels.common import LOG2_E, LOWEST, NOTHING_SEEN_LSE, Shape
from sparse_lavida_jax.kernels.tile_lists import (
    GPU_ROWS,
    GpuSizes,
    GpuTables,
    RowLists,
    padded_tags,
)
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, visible

START = LOWEST / 2  # of the running maximum: exp2(LOWEST - START) is 0, so no row is a special case
UNSEEN = -1  # the block of a query that is padding: no key has it
WARPS = 8  # of a program


class _RowTiles(NamedTuple):
    """One row of a list, inside a kernel, and the head that the program computes."""

    lists: Any
    batch: Any
    row: Any
    head: Any

    @classmethod
    def mine(cls, lists) -> "_RowTiles":
        """Returns the row of this program; with an order, the first programs take the longest."""
        row, head, batch = map(pl.program_id, range(3))
        order = lists[3:]
        return cls(lists, batch, order[0][batch, row] if order else row, head)

    @property
    def tokens(self):
        return pl.ds(self.row * GPU_ROWS, GPU_ROWS)

    def each_tile(self, size: int, compute, carry):
        """Runs `compute(tokens, carry, masked)` over the tiles of the row."""
        cols, *ends = self.lists[:3]
        full, active = (n[self.batch, self.row] for n in ends)

        def visit(step, carry, masked):
            first = pl.multiple_of(cols[self.batch, self.row, step] * size, size)
            return compute(pl.ds(first, size), carry, masked)

        carry = lax.fori_loop(0, full, functools.partial(visit, masked=False), carry)
        return lax.fori_loop(full, active, functools.partial(visit, masked=True), carry)


_product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


def _read(tags: tuple[Any, ...], batch, tokens) -> list:
    return [tag[batch, tokens] for tag in tags]


def _mask(of_queries: list, of_keys: list, *, keys_down: bool = False):
    """Returns who sees whom in a tile, [queries, keys] or transposed."""
    down, across = (lambda x: x[:, None]), (lambda x: x[None])
    block, horizon, *segment = map(across if keys_down else down, of_queries)
    key_block, *key_segment = map(down if keys_down else across, of_keys)
    return visible(block, horizon, key_block, *segment, *key_segment)


def _lanes(head, shape: Shape, group: int = 1):
    """Lanes of a head, or of the key head that a group of query heads reads."""
    number = lax.div(head, jnp.array(group, head.dtype))
    return pl.ds(number * shape.head_dim, shape.head_dim)


def _exp2(x, shape: Shape):
    """Returns 2^x in one instruction; below 2^-126 it is 0, which saves three more."""
    if shape.interpret:
        return jnp.exp2(x)
    (found,) = triton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1,
        result_shape_dtypes=[_like(x)],
    )  # fmt: skip
    return found


def _forward_kernel(q, k, v, layer, tags, lists, out, lse, *, shape: Shape):
    work, scale = _RowTiles.mine(lists), shape.scale * LOG2_E
    batch, queries, lanes = work.batch, work.tokens, _lanes(work.head, shape)
    key_lanes, of_layer = _lanes(work.head, shape, shape.group), layer[0]
    own, own_tags = q[batch, queries, lanes], _read(tags[0], batch, queries)

    def compute(keys, carry, masked):
        accumulator, maximum, total = carry
        logits = _product(own, k[of_layer, batch, keys, key_lanes].T)
        if masked:
            mask = _mask(own_tags, _read(tags[1], batch, keys))
            logits = jnp.where(mask, logits, LOWEST)
        after = jnp.maximum(maximum, logits.max(axis=1))
        decay = _exp2((maximum - after) * scale, shape)
        weights = _exp2(logits * scale - (after * scale)[:, None], shape)
        accumulator *= decay[:, None]
        values = v[of_layer, batch, keys, key_lanes]
        accumulator += _product(weights.astype(q.dtype), values)
        return accumulator, after, total * decay + weights.sum(axis=1)

    start = jnp.full((GPU_ROWS,), START, jnp.float32)
    carry = jnp.zeros(own.shape, jnp.float32), start, jnp.zeros_like(start)
    accumulator, maximum, total = work.each_tile(shape.sizes.forward_keys, compute, carry)
    # Padding sees nothing, though tiles without a mask were computed for it too.
    seen = (total > 0) & (own_tags[0] != UNSEEN)
    safe = jnp.where(seen, total, 1.0)
    whole = jnp.where(seen[:, None], accumulator / safe[:, None], 0.0)
    out[batch, queries, lanes] = whole.astype(q.dtype)
    lse[batch, work.head, queries] = jnp.where(
        seen, maximum * shape.scale + jnp.log(safe), NOTHING_SEEN_LSE
    )


def _query_gradient_kernel(q, k, v, dout, lse, delta, tags, lists, dq, *, shape: Shape):
    work, scale = _RowTiles.mine(lists), shape.scale * LOG2_E
    batch, queries, lanes = work.batch, work.tokens, _lanes(work.head, shape)
    key_lanes = _lanes(work.head, shape, shape.group)
    own, own_dout = (x[batch, queries, lanes] for x in (q, dout))
    own_lse, own_delta = (x[batch, work.head, queries][:, None] for x in (lse, delta))
    own_tags = _read(tags[0], batch, queries)

    def compute(keys, dq_sum, masked):
        its_k, its_v = (x[batch, keys, key_lanes] for x in (k, v))
        weights = _exp2(_product(own, its_k.T) * scale - own_lse * LOG2_E, shape)
        if masked:
            mask = _mask(own_tags, _read(tags[1], batch, keys))
            weights = jnp.where(mask, weights, 0.0)
        ds = weights * (_product(own_dout, its_v.T) - own_delta)
        return dq_sum + _product(ds.astype(q.dtype), its_k)

    start = jnp.zeros(own.shape, jnp.float32)
    dq_sum = work.each_tile(shape.sizes.dq_keys, compute, start)
    dq[batch, queries, lanes] = (dq_sum * shape.scale).astype(q.dtype)


def _key_gradient_kernel(q, k, v, dout, lse, delta, tags, lists, dk, dv, *, shape: Shape):
    """Adds up the query heads that share a key head."""
    work, scale = _RowTiles.mine(lists), shape.scale * LOG2_E
    batch, keys, lanes = work.batch, work.tokens, _lanes(work.head, shape)
    own_k, own_v = (x[batch, keys, lanes] for x in (k, v))
    own_tags = _read(tags[1], batch, keys)

    def of_head(i, carry):
        head = work.head * shape.group + i

        def compute(queries, carry, masked):
            dk_sum, dv_sum = carry
            its_q, its_dout = (x[batch, queries, _lanes(head, shape)] for x in (q, dout))
            its_lse, its_delta = (x[batch, head, queries][None] for x in (lse, delta))
            weights = _exp2(_product(own_k, its_q.T) * scale - its_lse * LOG2_E, shape)
            if masked:
                mask = _mask(_read(tags[0], batch, queries), own_tags, keys_down=True)
                weights = jnp.where(mask, weights, 0.0)
            dv_sum += _product(weights.astype(q.dtype), its_dout)
            ds = weights * (_product(own_v, its_dout.T) - its_delta)
            return dk_sum + _product(ds.astype(q.dtype), its_q), dv_sum

        return work.each_tile(shape.sizes.dkv_queries, compute, carry)

    start = jnp.zeros(own_k.shape, jnp.float32)
    dk_sum, dv_sum = lax.fori_loop(0, shape.group, of_head, (start, start))
    dk[batch, keys, lanes] = (dk_sum * shape.scale).astype(q.dtype)
    dv[batch, keys, lanes] = dv_sum.astype(q.dtype)


def _call(
    kernel, name: str, shape: Shape, heads: int, stages: int, outputs, lists: RowLists, *inputs
) -> Any:
    batch, rows, _ = lists.cols.shape
    order = () if lists.order is None else (lists.order,)
    return pl.pallas_call(
        functools.partial(kernel, shape=shape),
        out_shape=outputs,
        # Rows first: programs that run together share few heads, whose keys stay in the cache.
        grid=(rows, heads, batch),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=bool(shape.interpret),
        name=name,
    )(*inputs, (lists.cols, lists.num_full, lists.num_active, *order))


def forward(q, k, v, layer, tables: GpuTables, shape: Shape):
    """Returns the output [b s (h d)] and its log-sum-exp [b h s]; lengths must be whole tiles."""
    lse = jax.ShapeDtypeStruct((q.shape[0], shape.num_heads, q.shape[1]), jnp.float32)
    return _call(
        _forward_kernel, "step_causal_attention", shape, shape.num_heads,
        shape.sizes.forward_stages, (_like(q), lse), tables.forward,
        q, k, v, jnp.asarray(layer, jnp.int32).reshape(1), tables.tags,
    )  # fmt: skip


def backward(q, k, v, tables: GpuTables, out, lse, cotangents, shape: Shape):
    """Returns the gradients of q [b s (h d)], k and v [b t (hk d)]."""
    assert tables.for_dq and tables.for_dkv, "the tables were made with gradients=False"
    delta = common.row_sums(out, cotangents, shape.num_heads)  # [b h s]
    inputs = (q, k, v, cotangents[0], lse, delta, tables.tags)
    name, sizes = "step_causal_attention", shape.sizes
    dq = _call(
        _query_gradient_kernel, f"{name}_dq", shape, shape.num_heads, sizes.dq_stages,
        _like(q), tables.for_dq, *inputs,
    )  # fmt: skip
    dk, dv = _call(
        _key_gradient_kernel, f"{name}_dkv", shape, shape.num_kv_heads, sizes.dkv_stages,
        (_like(k), _like(v)), tables.for_dkv, *inputs,
    )  # fmt: skip
    return dq, dk, dv


def _like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def prepare(q, k, v, sizes: GpuSizes):
    """Pads to whole tiles."""
    del sizes
    return tuple(common.whole_tiles(x, GPU_ROWS) for x in (q, k, v))


def laid_out(tags: common.Tags, sizes: GpuSizes) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the tags of queries (block, horizon) and of keys (block), both with any segment.

    They are padded to whole tiles; those of queries that are padding see no key.
    """
    del sizes
    query_block, query_horizon, key_block, *segments = tags
    block, key_block = (padded_tags(tag, GPU_ROWS, PAD_BLOCK) for tag in (query_block, key_block))
    horizon = padded_tags(query_horizon, GPU_ROWS, PAD_HORIZON)
    real = block != PAD_BLOCK
    queries = jnp.where(real, block, UNSEEN), jnp.where(real, horizon, PAD_HORIZON)
    if segments[0] is None:
        return queries, (key_block,)
    of_query, of_key = (padded_tags(segment, GPU_ROWS, 0) for segment in segments)
    return (*queries, of_query), (key_block, of_key)
