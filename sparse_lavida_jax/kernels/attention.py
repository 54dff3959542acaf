# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention: the one entry that training, prefill and decoding call."""

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from sparse_lavida_jax.kernels import blockwise, devices, pallas_tpu, reference, sharded
from sparse_lavida_jax.kernels.common import Shape, Tags
from sparse_lavida_jax.kernels.sharded import Deal
from sparse_lavida_jax.kernels.tables import GPU_ROWS, GpuSizes, GpuTables, Tables, TileSizes
from sparse_lavida_jax.kernels.tables import make_tables as tile_tables
from sparse_lavida_jax.visibility import AnyArray

IMPLEMENTATIONS = ("reference", "blockwise", "pallas_tpu", "pallas_gpu")
KERNELS = ("pallas_tpu", "pallas_gpu")

log = logging.getLogger(__name__)


@functools.cache
def default_implementation() -> str:
    """Returns what this machine's first device runs fastest; says so where that is no kernel.

    A call that the GPU's kernel does not take, or a small one, may get another (`make_tables`).
    """
    platform = jax.default_backend()
    if platform == "tpu":
        return "pallas_tpu"
    if platform == "gpu":
        if (lacks := _lacks_for_gpu()) is None:
            return "pallas_gpu"
        _announce(lacks)
        return "blockwise"
    return "reference"


def _lacks_for_gpu() -> str | None:
    """Returns why the GPU kernel cannot run here, or None."""
    if not _has_mosaic_gpu():
        return f"the GPU kernel needs jax 0.11 (Python 3.12), this is jax {jax.__version__}"
    capability = getattr(jax.devices()[0], "compute_capability", "0.0")
    if not capability.startswith(devices.HOPPER):
        return f"the GPU kernel is for Hopper (9.0), this GPU has compute capability {capability}"
    return None


def _has_mosaic_gpu() -> bool:
    return jax.__version_info__ >= (0, 11)


def _fits_gpu(dtype: DTypeLike, head_dim: int) -> bool:
    """Whether wgmma takes these numbers."""
    return dtype in (jnp.bfloat16, jnp.float16) and head_dim in (64, 128)


@functools.cache
def _announce(why: str) -> None:
    """Says once that there is no kernel."""
    log.warning("attention runs without a kernel, in blocks of tokens, and slower: %s.", why)


def _chosen(
    implementation: str | None, query_len: int, key_len: int, head_dim: int, dtype: DTypeLike
) -> str:
    """Returns what computes a call: what was asked for, or the best for its numbers."""
    if implementation is not None:
        return implementation
    best = default_implementation()
    if best == "pallas_gpu" and not _fits_gpu(dtype, head_dim):
        _announce(f"the GPU kernel takes no {jnp.dtype(dtype)} with {head_dim=}")
        best = "blockwise"
    if best == "blockwise" and query_len * key_len <= devices.FEW_PAIRS:
        return "reference"
    return best


def takes_tables(implementation: str | None = None) -> bool:
    """Whether attention runs over listed tiles, under a mesh on each device its own."""
    return (implementation or default_implementation()) != "reference"


def slot_multiple(implementation: str | None = None) -> int:
    """Returns what the slots of a cache are a multiple of: a kernel would copy it to fill it up."""
    chosen = implementation or default_implementation()
    return {"pallas_tpu": devices.SLOTS, "pallas_gpu": GPU_ROWS}.get(chosen, 1)


def query_tile(length: int, implementation: str | None = None) -> int:
    """Returns the queries of a tile, of a call of so many."""
    chosen = implementation or default_implementation()
    if chosen == "pallas_gpu":
        return GPU_ROWS
    return (devices.blockwise_sizes if chosen == "blockwise" else devices.rule)(
        length, length
    ).queries


def make_tables(
    query_block: Int[AnyArray, "b s"],
    query_horizon: Int[AnyArray, "b s"],
    key_block: Int[AnyArray, "b t"],
    query_segment: Int[AnyArray, "b s"] | None = None,
    key_segment: Int[AnyArray, "b t"] | None = None,
    *,
    head_dim: int = devices.RELEASE_HEAD_DIM,
    dtype: DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
    key_deals: Sequence[Deal] = (),
) -> Tables | GpuTables | None:
    """Returns the tile tables of one set of tags, for all layers; None where none are needed.

    Under a mesh they have another first axis, which counts devices (`kernels.sharded`).

    Args:
        head_dim, dtype: of the queries, by which the call chooses too.
        implementation, key_deals: of the call.
    """
    lengths = query_block.shape[1], key_block.shape[1]
    chosen = _chosen(implementation, *lengths, head_dim, dtype)
    if chosen == "reference":
        return None
    tags = (query_block, query_horizon, key_block, query_segment, key_segment)

    def make(*tags) -> Tables | GpuTables:
        lengths = tags[0].shape[1], tags[2].shape[1]
        return tile_tables(*tags, sizes=_sizes(chosen, *lengths, head_dim))

    split = sharded.split_of(*query_block.shape)
    return make(*tags) if split is None else sharded.make_tables(make, tags, key_deals, split)


