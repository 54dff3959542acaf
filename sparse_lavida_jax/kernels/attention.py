# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention: the one entry that training, prefill and decoding call."""

import einops
import jax
from jaxtyping import Array, Float, Int

from sparse_lavida_jax.kernels import pallas_tpu
from sparse_lavida_jax.kernels.reference import attention_reference
from sparse_lavida_jax.kernels.tables import Tables, TileSizes
from sparse_lavida_jax.kernels.tables import make_tables as tile_tables
from sparse_lavida_jax.visibility import AnyArray

IMPLEMENTATIONS = ("reference", "pallas_tpu")
QUERY_TILES, KEY_TILES, PARTS = (512, 256), (1024, 512, 256), (256,)


def default_implementation() -> str:
    """Returns what this machine's first device runs fastest."""
    return "pallas_tpu" if jax.default_backend() == "tpu" else "reference"


def tile_sizes(query_len: int, key_len: int) -> TileSizes:
    """Returns the tiles of a call: the largest that fill up its lengths no further than 128 does.

    Lengths that are whole numbers of 1024 get the largest tiles. `PARTS` were chosen so that the
    kernels fit the memory of v5e, v5p and v6e (`tests/tpu_aot`).
    """
    keys = _largest(KEY_TILES, key_len)
    return TileSizes(_largest(QUERY_TILES, query_len), keys, _largest(PARTS, keys))


def _largest(sizes: tuple[int, ...], length: int) -> int:
    filled = -(-length // 128) * 128
    return next((size for size in sizes if filled % size == 0), 128)


def make_tables(
    query_block: Int[AnyArray, "b s"],
    query_horizon: Int[AnyArray, "b s"],
    key_block: Int[AnyArray, "b t"],
    query_segment: Int[Array, "b s"] | None = None,
    key_segment: Int[Array, "b t"] | None = None,
    *,
    implementation: str | None = None,
) -> Tables | None:
    """Returns the tile tables of one set of tags, for all layers; None where none are needed."""
    if (implementation or default_implementation()) == "reference":
        return None
    sizes = tile_sizes(query_block.shape[1], key_block.shape[1])
    return tile_tables(
        query_block, query_horizon, key_block, query_segment, key_segment, sizes=sizes
    )


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
    tables: Tables | None = None,
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
        tables: of `make_tables`, made once a forward pass; made here where there are none.
        implementation: one of `IMPLEMENTATIONS`; by default the best for the platform. A kernel
            asked for elsewhere than on its device is interpreted: right, and slow.
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
    head_dim = q.shape[-1] // num_heads
    logit_scale = head_dim**-0.5 if scale is None else scale
    if (implementation or default_implementation()) == "pallas_tpu":
        shape = pallas_tpu.Shape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=logit_scale,
            sizes=tables.sizes if tables else tile_sizes(q.shape[1], k.shape[-2]),
            interpret=_is_elsewhere("tpu"),
        )
        out, lse = pallas_tpu.attention(
            q, k, v, query_block, query_horizon, key_block, query_segment, key_segment,
            shape=shape, layer=layer, tables=tables,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    if layer is not None:
        k, v = (jax.lax.dynamic_index_in_dim(x, layer, axis=0, keepdims=False) for x in (k, v))

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
        logit_scale,
    )
    out = einops.rearrange(out, "b s h d -> b s (h d)")
    return (out, lse) if return_lse else out


def _is_elsewhere(platform: str) -> bool:
    """Whether programs are compiled for another platform than a kernel's.

    A described topology (`jax.experimental.topologies`) is named by the abstract mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    described = "" if device is None else device.device_kind
    return jax.default_backend() != platform and not described.lower().startswith(platform)
