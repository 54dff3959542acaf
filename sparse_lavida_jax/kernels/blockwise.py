# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention in plain `lax` with linear memory, for GPUs without a kernel.

A loop over the tiles that the tables list (`tile_lists.py`), with a running softmax in the
forward pass (Flash-Attention, arXiv:2205.14135, Alg. 1) and the weights computed again from the
saved log-sum-exp in the backward pass (Alg. 4). No array has an element for every pair of tokens,
and tiles without a visible pair are skipped. The compiler generates the matrix products, so this
works with any GPU, jax version and head width.

We wrote our own because existing functions need the mask, which grows with the square of the
length: `jax.nn.dot_product_attention` takes a mask or a bias of all pairs, and so does tokamax's
`xla_chunked` (0.0.17), which skips no tile, keeps the running sums of every chunk for the gradient,
and returns no log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from sparse_lavida_jax.kernels.common import NOTHING_SEEN_LSE, Shape, Tags, row_sums
from sparse_lavida_jax.kernels.tile_lists import Tables, TileSizes
from sparse_lavida_jax.visibility import AnyArray, is_padding, visible

Carry = TypeVar("Carry")

# Start of the running maximum: not infinite, so that a row that sees nothing gets no NaN.
START = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class _Span:
    """The queries or the keys of a tile, in one row.

    If the length is not a whole number of tiles, the last span starts earlier, so that all have the
    same size without padding. Tokens that it shares with the span before it do not count again.

    Attributes:
        first: nominal start of the span, from its number; tokens from here on count.
        start: actual start.
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
        """Returns this span of its row of x, whose tokens are along `axis`."""
        sizes = [self.size if i == axis else n for i, n in enumerate(x.shape)]
        return lax.dynamic_slice(x, self._at(x, axis), [1, *sizes[1:]])[0]

    def read_layer(self, x: Float[Array, "n b t hk d"], layer) -> Float[Array, "s hk d"]:
        """Returns this span of one layer of a stack without reading the rest of the stack."""
        at = (layer, self.row, self.start, 0, 0)
        return lax.dynamic_slice(x, at, (1, 1, self.size, *x.shape[3:]))[0, 0]

    def write(self, x: Float[Array, "b *n"], part: Float[Array, "*m"], axis: int = 1) -> Array:
        return lax.dynamic_update_slice(x, part[None], self._at(x, axis))

    def add(self, x: Float[Array, "b s *heads"], part: Float[Array, "size *heads"]) -> Array:
        return self.write(x, self.read(x) + part)

    def _at(self, x: AnyArray, axis: int) -> list:
        return [self.row, *(self.start if i == axis else 0 for i in range(1, x.ndim))]


def _mask(tags: Tags, queries: _Span, keys: _Span) -> Bool[Array, "1 1 s t"]:
    """Returns who sees whom in a tile, to broadcast with logits [hk g s t]."""
    query_block, horizon, key_block, query_segment, key_segment = tags
    block, seen = queries.read(query_block)[:, None], keys.read(key_block)[None]
    of_query = None if query_segment is None else queries.read(query_segment)[:, None]
    of_key = None if key_segment is None else keys.read(key_segment)[None]
    sees = visible(block, queries.read(horizon)[:, None], seen, of_query, of_key)
    counts = queries.counts[:, None] & keys.counts[None]
    mask = jnp.asarray(sees & ~is_padding(block)) & counts
    return mask[None, None]


def _each_tile(
    compute: Callable[[_Span, _Span, Carry], Carry], start: Carry, tables: Tables, q, k
) -> Carry:
    """Runs `compute(queries, keys, carry)` over the listed tiles of q [b s *n] and k [b t *m]."""
    tiles, sizes = tables.by_query, tables.sizes

    def visit(i, carry):
        queries = _Span.of(tiles.batch[i], tiles.row[i], sizes.queries, q.shape[1])
        keys = _Span.of(tiles.batch[i], tiles.col[i], sizes.keys, k.shape[1])
        return compute(queries, keys, carry)

    return lax.fori_loop(0, tiles.count, visit, start)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _by_head(q, shape: Shape, *others) -> tuple[Array, ...]:
    """Splits heads: queries are grouped by their key head, [b s hk g d]; others [... t hk d]."""
    heads = (shape.num_kv_heads, shape.head_dim)
    own = q.reshape(*q.shape[:-1], shape.num_kv_heads, shape.group, shape.head_dim)
    return own, *(x.reshape(*x.shape[:-1], *heads) for x in others)


def forward(q, k, v, layer, tables: Tables, shape: Shape):
    """Returns the output [b s (h d)] and its log-sum-exp [b h s]; k and v are [n b t (h d)]."""
    q, k, v = _by_head(q, shape, k, v)

    def compute(queries: _Span, keys: _Span, carry):
        accumulator, maximum, total = carry
        own_k, own_v = (keys.read_layer(x, layer) for x in (k, v))
        logits = _product("sngd,tnd->ngst", queries.read(q), own_k) * shape.scale
        logits = jnp.where(_mask(tables.tags, queries, keys), logits, -jnp.inf)
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

    batch, length, *heads, _ = q.shape
    maximum = jnp.full((batch, *heads, length), START, jnp.float32)
    start = (jnp.zeros(q.shape, jnp.float32), maximum, jnp.zeros_like(maximum))
    accumulator, maximum, total = _each_tile(compute, start, tables, q, k[0])
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out = accumulator / jnp.moveaxis(safe, -1, 1)[..., None]
    lse = jnp.where(seen, maximum + jnp.log(safe), NOTHING_SEEN_LSE)
    return out.astype(q.dtype).reshape(batch, length, -1), lse.reshape(batch, -1, length)


def backward(q, k, v, tables: Tables, out, lse, cotangents, shape: Shape):
    """Returns the gradients of q [b s (h d)], k and v [b t (hk d)], computed in one loop."""
    given = (q, k, v)
    rows = (q.shape[0], shape.num_kv_heads, shape.group, q.shape[1])
    delta = row_sums(out, cotangents, shape.num_heads).reshape(rows)
    lse = lse.reshape(rows)
    (dout,) = _by_head(cotangents[0], shape)
    q, k, v = _by_head(q, shape, k, v)

    def compute(queries: _Span, keys: _Span, carry):
        dq, dk, dv = carry
        own_q, own_dout, own_k, own_v = *map(queries.read, (q, dout)), *map(keys.read, (k, v))
        mask = _mask(tables.tags, queries, keys)
        logits = _product("sngd,tnd->ngst", own_q, own_k) * shape.scale
        weights = jnp.exp(logits - queries.read(lse, axis=3)[..., None])
        weights = jnp.where(mask, weights, 0.0)
        dp = _product("sngd,tnd->ngst", own_dout, own_v)
        ds = weights * (dp - queries.read(delta, axis=3)[..., None]) * shape.scale
        # Masked again: what a row does not see may be so large that 0 times it is NaN.
        ds = jnp.where(mask, ds, 0.0).astype(q.dtype)
        return (
            queries.add(dq, _product("ngst,tnd->sngd", ds, own_k)),
            keys.add(dk, _product("ngst,sngd->tnd", ds, own_q)),
            keys.add(dv, _product("ngst,sngd->tnd", weights.astype(q.dtype), own_dout)),
        )

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    gradients = _each_tile(compute, start, tables, q, k)
    return tuple(
        x.astype(like.dtype).reshape(like.shape) for x, like in zip(gradients, given, strict=True)
    )


def prepare(q, k, v, sizes: TileSizes):
    """Returns the arrays; no padding is needed."""
    del sizes
    return q, k, v


def laid_out(tags: Tags, sizes: TileSizes) -> Tags:
    """Returns the tags on the device."""
    del sizes
    return tuple(None if tag is None else jnp.asarray(tag) for tag in tags)
