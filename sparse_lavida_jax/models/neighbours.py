# SPDX-License-Identifier: Apache-2.0
"""Heads that start out looking at a neighbour: initial values, and no operation of their own.

A masked word has to gather from the words next to it what it is about (the box before a name, the
colour before a shape) before it can look for that in an image. Small models find this first hop
very late by themselves. Ours; the release has nothing of the kind.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from sparse_lavida_jax import config

LOGIT = 8.0  # of the neighbour itself, where all other words have less
ROTATIONS = 3  # the fastest of a head, which tell a neighbour from the words around it
NOISE = 0.1  # how much of a random head is added


def shared_direction(width: int, key: PRNGKeyArray) -> Float[Array, " e"]:
    """Returns a unit vector that all words will have a part of."""
    direction = jax.random.normal(key, (width,))
    return direction / jnp.linalg.norm(direction)


def with_direction(
    words: Float[Array, "n e"], direction: Float[Array, " e"]
) -> Float[Array, "n e"]:
    """Returns embeddings of which half the square is along a direction, of the size they had."""
    across = words - jnp.outer(words @ direction, direction)
    return (across + words.shape[1] ** 0.5 * direction[None]) * 0.5**0.5


def neighbour_kernels(
    direction: Float[Array, " e"], settings: config.Model
) -> tuple[Float[Array, "e hd"], Float[Array, "e hd"]]:
    """Returns matrices of queries and keys, a head for each of `settings.neighbour_heads`.

    A token that has the direction as half of it looks for the one so many positions after it,
    whatever stands there: q is the same for all words, and so is k, turned by the offset.
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
        of_a_word = direction * (settings.width / 2) ** 0.5  # what a normed word has of it
        return size * jnp.outer(of_a_word / (of_a_word @ of_a_word), heads)

    return kernel(query), kernel(key)
