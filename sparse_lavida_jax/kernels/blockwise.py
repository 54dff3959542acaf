# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention in plain `lax`, of linear memory: where there is no kernel for the GPU.

A loop over the tiles that the kernels' tables list (`tables.py`), with a running softmax in the
forward pass (Flash-Attention, arXiv:2205.14135, Alg. 1) and the weights computed again from the
saved log-sum-exp in the backward pass (Alg. 4). No array holds a number for every pair of tokens,
and tiles without a visible pair are skipped. The compiler makes the products: any GPU, any jax, any
width of a head.

It is ours because what there is holds the mask, which grows with the square of the length:
`jax.nn.dot_product_attention` takes a mask or a bias of all pairs, and so does tokamax's
`xla_chunked` (0.0.17), which skips no tile, keeps its running sums of every chunk for the gradient,
and returns no log-sum-exp. Pallas's Triton backend could compile a kernel for older GPUs, but is
deprecated since jax 0.11.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from sparse_lavida_jax.kernels.common import NOTHING_SEEN_LSE, Shape, Tags, entry, row_sums
from sparse_lavida_jax.kernels.tables import Tables, TileList, TileSizes
from sparse_lavida_jax.visibility import AnyArray, is_padding, visible

Carry = TypeVar("Carry")

# Of the running maximum: not infinite, so that no difference is NaN in a row that sees nothing.
START = float(jnp.finfo(jnp.float32).min)


class BlockShape(Shape):
    """A call in blocks; the parts of its tiles are not used."""

    sizes: TileSizes

    def query_heads(self, x: Float[Array, "*s hd"]) -> Float[Array, "*s hk g d"]:
        """Splits the heads of queries: by the key head that they share, and among its group."""
        return x.reshape(*x.shape[:-1], self.num_kv_heads, self.group, self.head_dim)

    def key_heads(self, x: Float[Array, "*t hkd"]) -> Float[Array, "*t hk d"]:
        return x.reshape(*x.shape[:-1], self.num_kv_heads, self.head_dim)


@dataclasses.dataclass(frozen=True)
class _Span:
    """The queries or the keys of a tile, in one row.

    The last span of a length that is no whole number of tiles begins earlier, so that all have the
    same size and nothing is filled up. What the span before it had too does not count again.

    Attributes:
        first: where the span would begin by its number; tokens from here on count.
        start: where it begins.
    """

    row: Int[Array, ""]
    first: Int[Array, ""]
    start: Int[Array, ""]
    size: int

    @classmethod
    def of(cls, row, number, size: int, length: int) -> "_Span":
        first, size = number * size, min(size, length)
        return cls(row, first, jnp.minimum(first, length - size), size)

    @property
    def counts(self) -> Bool[Array, " s"]:
        return self.start + jnp.arange(self.size) >= self.first

    def read(self, x: Shaped[AnyArray, "b *n"], axis: int = 1) -> Array:
        """Returns this span of its row of x, whose tokens lie along `axis`."""
        sizes = [self.size if i == axis else n for i, n in enumerate(x.shape)]
        return lax.dynamic_slice(x, self._at(x, axis), [1, *sizes[1:]])[0]

    def read_layer(self, x: Float[Array, "n b t hkd"], layer) -> Float[Array, "s hkd"]:
        """Returns this span of one layer of a stack; the rest of the stack is not touched."""
        at = (layer, self.row, self.start, 0)
        return lax.dynamic_slice(x, at, (1, 1, self.size, x.shape[-1]))[0, 0]

    def write(self, x: Float[Array, "b *n"], part: Float[Array, "*m"], axis: int = 1) -> Array:
        return lax.dynamic_update_slice(x, part[None], self._at(x, axis))

    def add(self, x: Float[Array, "b s *heads"], part: Float[Array, "size *heads"]) -> Array:
        return self.write(x, self.read(x) + part)

    def _at(self, x: AnyArray, axis: int) -> list:
        return [self.row, *(self.start if i == axis else 0 for i in range(1, x.ndim))]


def _mask(tags: Tags, queries: _Span, keys: _Span) -> Bool[Array, "1 1 s t"]:
    """Returns who sees whom in a tile, next to logits [hk g s t]."""
    query_block, horizon, key_block, query_segment, key_segment = tags
    block, seen = queries.read(query_block)[:, None], keys.read(key_block)[None]
    of_query = None if query_segment is None else queries.read(query_segment)[:, None]
    of_key = None if key_segment is None else keys.read(key_segment)[None]
    sees = visible(block, queries.read(horizon)[:, None], seen, of_query, of_key)
    counts = queries.counts[:, None] & keys.counts[None]
    mask = jnp.asarray(sees & ~is_padding(block)) & counts
    return mask[None, None]


