# SPDX-License-Identifier: Apache-2.0
"""Another value for every setting of jax that the package sets to its default."""

import contextlib

import jax
from jax._src import config as jax_config

from sparse_lavida_jax.programs import jax_settings

_OTHERS = {
    "jax_default_prng_impl": "rbg",
    "jax_random_seed_offset": 7,
    "jax_default_matmul_precision": "bfloat16",
    "jax_use_hlo_logistic_lowering": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "warn",  # the suite itself says "raise"
    "jax_legacy_prng_key": "error",
    "jax_explicit_x64_dtypes": "error",
    "jax_embedded_constants_max_bytes": 0,
    "jax_optimization_level": "O0",
    "jax_memory_fitting_level": "O0",
    "jax_exec_time_optimization_effort": -1.0,
    "jax_memory_fitting_effort": -1.0,
    "jax_pgle_profiling_runs": 1,
    "jax_xla_profile_version": 3,
    "jax_no_collectives": frozenset({"x"}),
    "jax_array_garbage_collection_guard": "log",
} | dict.fromkeys((n for n in jax_settings.DEFAULTS if "error_checking" in n), "raise")


def values() -> dict:
    """Returns another value of each setting that this version of jax has."""
    found = {}
    for name, usual in jax_settings.DEFAULTS.items():
        if name not in jax_config.config_states:
            continue
        if isinstance(usual, bool):
            found[name] = not usual
        elif "transfer_guard" in name:
            found[name] = "disallow_explicit"
        else:
            found[name] = jax.devices()[-1] if name == "jax_default_device" else _OTHERS[name]
    return found


@contextlib.contextmanager
def everywhere(**changes):
    """Changes settings in all threads of this process, as `JAX_ENABLE_X64=1` does."""
    before = {name: jax.config.values[name] for name in changes}
    guards = {name: value for name, value in jax.config.values.items() if "transfer_guard" in name}
    try:
        for name, value in changes.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in (before | guards).items():  # one guard sets the others
            jax.config.update(name, value)
