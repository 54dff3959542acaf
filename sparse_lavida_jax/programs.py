# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, kept in a folder between processes."""

import os
import pathlib

import jax

MOST_BYTES = 5 * 2**30  # the oldest programs make way


def usual_folder() -> pathlib.Path:
    """Returns where programs are kept: a folder of the user's cache."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return cache / "sparse-lavida-jax"


def keep(folder: pathlib.Path | str | None = None) -> None:
    """Keeps compiled programs, so that the next process does not compile them again.

    For commands to call: a library changes no setting of its process.

    Args:
        folder: by default that of `JAX_COMPILATION_CACHE_DIR`, otherwise the usual one.
    """
    if folder is None and os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return  # jax knows
    folder = pathlib.Path(folder or usual_folder()).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