def _each_tile(
    compute: Callable[[_Span, _Span, Carry], Carry],
    start: Carry,
    tile_list: TileList,
    lengths: tuple[int, int],
    sizes: TileSizes,
) -> Carry:
    """Runs `compute(queries, keys, carry)` over the tiles of a list.

    Args:
        lengths: of all queries and of all keys.
    """

    def visit(i, carry):
        row, query, key = (x[i] for x in (tile_list.batch, tile_list.row, tile_list.col))
        queries = _Span.of(row, query, sizes.queries, lengths[0])
        return compute(queries, _Span.of(row, key, sizes.keys, lengths[1]), carry)

    return lax.fori_loop(0, tile_list.count, visit, start)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def forward(
    q: Float[Array, "b s hd"],
    k: Float[Array, "n b t hkd"],
    v: Float[Array, "n b t hkd"],
    layer: Int[Array, ""] | int,
    tags: Tags,
    tables: Tables,
    shape: BlockShape,
) -> tuple[Float[Array, "b s hd"], Float[Array, "b h s"]]:
    """Returns the output and its log-sum-exp."""
    batch, length, _ = q.shape

    def compute(queries: _Span, keys: _Span, carry):
        accumulator, maximum, total = carry
        own_q = shape.query_heads(queries.read(q))
        own_k, own_v = (shape.key_heads(keys.read_layer(x, layer)) for x in (k, v))
        logits = _product("sngd,tnd->ngst", own_q, own_k) * shape.scale
        logits = jnp.where(_mask(tags, queries, keys), logits, -jnp.inf)
        before = queries.read(maximum, axis=3)
        after = jnp.maximum(before, logits.max(axis=-1))
        decay = jnp.exp(before - after)  # [hk g s]
        weights = jnp.exp(logits - after[..., None])
        own_total = queries.read(total, axis=3) * decay + weights.sum(axis=-1)
        own = _product("ngst,tnd->sngd", weights.astype(v.dtype), own_v)
        own += queries.read(accumulator) * jnp.moveaxis(decay, -1, 0)[..., None]
        return (
            queries.write(accumulator, own),
            queries.write(maximum, after, axis=3),
            queries.write(total, own_total, axis=3),
        )

    rows = (batch, shape.num_kv_heads, shape.group, length)
    start = (
        jnp.zeros(shape.query_heads(q).shape, jnp.float32),
        jnp.full(rows, START, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    lengths = (length, k.shape[2])
    accumulator, maximum, total = _each_tile(compute, start, tables.by_query, lengths, shape.sizes)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out = accumulator / jnp.moveaxis(safe, -1, 1)[..., None]
    lse = jnp.where(seen, maximum + jnp.log(safe), NOTHING_SEEN_LSE)
    return out.astype(q.dtype).reshape(q.shape), lse.reshape(batch, shape.num_heads, length)


def backward(q, k, v, tags: Tags, tables: Tables, out, lse, cotangents, shape: BlockShape):
    """Returns the gradients of q [b s (h d)], k and v [b t (hk d)], all from one loop."""
    dout, _ = cotangents
    rows = (q.shape[0], shape.num_kv_heads, shape.group, q.shape[1])
    delta = row_sums(out, cotangents, shape.num_heads).reshape(rows)
    lse = lse.reshape(rows)

    def compute(queries: _Span, keys: _Span, carry):
        dq, dk, dv = carry
        own_q, own_dout = (shape.query_heads(queries.read(x)) for x in (q, dout))
        own_k, own_v = (shape.key_heads(keys.read(x)) for x in (k, v))
        mask = _mask(tags, queries, keys)
        logits = _product("sngd,tnd->ngst", own_q, own_k) * shape.scale
        weights = jnp.exp(logits - queries.read(lse, axis=3)[..., None])
        weights = jnp.where(mask, weights, 0.0)
        dp = _product("sngd,tnd->ngst", own_dout, own_v)
        ds = weights * (dp - queries.read(delta, axis=3)[..., None]) * shape.scale
        # Once more: what a row does not see may be so large that 0 times it is NaN.
        ds = jnp.where(mask, ds, 0.0).astype(q.dtype)
        return (
            queries.add(dq, _product("ngst,tnd->sngd", ds, own_k)),
            keys.add(dk, _product("ngst,sngd->tnd", ds, own_q)),
            keys.add(dv, _product("ngst,sngd->tnd", weights.astype(q.dtype), own_dout)),
        )

    start = (
        jnp.zeros(shape.query_heads(q).shape, jnp.float32),
        jnp.zeros(shape.key_heads(k).shape, jnp.float32),
        jnp.zeros(shape.key_heads(v).shape, jnp.float32),
    )
    lengths = (q.shape[1], k.shape[1])
    gradients = _each_tile(compute, start, tables.by_query, lengths, shape.sizes)
    return tuple(
        x.astype(given.dtype).reshape(given.shape)
        for x, given in zip(gradients, (q, k, v), strict=True)
    )


def prepare(q, k, v, tags: Tags, sizes: TileSizes):
    """Tags on the device; no length needs to be filled up."""
    del sizes
    return q, k, v, tuple(None if tag is None else jnp.asarray(tag) for tag in tags)


attention = entry(prepare, forward, backward)
