# SPDX-License-Identifier: Apache-2.0
"""Sparse-LaViDa in JAX: one masked diffusion model that draws, edits, answers and points."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_lavida_jax.conversation import Conversation as Conversation
    from sparse_lavida_jax.inference.requests import Request as Request
    from sparse_lavida_jax.integrations.diffusers_pipeline import (
        SparseLaViDaPipeline as SparseLaViDaPipeline,
    )
    from sparse_lavida_jax.pipeline import SparseLaViDa as SparseLaViDa

OLDEST_JAX = (0, 10, 2)

try:
    __version__ = importlib.metadata.version("sparse-lavida-jax")
except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
    __version__ = "0+unknown"


def _check_jax() -> None:
    """Refuses a jax that is too old, such as one preinstalled in a notebook."""
    needed = ".".join(map(str, OLDEST_JAX))
    try:
        found = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        found = ""
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdecimal())
    if numbers < OLDEST_JAX:
        raise ImportError(
            f"sparse_lavida_jax needs jax {needed} or later, and"
            f" {f'this is jax {found}' if found else 'there is none'}:"
            f" pip install -U 'jax>={needed}' (jax[cuda13] for a GPU, jax[tpu] for a TPU)."
        )


_check_jax()

# Public names and their modules.
PUBLIC = {
    "Conversation": "conversation",
    "Request": "inference.requests",
    "SparseLaViDa": "pipeline",
    "SparseLaViDaPipeline": "integrations.diffusers_pipeline",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, since importing takes seconds."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{PUBLIC[name]}"), name)
