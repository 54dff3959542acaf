# SPDX-License-Identifier: Apache-2.0
"""Sparse-LaViDa in JAX: one masked diffusion model that draws, edits, answers and points."""

__version__ = "0.1.0"
