# SPDX-License-Identifier: Apache-2.0
"""What a step may draw, how sure it is of what it drew, and how much of that it commits.

Policies are pure functions on arrays, in the terms of the released samplers (spec Sec. 6 and 7.2).
A candidate is a code, or a whole token if all its codes are committed together: the axis `u`.
"""

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sparse_lavida_jax import config
from sparse_lavida_jax.models import text_head
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling.presets import Choice, StepSettings
from sparse_lavida_jax.sampling.state import Rows, StepTokens
from sparse_lavida_jax.tags import AnyArray

RANKING = 2**31 - 1  # key of the noise on confidences, not of draws; no block has this number
AVERAGED = ("no_source", "no_image")  # rows averaged with the full one (spec Sec. 7.2)
LEAST_PROBABILITY = 1e-20  # smaller probabilities count as equal in "confidence" orders
FEW = 1024  # codes; more of them need precise noise, or rare codes would be drawn too seldom

# Chooses candidates to commit: (confidence, whether it is a candidate, how many) -> choice.
Policy = Callable[
    [Float[Array, "b w u"], Bool[Array, "b w u"], Int[AnyArray, " b"]], Bool[Array, "b w u"]
]

# ---------------------------------------------------------------------------------------------
# What may be drawn.


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
# How many candidates are committed.


def commit_all(confidence, candidate, count):
    """Commits every candidate: the plan chose them before the forward pass."""
    del confidence, count
    return candidate


def commit_most_confident(confidence, candidate, count):
    """Commits the `count` surest candidates of each row; among equals, the first."""
    return candidate & (_rank(confidence, candidate) < count[:, None, None])


def commit_above(confidence, candidate, count, *, threshold: float):
    """Commits candidates at least as probable as `threshold`, and always the surest one."""
    del count
    sure = confidence >= log_odds(threshold)
    return candidate & (sure | (_rank(confidence, candidate) == 0))


def commit_by_factor(confidence, candidate, count, *, factor: float, released: bool = False):
    """Commits the n surest, with the largest n that keeps all above 1 - factor / (n + 1).

    This is Fast-dLLM's rule. The surest one is always committed.

    Args:
        released: if only the least sure one falls short, it is committed as well. That saves a
            pass for one token, and commits the last two together however unsure they are.
    """
    del count
    rank = _rank(confidence, candidate)
    bound = log_odds(1 - factor / (rank + 2))
    falls_short = candidate & (confidence < bound) & (rank > 0)
    number = jnp.sum(candidate, axis=(1, 2), keepdims=True)
    first = jnp.min(jnp.where(falls_short, rank, number), axis=(1, 2), keepdims=True)
    if released:
        first = jnp.where(first == number - 1, number, first)
    return candidate & (rank < first)


def commit_within_entropy(confidence, candidate, count, *, bound: float):
    """Commits the candidates of least entropy: the first one, and as many more as the bound allows.

    The entropies of all committed candidates except the largest add up to at most `bound`. That
    sum limits the error made by decoding them together, independently of each other (Ben-Hamu et
    al. 2025, arXiv:2505.24857).

    Args:
        confidence: negative entropies, nats.
        bound: nats.
    """
    del count
    flat = jnp.where(candidate, -confidence, jnp.inf).reshape(confidence.shape[0], -1)
    ascending = jnp.sort(flat, axis=-1)  # non-candidates come last
    entropy = jnp.where(jnp.isinf(ascending), 0, ascending)
    within = jnp.cumsum(entropy, axis=-1) - entropy <= bound
    number = jnp.sum(within & ~jnp.isinf(ascending), axis=-1)
    return candidate & (_rank(confidence, candidate) < number[:, None, None])


def at_most(policy: Policy, most: int) -> Policy:
    """Returns a policy that commits the `most` surest candidates of those `policy` commits."""

    def capped(confidence, candidate, count):
        chosen = policy(confidence, candidate, count)
        return chosen & (_rank(confidence, chosen) < most)

    return capped


