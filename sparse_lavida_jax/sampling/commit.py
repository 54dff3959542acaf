# SPDX-License-Identifier: Apache-2.0
"""Token selection: logit filters, confidence, commit rules.

Pure functions on arrays, in the terms of the released samplers (spec Sec. 6 and 7.2). A candidate
is a code, or a whole token if all its codes are committed together: the axis `u`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sparse_lavida_jax.tags import AnyArray

LEAST_PROBABILITY = 1e-20  # smaller probabilities count as equal in "confidence" orders

# ---------------------------------------------------------------------------------------------
# Logit filters.


def filtered(logits: Float[Array, "*b c"], top_k: int, top_p: float) -> Float[Array, "*b c"]:
    """Returns logits with -inf for every code that may not be drawn.

    Args:
        top_k: keeps this many of the most probable codes; 0: all.
        top_p: of those, keeps the fewest whose probabilities add up to at least this; 1: all. Of
            equally probable ones the first.
    """
    if top_k and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p < 1:
        order = jnp.argsort(-logits, axis=-1)  # stable: among equals, the first
        probability = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        # A code is kept while those before it add up to at most top_p: the first one always is.
        kept = jnp.cumsum(probability, axis=-1) - probability <= top_p
        rank = jnp.argsort(order, axis=-1)
        logits = jnp.where(jnp.take_along_axis(kept, rank, axis=-1), logits, -jnp.inf)
    return logits


# ---------------------------------------------------------------------------------------------
# Confidence.


def confidence(
    name: str, logits: Float[Array, "b w g v"], drawn: Int[Array, "b w g"]
) -> Float[Array, "b w g"]:
    """Returns how sure the model is of each code; more is surer.

    A probability or a margin p is returned as its log-odds log(p / (1 - p)): in float32
    the probabilities 1 - 1e-8 and 1 - 1e-12 are equal, as log-odds they are 18.4 and 27.6.

    Args:
        name: "probability" of what was drawn; "margin" between the two most probable; "entropy":
            the negative entropy in nats. All are computed from the softmax of `logits`, whatever
            the temperature of the draw.
        logits: with -inf for every code that may not be drawn.
    """
    chosen = drawn if name == "probability" else jnp.argmax(logits, axis=-1)
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_chosen = column == chosen[..., None]
    own = jnp.max(jnp.where(is_chosen, logits, -jnp.inf), axis=-1)
    others = jnp.where(is_chosen, -jnp.inf, logits)
    rest = jax.nn.logsumexp(others, axis=-1) - own
    if name == "probability":
        return -rest
    if name == "margin":
        second = jnp.max(others, axis=-1) - own
        return jnp.log1p(-jnp.exp(second)) - jnp.logaddexp(second, rest)
    apart = others - own[..., None]
    weighted = jnp.sum(jnp.where(jnp.isinf(apart), 0.0, apart * jnp.exp(apart)), axis=-1)
    return weighted / (1 + jnp.exp(rest)) - jax.nn.softplus(rest)


def log_odds(p: float | AnyArray) -> Array:
    """Returns log(p / (1 - p)) of a probability; -inf and inf at and beyond its ends."""
    p = jnp.clip(jnp.asarray(p, jnp.float32), 0, 1)
    return jnp.log(p) - jnp.log1p(-p)


def with_noise(
    confidence: Float[Array, "b w u"], noise: Float[Array, "b w u"], scale: Float[AnyArray, ""]
) -> Float[Array, "b w u"]:
    """Returns log probability plus scaled Gumbel noise (the released "mmada", spec Sec. 7.2).

    Args:
        confidence: log-odds.
    """
    return jnp.maximum(jax.nn.log_sigmoid(confidence), np.log(LEAST_PROBABILITY)) + scale * noise


# ---------------------------------------------------------------------------------------------
# Commit rules.


@dataclasses.dataclass(frozen=True)
class CommitRule:
    """Which candidates a step commits.

    Attributes:
        name: "all": every candidate, since the plan chose them before the forward pass; "count":
            the surest, as many as the plan says; "threshold": those at least as probable as
            `level`; "factor": the surest n, with the largest n that keeps all above
            1 - `level` / (n + 1), which is Fast-dLLM's rule; "entropy": those of least entropy, as
            many as `_within_entropy` allows. All but "all" and "count" commit at least one.
        level: the threshold, the factor, or the bound in nats.
        confidence: "probability", "margin", "entropy" (see `confidence`), or "random".
        noisy: whether Gumbel noise is added to the log of the confidence.
        most: commits at most this many, the surest; 0: no limit.
        released: "factor" as in the released code: if only the least sure candidate falls short,
            it is committed as well. That saves a pass for one token, and commits the last two
            together however unsure they are.
    """

    name: str = "all"
    level: float = 0.0
    confidence: str = "probability"
    noisy: bool = False
    most: int = 0
    released: bool = False

    @property
    def ends_early(self) -> bool:
        """Whether a phase may have nothing left to decode before its last step."""
        return self.name in ("threshold", "factor", "entropy")

    def __call__(
        self,
        confidence: Float[Array, "b w u"],
        candidate: Bool[Array, "b w u"],
        count: Int[AnyArray, " b"],
    ) -> Bool[Array, "b w u"]:
        """Returns the candidates to commit; among equally sure ones, the first.

        Args:
            count: how many the plan commits in each row.
        """
        if self.name == "all":
            chosen = candidate
        elif self.name == "count":
            chosen = candidate & (_rank(confidence, candidate) < count[:, None, None])
        elif self.name == "threshold":
            sure = confidence >= log_odds(self.level)
            chosen = candidate & (sure | (_rank(confidence, candidate) == 0))
        elif self.name == "factor":
            chosen = _by_factor(confidence, candidate, self.level, released=self.released)
        else:
            chosen = _within_entropy(confidence, candidate, self.level)
        return chosen & (_rank(confidence, chosen) < self.most) if self.most else chosen


def _by_factor(
    confidence: Float[Array, "b w u"],
    candidate: Bool[Array, "b w u"],
    factor: float,
    *,
    released: bool,
) -> Bool[Array, "b w u"]:
    rank = _rank(confidence, candidate)
    bound = log_odds(1 - factor / (rank + 2))
    falls_short = candidate & (confidence < bound) & (rank > 0)
    number = jnp.sum(candidate, axis=(1, 2), keepdims=True)
    first = jnp.min(jnp.where(falls_short, rank, number), axis=(1, 2), keepdims=True)
    if released:
        first = jnp.where(first == number - 1, number, first)
    return candidate & (rank < first)


def _within_entropy(
    confidence: Float[Array, "b w u"], candidate: Bool[Array, "b w u"], bound: float
) -> Bool[Array, "b w u"]:
    """Returns the first candidate by entropy, and as many more as the bound allows.

    The entropies of all committed candidates except the largest add up to at most `bound`. That
    sum limits the error made by decoding them together, independently of each other (Ben-Hamu et
    al. 2025, arXiv:2505.24857).

    Args:
        confidence: negative entropies, nats.
        bound: nats.
    """
    flat = jnp.where(candidate, -confidence, jnp.inf).reshape(confidence.shape[0], -1)
    ascending = jnp.sort(flat, axis=-1)  # non-candidates come last
    entropy = jnp.where(jnp.isinf(ascending), 0, ascending)
    within = jnp.cumsum(entropy, axis=-1) - entropy <= bound
    number = jnp.sum(within & ~jnp.isinf(ascending), axis=-1)
    return candidate & (_rank(confidence, candidate) < number[:, None, None])


def _rank(
    confidence: Float[Array, "b w u"], candidate: Bool[Array, "b w u"]
) -> Int[Array, "b w u"]:
    """Returns how many candidates of the row are surer; non-candidates come last."""
    flat = jnp.where(candidate, confidence, -jnp.inf).reshape(confidence.shape[0], -1)
    return jnp.argsort(jnp.argsort(-flat, axis=-1), axis=-1).reshape(confidence.shape)
