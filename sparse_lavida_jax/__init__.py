# SPDX-License-Identifier: Apache-2.0
"""Sparse-LaViDa in JAX: one masked diffusion model that draws, edits, answers and points."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_lavida_jax.conversation import Conversation as Conversation
    from sparse_lavida_jax.pipeline import SparseLaViDa as SparseLaViDa

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports the interface when it is first asked for: it takes seconds."""
    if name == "SparseLaViDa":
        from sparse_lavida_jax.pipeline import SparseLaViDa

        return SparseLaViDa
    if name == "Conversation":
        from sparse_lavida_jax.conversation import Conversation

        return Conversation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
