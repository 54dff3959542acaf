# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention: the one entry that training, prefill and decoding call."""

import einops
import jax
from jaxtyping import Array, Float, Int, PyTree

from sparse_lavida_jax.kernels.reference import attention_reference
from sparse_lavida_jax.visibility import AnyArray

IMPLEMENTATIONS = ("reference",)


def step_causal_attention(
    q: Float[Array, "b s hd"],
    k: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    v: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    query_block: Int[AnyArray, "b s"],
    query_horizon: Int[AnyArray, "b s"],
    key_block: Int[AnyArray, "b t"],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    layer: Int[Array, ""] | int | None = None,
    query_segment: Int[Array, "b s"] | None = None,
    key_segment: Int[Array, "b t"] | None = None,
    scale: float | None = None,
    tables: PyTree | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Float[Array, "b s hd"] | tuple[Float[Array, "b s hd"], Float[Array, "b h s"]]:
    """Attends under the step-causal rule of `visibility.visible`; no mask is ever an argument.

    Heads are merged in the last axis, the layout in which a projection leaves them and in which
    the cache holds them. Queries and keys are already rotated.

    Args:
        k, v: keys and values, or the stacked cache of all layers together with `layer`.
        query_block, query_horizon, key_block: tags (`layout.TokenLayout`). Output is exactly 0
            where `query_block` is `PAD_BLOCK`.
        num_kv_heads: heads of k and v; fewer than `num_heads` for grouped queries.
        query_segment, key_segment: tokens of different segments never see each other.
        scale: of the logits; 1/sqrt(head width) by default.
        tables: tile tables of a kernel, made once a forward pass; the reference needs none.
        implementation: one of `IMPLEMENTATIONS`; by default the best for the platform.
        return_lse: also return the log-sum-exp of the scaled logits, 1e30 where nothing is seen.

    Raises:
        ValueError: an unknown implementation, a width that is not a whole number of heads, or a
            stacked cache without `layer`.
    """
    num_kv_heads = num_kv_heads or num_heads
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"{implementation=} is unknown: choose one of {', '.join(IMPLEMENTATIONS)}, or None."
        )
    if q.shape[-1] % num_heads or k.shape[-1] % num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"widths {q.shape[-1]} of q and {k.shape[-1]} of k do not split into {num_heads=} and"
            f" {num_kv_heads=}; heads are merged in the last axis."
        )
    if (k.ndim == 4) != (layer is not None):
        raise ValueError(
            f"k has shape {k.shape} and {layer=}: a stacked cache [n b t (h d)] needs `layer`, one"
            " layer's keys [b t (h d)] take none."
        )
    if (query_segment is None) != (key_segment is None):
        raise ValueError("query_segment and key_segment go together: give both or neither.")
    if layer is not None:
        k, v = (jax.lax.dynamic_index_in_dim(x, layer, axis=0, keepdims=False) for x in (k, v))
    del tables

    def split(x, heads):
        return einops.rearrange(x, "b t (h d) -> b t h d", h=heads)

    out, lse = attention_reference(
        split(q, num_heads),
        split(k, num_kv_heads),
        split(v, num_kv_heads),
        query_block,
        query_horizon,
        key_block,
        query_segment,
        key_segment,
        scale if scale is not None else (q.shape[-1] // num_heads) ** -0.5,
    )
    out = einops.rearrange(out, "b s h d -> b s (h d)")
    return (out, lse) if return_lse else out
