# SPDX-License-Identifier: Apache-2.0
"""Step-causal attention: the entry point for training, prefill and decoding.

`kernels.reference` defines it, with an explicit mask. A kernel is a module with four functions,
which `run_kernel` combines into a differentiable one:

* `laid_out(tags, sizes)` returns the tags in the form that the kernel reads; once for all layers.
* `prepare(q, k, v, sizes)` returns the arrays in this form.
* `forward(q, k, v, layer, tables, shape)` returns the output [b s (h d)] and its log-sum-exp;
  `k` and `v` are stacked, [n b t (h d)], and the tables hold the tags.
* `backward(q, k, v, tables, out, lse, cotangents, shape)` returns the gradients of q, k and v,
  given those of the output and of its log-sum-exp.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from sparse_lavida_jax.kernels import devices, sharded
from sparse_lavida_jax.kernels import tile_lists as tiles
from sparse_lavida_jax.kernels.common import Attended, Shape, Tags
from sparse_lavida_jax.kernels.reference import differentiated_by_head, reference
from sparse_lavida_jax.kernels.sharded import Deal
from sparse_lavida_jax.kernels.tile_lists import GpuTables, Tables
from sparse_lavida_jax.visibility import AnyArray

IMPLEMENTATIONS = ("reference", "blockwise", "pallas_tpu", "pallas_gpu", "pallas_triton")

log = logging.getLogger(__name__)


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
) -> Float[Array, "b s hd"] | Attended:
    """Attends under the step-causal rule of `visibility.visible`; no mask is ever an argument.

    Heads are merged in the last axis, as projections return them and as the cache stores them.
    Queries and keys are already rotated. Under a mesh (`jax.set_mesh`) every device runs its part
    (`kernels.sharded`); the reference is partitioned by the compiler.

    Args:
        k, v: keys and values, or the stacked cache of all layers together with `layer`.
        query_block, query_horizon, key_block: tags (`tags.TokenTags`). Output is exactly 0
            where `query_block` is `PAD_BLOCK`.
        num_kv_heads: of k and v; fewer than `num_heads` for grouped queries.
        query_segment, key_segment: tokens of different segments never see each other. On a GPU
            segments and blocks must then be in 0..2^16 - 2.
        scale: of the logits; 1/sqrt(head width) by default.
        tables: from `make_tables`, made once per forward pass; made here if None.
        implementation: one of `IMPLEMENTATIONS`; by default the best for the platform. A kernel
            that runs on another device than its own is interpreted: correct but slow.
        return_lse: also return the log-sum-exp of the scaled logits, 1e30 where nothing is seen.
        key_deals: how the streams that make up the keys were dealt out to the devices of a mesh;
            empty if they were not.

    Raises:
        ValueError: the implementation is unknown, the width is not a whole number of heads, or a
            stacked cache has no `layer`.
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
    sizes: Any = None,
    gradients: bool = True,
) -> Tables | GpuTables | None:
    """Returns the tile tables of one set of tags, and the tags, for all layers; None if not needed.

    Under a mesh they have an additional first axis, which counts devices (`kernels.sharded`).

    Args:
        head_dim, dtype: of the queries; the choice of implementation depends on them.
        implementation, key_deals: as in the call.
        sizes: of tiles; by default those of the device.
        gradients: whether the tables have the lists for gradients; a pass over a cache needs none.
    """
    lengths = query_block.shape[1], key_block.shape[1]
    chosen = _chosen(implementation, *lengths, head_dim, dtype)
    if chosen == "reference":
        return None
    tags = (query_block, query_horizon, key_block, query_segment, key_segment)
    kernel, _ = _kernel(chosen, dtype, head_dim)

    def make(*tags) -> Tables | GpuTables:
        lengths = tags[0].shape[1], tags[2].shape[1]
        own = sizes or devices.sizes_of(chosen, *lengths, head_dim)
        return _listed(kernel, tags, own, gradients)

    split = sharded.split_of(*query_block.shape)
    return make(*tags) if split is None else sharded.make_tables(make, tags, key_deals, split)