def _rank(
    confidence: Float[Array, "b w u"], candidate: Bool[Array, "b w u"]
) -> Int[Array, "b w u"]:
    """Returns how many candidates of the row are surer; non-candidates come last."""
    flat = jnp.where(candidate, confidence, -jnp.inf).reshape(confidence.shape[0], -1)
    return jnp.argsort(jnp.argsort(-flat, axis=-1), axis=-1).reshape(confidence.shape)


# ---------------------------------------------------------------------------------------------
# A step's draws.


@flax.struct.dataclass
class Draws:
    """The random numbers of a step, which depend only on (seed of the row, step, position).

    A subclass replays recorded numbers; its arrays have an entry for each step.
    """

    def codes(
        self, rows: Rows, now: StepTokens, logits: Float[Array, "b w g v"], settings: StepSettings
    ) -> Int[Array, "b w g"]:
        """Draws each code independently; at temperature 0, takes the most probable one."""
        if settings.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drawn = self.noise(rows.key, now, logits.shape[2:])
        return jnp.argmax(scores(rows, now, logits, drawn), axis=-1).astype(jnp.int32)

    def noise(
        self, row_key: Key[Array, " b"], now: StepTokens, shape: tuple[int, ...]
    ) -> Float[Array, "b w *v"]:
        """Returns the Gumbel noise that decides what is drawn."""
        return noise(row_key, now, shape)

    def ranking(self, row_key: Key[Array, " b"], now: StepTokens) -> Float[Array, "b w u"]:
        """Returns the Gumbel noise on the confidence."""
        apart = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_key, RANKING)
        return noise(apart, now, now.candidates.shape[2:])

    def random(self, row_key: Key[Array, " b"], now: StepTokens) -> Float[Array, "b w u"]:
        """Returns a random confidence, uniform in [0, 1]."""
        return jnp.exp(-jnp.exp(-self.ranking(row_key, now)))


def policy_of(choice: Choice) -> Policy:
    """Returns the function that chooses what is committed."""
    policy = {
        "all": commit_all,
        "count": commit_most_confident,
        "threshold": functools.partial(commit_above, threshold=choice.level),
        "factor": functools.partial(
            commit_by_factor, factor=choice.level, released=choice.released
        ),
        "entropy": functools.partial(commit_within_entropy, bound=choice.level),
    }[choice.commit]
    return at_most(policy, choice.most) if choice.most else policy


def guided(
    logits: Float[Array, "r b *w v"], settings: StepSettings, rows: Rows, share: Float[AnyArray, ""]
) -> Float[Array, "b *w v"]:
    """Classifier-free guidance over the leading axis (spec Sec. 7.2: (1+g) cond - g uncond)."""
    full = logits[-1]
    if not settings.guided:
        return full
    if settings.guidance_rows == 3:
        g = _of_row(rows.guidance_image, full) * share
        if settings.edit_guidance in AVERAGED:
            full = (full + g * logits[1]) / (1 + g)
        else:
            full = (1 + g) * full - g * logits[1]
    if settings.guidance_rows > 1:
        g = _of_row(rows.guidance, full) * share
        full = (1 + g) * full - g * logits[0]
    return full


def _of_row(values: Float[AnyArray, " b"], like: Array) -> Array:
    """Reshapes one number per row to broadcast with arrays [b ...]."""
    return jnp.asarray(values).reshape(-1, *[1] * (like.ndim - 1))


def allowed(
    logits: Float[Array, "b w g v"],
    rows: Rows,
    now: StepTokens,
    model: config.Model,
    settings: StepSettings,
) -> Float[Array, "b w g v"]:
    """Returns logits with -inf for every token that may not be drawn; see `_barred`."""
    if settings.kind == "text" and not settings.released:
        barred = _barred(jnp.arange(logits.shape[-1]), rows, now, model)
        logits = jnp.where(barred[:, :, None], -jnp.inf, logits)
    return filtered(logits, settings.top_k, settings.top_p)


