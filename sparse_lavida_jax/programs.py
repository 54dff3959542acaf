# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, kept in a folder between processes."""

import os
import pathlib

import jax

MOST_BYTES = 5 * 2**30  # the oldest programs make way


def keep() -> None:
    """Keeps compiled programs, so that the next process does not compile them again.

    In `JAX_COMPILATION_CACHE_DIR` if there is one, otherwise in a folder of the user's cache. For
    commands to call: a library changes no setting of its process.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache / "sparse-lavida-jax"))
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