def run_kernel(
    kernel: ModuleType,
    q: Float[Array, "b s hd"],
    k: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    v: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    tags: Tags,
    shape: Shape,
    layer: Int[Array, ""] | int | None = None,
    tables: Tables | GpuTables | None = None,
) -> Attended:
    """Runs a kernel; differentiable in q, k and v, except for a stacked cache.

    Args:
        tables: of the same tags and sizes; made here if None.
    """
    tables = tables or _listed(kernel, tags, shape.sizes)
    length = q.shape[1]
    q, k, v = kernel.prepare(q, k, v, shape.sizes)
    if layer is None:
        # Passed as leaves: the class annotations exclude JAX's gradients of integers.
        leaves, structure = jax.tree.flatten(tables)
        out, lse = _differentiable(kernel, shape, structure, q, k, v, leaves)  # type: ignore
    else:
        out, lse = _forward(kernel, q, k, v, layer, tables, shape)
    return out[:, :length], lse.reshape(*lse.shape[:2], -1)[:, :, :length]


def _listed(kernel: ModuleType, tags: Tags, sizes: Any, gradients: bool = True) -> Any:
    """Returns the tables of a call, with its tags as the kernel reads them."""
    made = tiles.make_tables(*tags, sizes=sizes, gradients=gradients)
    return dataclasses.replace(made, tags=kernel.laid_out(tags, sizes))


# Jitted inside the programs that call them, so that all layers of one form share a kernel: it is
# traced and lowered once for all calls with the same shapes, and compiled once. Otherwise every
# layer's module would have a name of its own. Inside `shard_map` as well, where every device has
# this one module; the loops of `blockwise` are shared in the same way. The reference is not: it has
# no module, and is a part of its layer.


@functools.partial(jax.jit, static_argnums=(0, 6))
def _forward(kernel, q, k, v, layer, tables, shape) -> tuple[Array, Array]:
    return tuple(kernel.forward(q, k, v, layer, tables, shape))