def _sizes(chosen: str, query_len: int, key_len: int, head_dim: int) -> TileSizes | GpuSizes:
    if chosen == "blockwise":
        return devices.blockwise_sizes(query_len, key_len)
    measured = devices.gpu_sizes if chosen == "pallas_gpu" else devices.tile_sizes
    return measured(query_len, key_len, head_dim)


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
    query_segment: Int[AnyArray, "b s"] | None = None,
    key_segment: Int[AnyArray, "b t"] | None = None,
    scale: float | None = None,
    tables: Tables | GpuTables | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
    key_deals: Sequence[Deal] = (),
) -> Float[Array, "b s hd"] | tuple[Float[Array, "b s hd"], Float[Array, "b h s"]]:
    """Attends under the step-causal rule of `visibility.visible`; no mask is ever an argument.

    Heads are merged in the last axis, the layout in which a projection leaves them and in which
    the cache holds them. Queries and keys are already rotated. Under a mesh (`jax.set_mesh`) every
    device runs its part (`kernels.sharded`); the reference the compiler partitions.

    Args:
        k, v: keys and values, or the stacked cache of all layers together with `layer`.
        query_block, query_horizon, key_block: tags (`layout.TokenLayout`). Output is exactly 0
            where `query_block` is `PAD_BLOCK`.
        num_kv_heads: heads of k and v; fewer than `num_heads` for grouped queries.
        query_segment, key_segment: tokens of different segments never see each other. On a GPU
            segments and blocks are then counted from 0 and below 2^16 - 1.
        scale: of the logits; 1/sqrt(head width) by default.
        tables: of `make_tables`, made once a forward pass; made here where there are none.
        implementation: one of `IMPLEMENTATIONS`; by default the best for the platform. A kernel
            asked for elsewhere than on its device is interpreted: right, and slow.
        return_lse: also return the log-sum-exp of the scaled logits, 1e30 where nothing is seen.
        key_deals: how the streams that were joined to the keys were dealt out to the devices of a
            mesh; none if they were not.

    Raises:
        ValueError: an unknown implementation, a width that is not a whole number of heads, or a
            stacked cache without `layer`.
    """
    num_kv_heads = num_kv_heads or num_heads
    _check_call(q, k, num_heads, num_kv_heads, layer, implementation)
    if (query_segment is None) != (key_segment is None):
        raise ValueError("query_segment and key_segment go together: give both or neither.")
    head_dim = q.shape[-1] // num_heads
    logit_scale = head_dim**-0.5 if scale is None else scale
    tags = (query_block, query_horizon, key_block, query_segment, key_segment)
    chosen = _chosen(implementation, q.shape[1], k.shape[-2], head_dim, q.dtype)
    run = functools.partial(_run, chosen, head_dim, logit_scale)
    heads = (num_heads, num_kv_heads)
    over = None if chosen == "reference" else sharded.split_of(*q.shape[:2])
    if over is None:
        out, lse = run(q, k, v, tags, heads, layer, tables)
    else:
        out, lse = sharded.attend(run, q, k, v, tags, heads, layer, tables, key_deals, over)
    return (out, lse) if return_lse else out


def _check_call(q, k, num_heads: int, num_kv_heads: int, layer, implementation) -> None:
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


def _run(
    chosen: str,
    head_dim: int,
    scale: float,
    q: Float[Array, "b s hd"],
    k: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    v: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    tags: Tags,
    heads: tuple[int, int],
    layer: Int[Array, ""] | int | None,
    tables: Tables | GpuTables | None,
) -> tuple[Float[Array, "b s hd"], Float[Array, "b h s"]]:
    """Runs an implementation on one device."""
    if chosen == "reference":
        return reference.attention(
            q, k, v, *tags, shape=Shape(*heads, head_dim, scale), layer=layer
        )
    if isinstance(tables, GpuTables) and chosen != "pallas_gpu":
        raise ValueError(
            f"the tables are of the GPU kernel, which takes no {q.dtype} with {head_dim=}: give"
            " make_tables dtype and head_dim of the queries, and the same implementation."
        )
    sizes = tables.sizes if tables else _sizes(chosen, q.shape[1], k.shape[-2], head_dim)
    asked = (*heads, head_dim, scale, sizes)
    if chosen == "pallas_gpu":
        pallas_gpu = _gpu_kernel(q.dtype, head_dim)
        interpret = pallas_gpu.interpreted() if _is_elsewhere("gpu", "nvidia") else False
        attend, shape = pallas_gpu.attention, pallas_gpu.GpuShape(*asked, interpret)
    elif chosen == "pallas_tpu":
        attend, shape = pallas_tpu.attention, pallas_tpu.TpuShape(*asked, _is_elsewhere("tpu"))
    else:
        attend, shape = blockwise.attention, blockwise.BlockShape(*asked)
    return attend(q, k, v, *tags, shape=shape, layer=layer, tables=tables)


def _gpu_kernel(dtype: DTypeLike, head_dim: int):
    """Returns the module of the GPU kernel, which older versions of jax cannot import."""
    if not _has_mosaic_gpu():
        raise ValueError(f"the GPU kernel needs jax 0.11, this is jax {jax.__version__}.")
    if not _fits_gpu(dtype, head_dim):
        raise ValueError(
            f"the GPU kernel takes bfloat16 or float16 and heads of 64 or 128, got {dtype} and"
            f" {head_dim=}: use implementation='blockwise', or None."
        )
    from sparse_lavida_jax.kernels import pallas_gpu

    return pallas_gpu


def _is_elsewhere(platform: str, vendor: str = "") -> bool:
    """Whether programs are compiled for another platform than a kernel's."""
    return jax.default_backend() != platform and not devices.device_kind().lower().startswith(
        vendor or platform
    )
