# SPDX-License-Identifier: Apache-2.0
"""The settings of jax that could change a result, set to those of a fresh process.

Other code of the process, or a variable such as `JAX_ENABLE_X64`, may have changed them for its own
computations: ours are the same bits in any case, and find the programs kept by other processes.
docs/api/variables.md lists them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src import config as jax_config  # few settings have a public context manager
from jax._src import mesh as jax_mesh

_OFF = """
    jax_enable_x64 jax_enable_custom_prng jax_threefry_gpu_kernel_lowering jax_disable_jit
    jax_high_dynamic_range_gumbel jax_softmax_custom_jvp jax_accurate_erf_inv check_vma
    eager_constant_folding jax_no_execution jax_no_tracing jax_debug_nans jax_debug_infs
    jax_debug_key_reuse jax_check_tracer_leaks jax_check_static_indices jax_enable_checks jax_scan3
    jax_remat3 jax_custom_vjp3 jax_custom_jvp3 jax_remat_barrier_no_cotangents jax_enable_pgle
    jax_remove_size_one_mesh_axis_from_type jax_use_simplified_jaxpr_constants
    jax_use_emit_pipeline_primitive jax_use_cpp_shard_args jax_mosaic_allow_hlo
    jax_pallas_enable_debug_checks jax_pallas_poison_buffers jax_disallow_mesh_context_manager
    jax_ragged_dot_use_gpu_pallas_triton_lowering
"""
_ON = """
    jax_threefry_partitionable jax_allow_f16_reductions jax_use_direct_linearize jax_auto_pcast
    jax_use_shardy_partitioner jax_use_rgv3 jax_raise_on_ppermute_sort_diff jax_mutable_array_checks
    jax_compiler_enable_remat_pass jax_pallas_use_mosaic_gpu
    jax_ragged_dot_use_ragged_dot_instruction
"""
_ALLOW = """
    jax_numpy_rank_promotion jax_legacy_prng_key jax_transfer_guard_host_to_device
    jax_transfer_guard_device_to_device jax_transfer_guard_device_to_host jax_transfer_guard
    jax_array_garbage_collection_guard
"""
_NONE = "jax_default_device jax_default_matmul_precision jax_use_hlo_logistic_lowering"
_CHECKS = ("nan", "divide", "oob")
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(_ON.split(), True),
    **dict.fromkeys(_ALLOW.split(), "allow"),
    **dict.fromkeys(_NONE.split()),
    **dict.fromkeys((f"jax_error_checking_behavior_{check}" for check in _CHECKS), "ignore"),
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
    "jax_numpy_dtype_promotion": "standard",
    "jax_explicit_x64_dtypes": "warn",
    "jax_embedded_constants_max_bytes": 32,
    "jax_optimization_level": "UNKNOWN",
    "jax_memory_fitting_level": "O2",
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_effort": 0.0,
    "jax_pgle_profiling_runs": 3,
    "jax_xla_profile_version": 0,
    "jax_no_collectives": frozenset(),
}
_CONTEXTS = ("compute_on", "xla_metadata", "pallas_tpu_interpret_mode")


@contextlib.contextmanager
def options() -> Iterator[None]:
    """Sets `DEFAULTS` in this thread; the mesh around it stays. Also as a decorator."""
    states = jax_config.config_states  # of this version: others are left out
    with contextlib.ExitStack() as stack:
        for name, value in DEFAULTS.items():
            if name in states:
                stack.enter_context(states[name](value))
        yield


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    """Sets `DEFAULTS`, no mesh, and numpy's usual handling of errors. Also as a decorator.

    Around everything that computes, and so around the callbacks that it calls.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(None))
        holders = {jax_config.mesh_context_manager: ()}  # of `with mesh:`
        holders |= {getattr(jax_config, f"{name}_context_manager"): None for name in _CONTEXTS}
        for holder, value in holders.items():
            stack.callback(holder.set_local, holder.swap_local(value))
        resources = jax_mesh.thread_resources
        stack.callback(setattr, resources, "env", resources.env)
        resources.env = jax_mesh.EMPTY_ENV
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        stack.enter_context(options())
        yield
