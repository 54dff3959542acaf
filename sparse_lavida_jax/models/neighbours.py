# SPDX-License-Identifier: Apache-2.0
"""Heads that start by attending to a neighbour: only initial values, no operation of their own.

Before a masked word can find something in an image, it has to gather from its neighbouring words
what it is about (the box before a name, the colour before a shape). Small models learn this first
step very late by themselves. Ours; the release has nothing like it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from sparse_lavida_jax import config

LOGIT = 8.0  # of the neighbour itself; all other words get less
ROTATIONS = 3  # the fastest in a head, which distinguish a neighbour from the words around it
NOISE = 0.1  # the share of a random head that is added


def shared_direction(width: int, key: PRNGKeyArray) -> Float[Array, " e"]:
    """Returns a unit vector that all word embeddings will share."""
    direction = jax.random.normal(key, (width,))
    return direction / jnp.linalg.norm(direction)


def with_direction(
    words: Float[Array, "n e"], direction: Float[Array, " e"]
) -> Float[Array, "n e"]:
    """Returns embeddings of the same size with half their square along a direction."""
    across = words - jnp.outer(words @ direction, direction)
    return (across + words.shape[1] ** 0.5 * direction[None]) * 0.5**0.5


def neighbour_kernels(
    direction: Float[Array, " e"], settings: config.Model
) -> tuple[Float[Array, "e hd"], Float[Array, "e hd"]]:
    """Returns matrices for queries and keys, one head per entry in `settings.neighbour_heads`.

    A token with the shared direction attends to the token at the given offset, whatever that is: q
    is the same for all words, and so is k, rotated by the offset.
    """
    offsets = jnp.array(settings.neighbour_heads)[:, None]
    half = settings.head_dim // 2
    fast = min(ROTATIONS, half)
    angle = settings.rope_theta ** (-jnp.arange(fast) / half)[None] * offsets
    query = jnp.concatenate([jnp.ones_like(angle), jnp.zeros_like(angle)])
    key = jnp.concatenate([jnp.cos(angle), -jnp.sin(angle)])

    def kernel(rotated: Float[Array, "n2 f"]) -> Float[Array, "e hd"]:
        """Writes a vector into the first rotations of each head, its halves one after the other."""
        first, second = jnp.pad(rotated, ((0, 0), (0, half - fast))).reshape(2, len(offsets), half)
        heads = jnp.concatenate([first, second], axis=1).reshape(-1)
        size = (LOGIT / fast * settings.head_dim**0.5) ** 0.5
        of_a_word = direction * (settings.width / 2) ** 0.5  # its component in a normed word
        return size * jnp.outer(of_a_word / (of_a_word @ of_a_word), heads)

    return kernel(query), kernel(key)
