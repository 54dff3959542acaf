# SPDX-License-Identifier: Apache-2.0
"""Attention with the step-causal mask written out: slow, obvious, what kernels must agree with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparse_lavida_jax.kernels.common import NOTHING_SEEN_LSE, Shape
from sparse_lavida_jax.visibility import AnyArray, is_padding, visible


def attention(
    q: Float[Array, "b s hd"],
    k: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    v: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    query_block: Int[AnyArray, "b s"],
    query_horizon: Int[AnyArray, "b s"],
    key_block: Int[AnyArray, "b t"],
    query_segment: Int[AnyArray, "b s"] | None = None,
    key_segment: Int[AnyArray, "b t"] | None = None,
    *,
    shape: Shape,
    layer: Int[Array, ""] | int | None = None,
    tables: None = None,
) -> tuple[Float[Array, "b s hd"], Float[Array, "b h s"]]:
    """Returns the attention output and the log-sum-exp of the scaled logits, in float32 inside.

    A padding query, and a query that sees no key, get exactly 0 and `NOTHING_SEEN_LSE`.
    """
    del tables
    if layer is not None:
        k, v = (jax.lax.dynamic_index_in_dim(x, layer, axis=0, keepdims=False) for x in (k, v))
    q, k, v = (x.reshape(*x.shape[:2], -1, shape.head_dim) for x in (q, k, v))
    group = shape.num_heads // shape.num_kv_heads
    if group > 1:  # grouped queries: each key head serves a run of query heads
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))

    # Tags as [b 1 s 1] for queries and [b 1 1 t] for keys, next to logits [b h s t].
    query_tag = query_block[:, None, :, None]
    mask = visible(
        query_tag,
        query_horizon[:, None, :, None],
        key_block[:, None, None, :],
        None if query_segment is None else query_segment[:, None, :, None],
        None if key_segment is None else key_segment[:, None, None, :],
    ) & ~is_padding(query_tag)
    logits = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * shape.scale
    maximum = jnp.where(mask, logits, -jnp.inf).max(axis=-1, keepdims=True)
    # A row that sees nothing has no maximum, and inf - inf would be NaN (in its gradient too).
    shift = jax.lax.stop_gradient(jnp.where(jnp.isneginf(maximum), 0.0, maximum))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits - shift, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    seen = total > 0
    weights = weights / jnp.where(seen, total, 1.0)
    out = jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v).astype(q.dtype)
    lse = jnp.where(seen, jnp.log(jnp.where(seen, total, 1.0)) + shift, NOTHING_SEEN_LSE)
    return out.reshape(*out.shape[:2], -1), lse[..., 0]
