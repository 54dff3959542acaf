# SPDX-License-Identifier: Apache-2.0
"""What a step draws from the logits: guidance, what is allowed, noise, confidence."""

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from sparse_lavida_jax import config
from sparse_lavida_jax.layout import AnyArray
from sparse_lavida_jax.models import text_head
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import choose
from sparse_lavida_jax.sampling.presets import Choice, StepSettings
from sparse_lavida_jax.sampling.state import Rows, StepTokens

RANKING = 2**31 - 1  # keys the noise on confidences apart from that of the draws; no block is this
AVERAGED = ("no_source", "no_image")  # rows that the full one is averaged with (spec Sec. 7.2)


@flax.struct.dataclass
class Draws:
    """The random numbers of a step: they depend on (seed of the row, step, position) alone.

    Recorded ones are a subclass, whose arrays have an entry for each step.
    """

    def codes(
        self, rows: Rows, now: StepTokens, logits: Float[Array, "b w g v"], settings: StepSettings
    ) -> Int[Array, "b w g"]:
        """Draws each code independently; at temperature 0 takes the most probable."""
        if settings.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drawn = self.noise(rows.key, now, logits.shape[2:])
        return jnp.argmax(_scores(rows, now, logits, drawn), axis=-1).astype(jnp.int32)

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
        """Returns a confidence that is random, uniform in [0, 1]."""
        return jnp.exp(-jnp.exp(-self.ranking(row_key, now)))


def policy_of(choice: Choice) -> choose.Policy:
    """Returns the function that chooses what is committed."""
    policy = {
        "all": choose.commit_all,
        "count": choose.commit_most_confident,
        "threshold": functools.partial(choose.commit_above, threshold=choice.level),
        "factor": functools.partial(
            choose.commit_by_factor, factor=choice.level, released=choice.released
        ),
        "entropy": functools.partial(choose.commit_within_entropy, bound=choice.level),
    }[choice.commit]
    return choose.at_most(policy, choice.most) if choice.most else policy


def guided(
    logits: Float[Array, "r b *w v"],
    settings: StepSettings,
    rows: Rows,
    share: Float[Array, ""],
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
    """A number of each row, to go with arrays [b ...]."""
    return jnp.asarray(values).reshape(-1, *[1] * (like.ndim - 1))


def allowed(
    logits: Float[Array, "b w g v"], model: config.Model, settings: StepSettings
) -> Float[Array, "b w g v"]:
    """Returns logits with -inf for what may not be drawn: text never becomes a mask again."""
    if settings.kind == "text" and not settings.released:
        logits = logits.at[..., model.text_mask_id].set(-jnp.inf)
    return choose.filtered(logits, settings.top_k, settings.top_p)


def _scores(
    rows: Rows, now: StepTokens, logits: Float[Array, "b *w v"], noise: Float[Array, "b *w v"]
) -> Float[Array, "b *w v"]:
    """The largest is drawn: Gumbel-max, or the most probable where the row's temperature is 0."""
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
    """Draws text as `Draws.codes` does from `allowed` logits, of which a tile exists at a time."""

    def logits_of(hidden, columns, start):
        hidden = hidden.astype(model.settings.compute_dtype)
        logits = (hidden @ columns.astype(hidden.dtype)).astype(jnp.float32)
        logits = guided(logits, settings, rows, now.guidance)
        if settings.released:
            return logits
        banned = start + jnp.arange(logits.shape[-1]) == model.settings.text_mask_id
        return jnp.where(banned[None, None], -jnp.inf, logits)

    def score_of(logits, number):
        if settings.temperature == 0:
            return logits
        drawn = noise(rows.key, now, (settings.head_tile,), number)[..., : logits.shape[-1]]
        return _scores(rows, now, logits, drawn)

    return text_head.draw(
        hidden, model.text_kernel, logits_of=logits_of, score_of=score_of, tile=settings.head_tile
    )


def noise(
    row_key: Key[Array, " b"],
    now: StepTokens,
    shape: tuple[int, ...],
    tile: Int[Array, ""] | int | None = None,
) -> Array:
    """Gumbel noise of each token to decode: depends on (row, step, position) and nothing else.

    Args:
        tile: of the vocabulary, where that is drawn from by tiles.
    """

    def noise_at(key, position):
        key = jax.random.fold_in(jax.random.fold_in(key, now.block), position)
        return jax.random.gumbel(key if tile is None else jax.random.fold_in(key, tile), shape)

    return jax.vmap(jax.vmap(noise_at, in_axes=(None, 0)))(row_key, now.decode)


def confidences(
    row_key: Key[Array, " b"],
    now: StepTokens,
    sure: Callable[[], Float[Array, "b w g"]],
    choice: Choice,
    draws: Draws,
) -> Float[Array, "b w u"]:
    """How sure the model is of each candidate: of a whole token, as of its least sure code.

    Args:
        sure: how sure it is of each code.
    """
    shape = now.candidates.shape
    if choice.commit == "all":
        return jnp.zeros(shape)
    if choice.confidence == "random":
        return draws.random(row_key, now)
    confidence = sure()
    if shape[-1] == 1:
        confidence = confidence.min(axis=-1, keepdims=True)
    if not choice.noisy:
        return confidence
    return choose.with_noise(confidence, draws.ranking(row_key, now), now.noise)