@functools.partial(jax.jit, static_argnums=(0, 8))
def _backward(kernel, q, k, v, tables, out, lse, cotangents, shape) -> tuple[Array, Array, Array]:
    return tuple(kernel.backward(q, k, v, tables, out, lse, cotangents, shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(kernel, shape, structure, q, k, v, leaves) -> tuple[Array, Array]:
    tables = jax.tree.unflatten(structure, leaves)
    return _forward(kernel, q, k[None], v[None], 0, tables, shape)


def _run_and_save(kernel, shape, structure, q, k, v, leaves):
    out, lse = _differentiable(kernel, shape, structure, q, k, v, leaves)  # type: ignore
    # Named, so that a rematerialisation policy can keep them instead of rerunning the kernel.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, leaves, out, lse)


def _gradients(kernel, shape, structure, saved, cotangents):
    q, k, v, leaves, out, lse = saved
    tables = jax.tree.unflatten(structure, leaves)
    return (*_backward(kernel, q, k, v, tables, out, lse, cotangents, shape), None)


_differentiable.defvjp(_run_and_save, _gradients)


# ---------------------------------------------------------------------------------------------
# The choice of an implementation.


def admit_kernel(
    head_dim: int, dtype: DTypeLike, implementation: str | None, *, gradients: bool = False
) -> None:
    """Checks the kernel of this machine's accelerator before this process first uses the device.

    Runs once per device, jax version and code (`kernels.admission`). Does nothing on a CPU, for a
    model that names its implementation, and for one whose heads no kernel of these devices takes.

    Args:
        head_dim, dtype, implementation: of the model (`implementation_for`).
        gradients: whether they are checked too, for training.
    """
    accelerators = devices.accelerators()
    gpus = all(number.startswith(devices.NVIDIA) for number in accelerators)
    taken = not gpus or any(takes(kernel, dtype, head_dim) for kernel in devices.OF_GPUS)
    if accelerators and taken and not implementation:
        from sparse_lavida_jax.kernels import admission  # the CPU does without

        admission.admitted(accelerators, gradients)


def device_kernel() -> str | None:
    """Returns the kernel for this machine's first device, admitted or not; None if it has none."""
    platform = jax.default_backend()
    if platform != "gpu":
        return "pallas_tpu" if platform == "tpu" else None
    capability = _capability()
    if capability.startswith(devices.HOPPER) and _has_mosaic_gpu():
        return "pallas_gpu"
    major = capability.partition(".")[0]  # not a number for another vendor's GPU
    known = major.isdigit() and int(major) >= devices.AMPERE
    return "pallas_triton" if known and _has_triton() else None


def default_implementation() -> str:
    """Returns the attention implementation for this machine's first device.

    This is its kernel, if admitted, or the next one in line; a warning is logged if it is not its
    first. Calls a GPU's kernel does not take, and small calls, may get another one (`make_tables`).
    """
    return _default()[0]


@functools.cache
def _default() -> tuple[str, str]:
    """Returns `default_implementation`, and why it is not the device's first kernel."""
    kernel = device_kernel()
    if kernel is None:
        if jax.default_backend() != "gpu":
            return "reference", ""
        why = f"jax {jax.__version__} has none for compute capability {_capability()}"
    else:
        from sparse_lavida_jax.kernels import admission  # the CPU does without

        kind = jax.devices()[0].device_kind
        kernel, why = admission.chosen(kernel, kind, devices.accelerators())
    if kernel and why:
        log.warning("attention runs with %s: %s.", kernel, why)
    return kernel or "blockwise", why


def implementation_for(head_dim: int, dtype: DTypeLike, implementation: str | None = None) -> str:
    """Returns the implementation for long calls of this type: the given one, or the best."""
    if implementation is not None:
        return implementation
    # A kernel that does not take such calls need not have been admitted.
    return default_implementation() if _is_taken(head_dim, dtype) else "blockwise"


def _is_taken(head_dim: int, dtype: DTypeLike) -> bool:
    """Whether the device's kernel, if it has one, takes this type and head size."""
    kernel = device_kernel()
    return kernel is None or takes(kernel, dtype, head_dim)


def takes(implementation: str, dtype: DTypeLike, head_dim: int) -> bool:
    """Whether an implementation takes this type and head size; those of GPUs take only some."""
    fits = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and head_dim in (64, 128)
    return implementation not in devices.OF_GPUS or fits


def default_step_implementation() -> str:
    """Returns what computes a decoding step between its products (`kernels.step_gpu`).

    That is "pallas_gpu" where attention is, if the kernels for it were admitted too, else "plain".
    """
    if default_implementation() != "pallas_gpu":
        return "plain"
    from sparse_lavida_jax.kernels import admission  # the CPU does without

    verdict = admission.admitted(devices.accelerators())
    if verdict is not None and verdict.admits_step:
        return "pallas_gpu"
    why = verdict.step_why if verdict is not None else ""
    _announce_plain_steps(why or "they were never checked on this device")
    return "plain"


def step_kernels() -> ModuleType:
    """Returns the module `step_gpu`.

    Raises:
        ValueError: this version of jax cannot import it.
    """
    if not _has_mosaic_gpu():
        raise ValueError(
            f"step_implementation='pallas_gpu' needs jax 0.11, this is jax {jax.__version__}: use"
            " 'plain', or ''."
        )
    from sparse_lavida_jax.kernels import step_gpu

    return step_gpu


@functools.cache
def _announce_plain_steps(why: str) -> None:
    log.warning("decoding steps run without the kernels between their products: %s.", why)


def runs_here(implementation: str) -> bool:
    """Whether an implementation runs on this device, uninterpreted and admitted."""
    portable = implementation in ("reference", "blockwise")
    return portable or implementation == default_implementation()


def takes_tables(implementation: str | None = None) -> bool:
    """Whether attention runs over listed tiles; under a mesh each device has its own."""
    return (implementation or default_implementation()) != "reference"


def slot_multiple(implementation: str | None = None) -> int:
    """Returns the multiple to which cache slots are padded; else a kernel would copy the cache."""
    chosen = implementation or default_implementation()
    if chosen in devices.OF_GPUS:
        return tiles.GPU_ROWS
    return devices.SLOTS if chosen == "pallas_tpu" else 1


def query_multiple(implementation: str) -> int:
    """Returns the multiple to which steps are padded; else every layer would pad its queries."""
    return 8 if implementation == "pallas_gpu" else 1


def query_tile(length: int, implementation: str | None = None) -> int:
    """Returns the queries per tile for a call with `length` queries."""
    return devices.sizes_of(implementation or default_implementation(), length, length).queries


def mesh_in_use(params: PyTree) -> contextlib.AbstractContextManager:
    """Returns a context that sets the mesh of the parameters, if they have one.

    Without it a kernel is not split over the mesh, and the compiler cannot split it.
    """
    mesh = mesh_of(params)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def mesh_of(params: PyTree) -> Mesh | None:
    """Returns the mesh that parameters are split over; None for a single device."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            if isinstance(mesh, Mesh) and mesh.size > 1:
                return mesh
    return None


def _capability() -> str:
    return getattr(jax.devices()[0], "compute_capability", "0.0")


def _has_mosaic_gpu() -> bool:
    return jax.__version_info__ >= (0, 11)


def _has_triton() -> bool:
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


@functools.cache
def _announce(why: str) -> None:
    """Logs once that there is no kernel."""
    log.warning("attention runs without a kernel, in blocks of tokens, and slower: %s.", why)


def _chosen(
    implementation: str | None, query_len: int, key_len: int, head_dim: int, dtype: DTypeLike
) -> str:
    """Returns the implementation of a call: the given one, or the best for its sizes."""
    best = implementation_for(head_dim, dtype, implementation)
    if implementation is not None or best != "blockwise":
        return best
    on_gpu = jax.default_backend() == "gpu"
    if query_len * key_len <= (devices.FEW_PAIRS_OF_GPU if on_gpu else devices.FEW_PAIRS):
        return "reference"
    untaken = f"the GPU kernel takes no {jnp.dtype(dtype)} with {head_dim=}"
    _announce(_default()[1] if _is_taken(head_dim, dtype) else untaken)
    return best


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
    chosen: str, head_dim: int, scale: float, q, k, v, tags: Tags, heads: tuple[int, int], layer,
    tables: Tables | GpuTables | None,
) -> Attended:  # fmt: skip
    """Runs an implementation on one device."""
    if chosen == "reference":
        shape = Shape(*heads, head_dim, scale)
        alone = sharded.split_of(*q.shape[:2]) is None  # the compiler splits heads over a mesh
        if layer is None and alone and devices.device_kind() == "cpu":
            return differentiated_by_head(q, k, v, tags, shape)
        return reference(q, k, v, tags, shape, layer)
    if isinstance(tables, GpuTables) and chosen not in devices.OF_GPUS:
        raise ValueError(
            f"the tables are of a GPU kernel, which takes no {q.dtype} with {head_dim=}: give"
            " make_tables dtype and head_dim of the queries, and the same implementation."
        )
    lengths = q.shape[1], k.shape[-2]
    sizes = tables.sizes if tables else devices.sizes_of(chosen, *lengths, head_dim)
    kernel, interpret = _kernel(chosen, q.dtype, head_dim)
    shared = chosen == "pallas_gpu" and layer is not None
    splits = devices.splits_of(heads[0], *lengths) if shared else 1
    shape = Shape(*heads, head_dim, scale, sizes, interpret, splits)
    return run_kernel(kernel, q, k, v, tags, shape, layer, tables)


def _kernel(chosen: str, dtype: DTypeLike, head_dim: int) -> tuple[ModuleType, Any]:
    """Returns the module that computes a call, and how it is interpreted (False: not)."""
    if chosen == "blockwise":
        from sparse_lavida_jax.kernels import blockwise

        return blockwise, False
    if chosen == "pallas_tpu":
        from sparse_lavida_jax.kernels import pallas_tpu

        return pallas_tpu, _is_elsewhere("tpu", "tpu")
    if chosen == "pallas_gpu" and not _has_mosaic_gpu():
        raise ValueError(
            f"{chosen} needs jax 0.11, this is jax {jax.__version__}: use 'pallas_triton', or None."
        )
    if not takes(chosen, dtype, head_dim):
        raise ValueError(
            f"{chosen} takes bfloat16 or float16 and heads of 64 or 128, got {dtype} and"
            f" {head_dim=}: use implementation='blockwise', or None."
        )
    # Some versions of jax cannot import one or the other.
    if chosen == "pallas_triton":
        from sparse_lavida_jax.kernels import pallas_triton

        return pallas_triton, _is_elsewhere("gpu", "nvidia")
    from sparse_lavida_jax.kernels import pallas_gpu

    return pallas_gpu, interpreted_elsewhere()


def interpreted_elsewhere() -> Any:
    """Returns how Mosaic kernels are interpreted (`Shape.interpret`): False on an NVIDIA GPU."""
    from sparse_lavida_jax.kernels import pallas_gpu

    return _is_elsewhere("gpu", "nvidia") and pallas_gpu.interpreted()


def _is_elsewhere(platform: str, vendor: str) -> bool:
    """Whether programs are compiled for a platform other than the kernel's."""
    kind = devices.device_kind().lower()
    return jax.default_backend() != platform and not kind.startswith(vendor)
