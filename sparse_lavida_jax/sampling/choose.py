# SPDX-License-Identifier: Apache-2.0
"""What a step may draw, how sure it is of what it drew, and how much of that it commits.

Pure functions on arrays, in the words of the released samplers (spec Sec. 6 and 7.2). A
candidate is a code, or a whole token where all its codes are committed together: the axis `u`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

LEAST_PROBABILITY = 1e-20  # below it, "confidence" orders do not tell probabilities apart
TINY = 1e-10  # keeps p log p finite at p = 0

# Chooses candidates to commit: (confidence, whether it is a candidate, how many) -> choice.
Policy = Callable[
    [Float[Array, "b w u"], Bool[Array, "b w u"], Int[Array, " b"]], Bool[Array, "b w u"]
]


# ---------------------------------------------------------------------------------------------
# What may be drawn.


def gumbel(uniform: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Returns Gumbel noise -log(-log u) of uniform numbers, float64, on the host.

    The released text sampler takes the argmax of exp(logit) / (-log u)^T: the same choice as the
    argmax of logit / T + this noise.
    """
    return -np.log(-np.log(np.maximum(uniform.astype(np.float64), LEAST_PROBABILITY)))


def filtered(logits: Float[Array, "*b c"], top_k: int, top_p: float) -> Float[Array, "*b c"]:
    """Returns logits with -inf for what may not be drawn.

    Args:
        top_k: how many of the most probable may be; 0: all.
        top_p: of those, only the fewest that hold at least this probability; 1: all.
    """
    if top_k and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p < 1:
        ranked = -jnp.sort(-logits, axis=-1)
        probability = jax.nn.softmax(ranked, axis=-1)
        # Kept while those before it hold less: the most probable one always is.
        kept = jnp.cumsum(probability, axis=-1) - probability <= top_p
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


# ---------------------------------------------------------------------------------------------
# How sure a step is.


def confidence(
    name: str, logits: Float[Array, "b w g v"], drawn: Int[Array, "b w g"]
) -> Float[Array, "b w g"]:
    """Returns how sure the model is of each code; more is surer.

    Args:
        name: "probability" of what was drawn; "margin" between the two most probable; "entropy",
            its negative. All of the softmax of `logits`, whatever the temperature of the draw.
        logits: with -inf for what may not be drawn.
    """
    log_probability = jax.nn.log_softmax(logits, axis=-1)
    if name == "margin":
        first, second = jnp.moveaxis(jnp.exp(jax.lax.top_k(log_probability, 2)[0]), -1, 0)
        return first - second
    if name == "entropy":
        probability = jnp.exp(log_probability)
        return jnp.sum(probability * jnp.log(probability + TINY), axis=-1)
    return jnp.exp(jnp.take_along_axis(log_probability, drawn[..., None], axis=-1)[..., 0])


def with_noise(
    confidence: Float[Array, "b w u"],
    noise: Float[Array, "b w u"],
    scale: Float[Array, ""],
) -> Float[Array, "b w u"]:
    """Returns log confidence plus scaled Gumbel noise (the released "mmada", spec Sec. 7.2)."""
    return jnp.log(jnp.maximum(confidence, LEAST_PROBABILITY)) + scale * noise


# ---------------------------------------------------------------------------------------------
# How much it commits.


def commit_all(confidence, candidate, count):
    """The plan chose the candidates before the forward pass."""
    del confidence, count
    return candidate


def commit_most_confident(confidence, candidate, count):
    """Commits the `count` surest candidates of each row; of equals, the first."""
    return candidate & (_rank(confidence, candidate) < count[:, None, None])


def commit_above(confidence, candidate, count, *, threshold: float):
    """Commits what is at least as sure as `threshold`, and the surest candidate anyway."""
    del count
    return candidate & ((confidence >= threshold) | (_rank(confidence, candidate) == 0))


def commit_by_factor(confidence, candidate, count, *, factor: float, released: bool = False):
    """Commits the surest n, as many as stay above 1 - factor / (n + 1) (Fast-dLLM).

    The surest one always is.

    Args:
        released: if only the least sure one falls short, it is committed all the same. It saves a
            pass for one token, and commits the last two together however unsure they are.
    """
    del count
    rank = _rank(confidence, candidate)
    falls_short = candidate & (confidence < 1 - factor / (rank + 2)) & (rank > 0)
    number = jnp.sum(candidate, axis=(1, 2), keepdims=True)
    first = jnp.min(jnp.where(falls_short, rank, number), axis=(1, 2), keepdims=True)
    if released:
        first = jnp.where(first == number - 1, number, first)
    return candidate & (rank < first)


def commit_within_entropy(confidence, candidate, count, *, bound: float):
    """Commits the candidates of least entropy, the first one and as many as keep the bound.

    The entropies of all committed but the largest sum up to at most `bound`: what decoding them
    together, independently of each other, can at most lose (Ben-Hamu et al. 2025,
    arXiv:2505.24857).

    Args:
        confidence: negative entropies, nats.
        bound: nats.
    """
    del count
    flat = jnp.where(candidate, -confidence, jnp.inf).reshape(confidence.shape[0], -1)
    ascending = jnp.sort(flat, axis=-1)  # what is no candidate comes last
    entropy = jnp.where(jnp.isinf(ascending), 0, ascending)
    within = jnp.cumsum(entropy, axis=-1) - entropy <= bound
    number = jnp.sum(within & ~jnp.isinf(ascending), axis=-1)
    return candidate & (_rank(confidence, candidate) < number[:, None, None])


def at_most(policy: Policy, most: int) -> Policy:
    """Returns the policy that commits the `most` surest of what `policy` commits."""

    def capped(confidence, candidate, count):
        chosen = policy(confidence, candidate, count)
        return chosen & (_rank(confidence, chosen) < most)

    return capped


def _rank(
    confidence: Float[Array, "b w u"], candidate: Bool[Array, "b w u"]
) -> Int[Array, "b w u"]:
    """Returns how many candidates of the row are surer; what is none comes last."""
    flat = jnp.where(candidate, confidence, -jnp.inf).reshape(confidence.shape[0], -1)
    return jnp.argsort(jnp.argsort(-flat, axis=-1), axis=-1).reshape(confidence.shape)
