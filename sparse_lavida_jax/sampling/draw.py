# SPDX-License-Identifier: Apache-2.0
"""The random numbers of a step, and what it draws with them from guided logits."""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from sparse_lavida_jax import config
from sparse_lavida_jax.models import text_head
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling.commit import CommitRule, confidence, filtered, log_odds, with_noise
from sparse_lavida_jax.sampling.plans import Steps
from sparse_lavida_jax.sampling.presets import StepSettings
from sparse_lavida_jax.sampling.state import Rows
from sparse_lavida_jax.tags import AnyArray

RANKING = 2**31 - 1  # key of the noise on confidences, not of draws; no block has this number
AVERAGED = ("no_source", "no_image")  # rows averaged with the full one (spec Sec. 7.2)
FEW = 1024  # codes; more of them need precise noise, or rare codes would be drawn too seldom


@flax.struct.dataclass
class Draws:
    """The random numbers of a step, which depend only on (key of the row, block, position).

    A subclass replays recorded numbers; its arrays have an entry for each step.
    """

    def codes(
        self, rows: Rows, now: Steps, logits: Float[Array, "b w g v"], settings: StepSettings
    ) -> Int[Array, "b w g"]:
        """Draws each code independently; at temperature 0, takes the most probable one."""
        drawn = None if settings.greedy else self.noise(rows.key, now, logits.shape[2:])
        return best(rows, now, logits, drawn)

    def noise(
        self, row_key: Key[Array, " b"], now: Steps, shape: tuple[int, ...]
    ) -> Float[Array, "b w *v"]:
        """Returns the Gumbel noise that decides what is drawn."""
        return noise(row_key, now, shape)

    def ranking(self, row_key: Key[Array, " b"], now: Steps) -> Float[Array, "b w u"]:
        """Returns the Gumbel noise on the confidence."""
        apart = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_key, RANKING)
        return noise(apart, now, now.candidates.shape[2:])

    def random(self, row_key: Key[Array, " b"], now: Steps) -> Float[Array, "b w u"]:
        """Returns a random confidence, uniform in [0, 1]."""
        return jnp.exp(-jnp.exp(-self.ranking(row_key, now)))


def guided(
    logits: Float[Array, "r b *w v"], rows: Rows, now: Steps, settings: StepSettings
) -> Float[Array, "b *w v"]:
    """Classifier-free guidance over the leading axis (spec Sec. 7.2: (1+g) cond - g uncond)."""
    full = logits[-1]
    if not now.guided:
        return full
    if settings.guidance_rows == 3:
        g = _of_row(rows.guidance_image, full) * now.guidance
        if settings.edit_guidance in AVERAGED:
            full = (full + g * logits[1]) / (1 + g)
        else:
            full = (1 + g) * full - g * logits[1]
    if settings.guidance_rows > 1:
        g = _of_row(rows.guidance, full) * now.guidance
        full = (1 + g) * full - g * logits[0]
    return full


def _of_row(values: Float[AnyArray, " b"], like: Array) -> Array:
    """Reshapes one number per row to broadcast with arrays [b ...]."""
    return jnp.asarray(values).reshape(-1, *[1] * (like.ndim - 1))


def allowed(
    logits: Float[Array, "b w g v"],
    rows: Rows,
    now: Steps,
    model: config.Model,
    settings: StepSettings,
) -> Float[Array, "b w g v"]:
    """Returns logits with -inf for every token that may not be drawn; see `_barred`."""
    if settings.modality == "text" and not settings.released:
        barred = _barred(jnp.arange(logits.shape[-1]), rows, now, model)
        logits = jnp.where(barred[:, :, None], -jnp.inf, logits)
    return filtered(logits, settings.top_k, settings.top_p)


def _barred(
    ids: Int[Array, " v"], rows: Rows, now: Steps, model: config.Model
) -> Bool[Array, "b w v"]:
    """Returns what no text may draw: masks, and an end before its last given token."""
    early = now.decode < jnp.asarray(rows.ends_from)[:, None]
    is_end, is_mask = ((ids == i)[None, None] for i in (model.end_of_text_id, model.text_mask_id))
    return is_mask | (is_end & early[..., None])