def _barred(
    ids: Int[Array, " v"], rows: Rows, now: StepTokens, model: config.Model
) -> Bool[Array, "b w v"]:
    """Returns what no text may draw: masks, and an end before its last given token."""
    early = now.decode < jnp.asarray(rows.ends_from)[:, None]
    is_end, is_mask = ((ids == i)[None, None] for i in (model.end_of_text_id, model.text_mask_id))
    return is_mask | (is_end & early[..., None])


def scores(
    rows: Rows, now: StepTokens, logits: Float[Array, "b *w v"], noise: Float[Array, "b *w v"]
) -> Float[Array, "b *w v"]:
    """Scores whose maximum is drawn: Gumbel-max, or at temperature 0 the most probable token."""
    temperature = _of_row(rows.temperature, logits)
    drawn = logits / jnp.where(temperature > 0, temperature, 1) / now.temperature + noise
    return jnp.where(temperature > 0, drawn, logits)


def draw_by_tiles(
    model: Denoiser,
    hidden: Float[Array, "r b w e"],
    rows: Rows,
    now: StepTokens,
    settings: StepSettings,
) -> text_head.Drawn:
    """Draws text as `Draws.codes` does from `allowed` logits, computed one tile at a time."""

    def logits_of(hidden, columns, start):
        hidden = hidden.astype(model.settings.compute_dtype)
        logits = (hidden @ columns.astype(hidden.dtype)).astype(jnp.float32)
        logits = guided(logits, settings, rows, now.guidance)
        if settings.released:
            return logits
        ids = start + jnp.arange(logits.shape[-1])
        return jnp.where(_barred(ids, rows, now, model.settings), -jnp.inf, logits)

    def score_of(logits, number):
        if settings.greedy:
            return logits
        drawn = noise(rows.key, now, (settings.head_tile,), number)[..., : logits.shape[-1]]
        return scores(rows, now, logits, drawn)

    return text_head.draw(
        hidden, model.text_kernel, logits_of=logits_of, score_of=score_of, tile=settings.head_tile
    )


def noise(
    row_key: Key[Array, " b"],
    now: StepTokens,
    shape: tuple[int, ...],
    tile: Int[Array, ""] | int | None = None,
) -> Array:
    """Gumbel noise for each token to decode, which depends only on (row, step, position).

    Args:
        tile: number of the vocabulary's tile, if tokens are drawn tile by tile.
    """

    def noise_at(key, position):
        key = jax.random.fold_in(jax.random.fold_in(key, now.block), position)
        key = key if tile is None else jax.random.fold_in(key, tile)
        # Noise from 23 random bits never draws a token less probable than about 1e-7; in a large
        # vocabulary such tokens add up to about 1 %.
        return jax.random.gumbel(key, shape, mode="high" if shape and shape[-1] > FEW else "low")

    return jax.vmap(jax.vmap(noise_at, in_axes=(None, 0)))(row_key, now.decode)


def confidences(
    row_key: Key[Array, " b"],
    now: StepTokens,
    sure: Callable[[], Float[Array, "b w g"]],
    choice: Choice,
    draws: Draws,
) -> Float[Array, "b w u"]:
    """How sure the model is of each candidate; of a whole token, that of its least sure code.

    Args:
        sure: how sure it is of each code.
    """
    shape = now.candidates.shape
    if choice.commit == "all":
        return jnp.zeros(shape)
    if choice.confidence == "random":
        return log_odds(draws.random(row_key, now))
    confidence = sure()
    if shape[-1] == 1:
        confidence = confidence.min(axis=-1, keepdims=True)
    if not choice.noisy:
        return confidence
    return with_noise(confidence, draws.ranking(row_key, now), now.noise)