def scores(
    rows: Rows, now: Steps, logits: Float[Array, "b *w v"], noise: Float[Array, "b *w v"]
) -> Float[Array, "b *w v"]:
    """Scores whose maximum is drawn: Gumbel-max, or at temperature 0 the most probable token."""
    temperature = _of_row(rows.temperature, logits)
    drawn = logits / jnp.where(temperature > 0, temperature, 1) / now.temperature + noise
    return jnp.where(temperature > 0, drawn, logits)


def best(
    rows: Rows,
    now: Steps,
    logits: Float[Array, "b *w v"],
    noise: Float[Array, "b *w v"] | None,
) -> Int[Array, "b *w"]:
    """Returns what is drawn: that with the highest score; without noise, the most probable."""
    drawn = logits if noise is None else scores(rows, now, logits, noise)
    return jnp.argmax(drawn, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a step drew, of which it commits some.

    Attributes:
        codes: of every token to decode.
        confidence: returns how sure the model is of each code, by a name of `commit.confidence`.
    """

    codes: Int[Array, "b w g"]
    confidence: Callable[[str], Float[Array, "b w g"]]


def draw_from(
    logits: Float[Array, "b w g v"],
    rows: Rows,
    now: Steps,
    model: config.Model,
    settings: StepSettings,
    draws: Draws,
) -> Proposal:
    """Draws every code from guided logits."""
    logits = allowed(logits, rows, now, model, settings)
    codes = draws.codes(rows, now, logits, settings)
    return Proposal(codes, lambda name: confidence(name, logits, codes))


def draw_in_turn(
    model: Denoiser,
    hidden: Float[Array, "r b w e"],
    rows: Rows,
    now: Steps,
    settings: StepSettings,
    draws: Draws,
) -> Proposal:
    """Draws the codes of each cell one after another (`Model.sequential_codes`)."""
    guides, shape = hidden.shape[0], (model.settings.codes_per_token, model.settings.codebook_size)
    drawn = None if settings.greedy else draws.noise(rows.key, now, shape)
    logits = []

    def choose(own: Float[Array, "_rb w v"], number: int) -> Int[Array, "_rb w"]:
        own = guided(own.reshape(guides, -1, *own.shape[1:]), rows, now, settings)
        own = allowed(own[:, :, None], rows, now, model.settings, settings)[:, :, 0]
        logits.append(own)
        chosen = best(rows, now, own, None if drawn is None else drawn[:, :, number])
        return jnp.tile(chosen, (guides, 1))

    codes = model.image_head.draw(hidden.reshape(-1, *hidden.shape[2:]), choose)
    codes = codes[: hidden.shape[1]]
    return Proposal(codes, lambda name: confidence(name, jnp.stack(logits, axis=2), codes))


def draw_by_tiles(
    model: Denoiser,
    hidden: Float[Array, "r b w e"],
    rows: Rows,
    now: Steps,
    settings: StepSettings,
) -> Proposal:
    """Draws text as `draw_from` does, from logits that are computed one tile at a time."""

    def logits_of(hidden, columns, start):
        hidden = hidden.astype(model.settings.compute_dtype)
        logits = (hidden @ columns.astype(hidden.dtype)).astype(jnp.float32)
        logits = guided(logits, rows, now, settings)
        if settings.released:
            return logits
        ids = start + jnp.arange(logits.shape[-1])
        return jnp.where(_barred(ids, rows, now, model.settings), -jnp.inf, logits)

    def score_of(logits, number):
        if settings.greedy:
            return logits
        drawn = noise(rows.key, now, (settings.head_tile,), number)[..., : logits.shape[-1]]
        return scores(rows, now, logits, drawn)

    drawn = text_head.draw(
        hidden, model.text_kernel, logits_of=logits_of, score_of=score_of, tile=settings.head_tile
    )
    return Proposal(drawn.token[..., None], lambda name: drawn.confidence(name)[..., None])


def noise(
    row_key: Key[Array, " b"],
    now: Steps,
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
    now: Steps,
    proposal: Proposal,
    rule: CommitRule,
    draws: Draws,
) -> Float[Array, "b w u"]:
    """How sure the model is of each candidate; of a whole token, that of its least sure code."""
    shape = now.candidates.shape
    if rule.name == "all":
        return jnp.zeros(shape)
    if rule.confidence == "random":
        return log_odds(draws.random(row_key, now))
    sure = proposal.confidence(rule.confidence)
    if shape[-1] == 1:
        sure = sure.min(axis=-1, keepdims=True)
    return with_noise(sure, draws.ranking(row_key, now), now.noise) if rule.noisy else sure
