# SPDX-License-Identifier: Apache-2.0
"""The objective of a style code: the likelihood given a code, and what the code itself costs.

A row costs -log p(image | prompt, code) + KL(q || p): q(code | prompt, image) is the posterior,
from which the code is drawn, and p(code | prompt) the prior, from which the sampler draws it
(`models/style_code.py`). The sum is at least -log p(image | prompt), whatever q is
(docs/method.md). Some rows have no code, so that the model remains one of images without a code as
well; so do rows that show some of the image, or an image to be edited, whose style is given.

A run that adds a code first measures what its queries see (`measured`). Then codes begin soft and
free, so that denoisers learn what they say before there is a reason to say little (`warmth`).
"""

from collections.abc import Iterable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.models import sharding
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.style_code import queries, seen, whitening_of
from sparse_lavida_jax.tags import GIVEN_BLOCK, NO_FEATURE, PROMPT_BLOCK, Stream, make_tags
from sparse_lavida_jax.visibility import PAD_BLOCK

TEMPERATURE = 0.67  # of the relaxed draws through which the posterior gets its gradient
SOFTENING = 3.0  # added to the temperature at the start of a run
WITHOUT = 0.2  # share of the rows that have no code
MEASURED = 768  # images that `measured` looks at


@flax.struct.dataclass
class StyleDraws:
    """The random numbers of a step.

    Attributes:
        noise: Gumbel noise of each value.
        coded: whether a row may have a code.
    """

    noise: Float[Array, "b n c"]
    coded: Bool[Array, " b"]


class Warmth(NamedTuple):
    """How far the warm-up of a run's codes is.

    Attributes:
        hardness: of the draws: 0: soft, without noise; 1: one-hot, drawn from the posterior.
        weight: of what codes cost.
    """

    hardness: Float[Array, ""] | float = 1.0
    weight: Float[Array, ""] | float = 1.0


WARM = Warmth()  # after the warm-up


class Coded(NamedTuple):
    """The style codes of a batch; all zeros for a row without one, except its posterior.

    Attributes:
        code: drawn from the posterior, one-hot after the warm-up; its gradient is that of the
            relaxed draw (arXiv:1611.01144).
        divergence: KL(q || p) of each row, in nats.
        posterior: the probability of each value.
    """

    code: Float[Array, "b n c"]
    divergence: Float[Array, " b"]
    posterior: Float[Array, "b n c"]


def draws(model: config.Model, step: Int[Array, ""], rows: int) -> StyleDraws | None:
    """Returns the random numbers of a step, by its number; None for a model without a code."""
    if not model.style_parts:
        return None
    of_noise, of_rows = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
    groups = model.style_parts * model.style_groups
    noise = jax.random.gumbel(of_noise, (rows, groups, model.style_values))
    return StyleDraws(noise, jax.random.uniform(of_rows, (rows,)) >= WITHOUT)


def warmth(settings: config.Optimizer, step: Int[Array, ""]) -> Warmth:
    """Returns how far the warm-up is, by the number of a step.

    Draws harden from two fifths of it to nine tenths; codes cost nothing up to two thirds of it.
    """
    share = (1 + step) / max(settings.style_warmup_steps, 1)
    return Warmth(jnp.clip(2 * share - 0.8, 0, 1), jnp.clip(3 * share - 2, 0, 1))


def coded(
    params: Denoiser,
    batch: Corrupted,
    features: Float[Array, "b v e"] | None,
    given: StyleDraws,
    hardness: Float[Array, ""] | float = 1.0,
) -> Coded:
    """Draws a code for each row, and says what it costs.

    Args:
        hardness: of the draws (`Warmth`).
    """
    assert batch.generation is not None
    stream = asked(batch, params.settings)
    of_prior, of_posterior = params.style_states(batch.understanding, stream, features)
    logits = params.style_code.posterior_logits(of_prior, of_posterior)
    temperature = TEMPERATURE + SOFTENING * (1 - hardness)
    relaxed = jax.nn.softmax((logits + hardness * given.noise) / temperature, axis=-1)
    hard = jax.nn.one_hot(relaxed.argmax(axis=-1), relaxed.shape[-1])
    code = relaxed + hardness * jax.lax.stop_gradient(hard - relaxed)
    prior = jax.nn.log_softmax(params.style_code.prior_logits(of_prior, hard), axis=-1)
    posterior = jax.nn.log_softmax(logits, axis=-1)
    divergence = (jnp.exp(posterior) * (posterior - prior)).sum(axis=(1, 2))
    has_code = given.coded & ~shows_image(batch)
    return Coded(code * has_code[:, None, None], divergence * has_code, jnp.exp(posterior))


def measured(params: Denoiser, batches: Iterable[Corrupted]) -> dict[str, Float[np.ndarray, "..."]]:
    """Returns the parameters of a code, by name, that whiten what its queries see.

    Args:
        params: the whole model.
        batches: of training, as many as are needed.

    Raises:
        ConfigError: no row predicts an image without showing one.
    """
    total, most = None, MEASURED * params.settings.style_parts
    for batch in batches:
        if batch.predicts == "understanding":
            continue
        sums = jax.device_get(_sums(params, batch))
        total = sums if total is None else jax.tree.map(np.add, total, sums)
        if total[0] >= most:
            break
    if total is None or not total[0]:
        raise config.ConfigError(
            f"Model.style_parts={params.settings.style_parts} adds a style code, and the first"
            " batches of this run draw no image that it could be measured on: teach the model to"
            " draw first, and start from it with Train.init_from."
        )
    count, first, second = total
    mean = first / count
    whitening = whitening_of(jnp.asarray(second / count - np.outer(mean, mean)))
    return {"style_code/seen_mean": mean, "style_code/seen_whitening": np.asarray(whitening)}


@jax.jit
def _sums(params: Denoiser, batch: Corrupted) -> tuple[Float[Array, "*_n"], ...]:
    """Returns how many queries see a part, and the sums of what they see and of its squares.

    Rows that show an image have no code and are left out.
    """
    assert batch.generation is not None
    features = None if batch.pixels is None else params.see(batch.pixels)
    stream = asked(batch, params.settings)
    what = seen(*params.style_states(batch.understanding, stream, features))
    weight = jnp.broadcast_to(~shows_image(batch)[:, None], what.shape[:2])
    weighted = what * weight[..., None]
    second = jnp.einsum("bpe,bpf->ef", weighted, what, precision="highest")
    sums = weight.sum().astype(jnp.float32), weighted.sum(axis=(0, 1)), second
    return sharding.replicated(sums)


def asked(batch: Corrupted, model: config.Model) -> Stream:
    """Returns the generation stream of the pass that asks for the codes of a batch."""
    assert batch.generation is not None
    start = first_register(batch.generation, model)
    return queries(model, start, predicted_cells(batch, model.num_cells))


def shows_image(batch: Corrupted) -> Bool[Array, " b"]:
    """Returns which rows show an image before the first step: cells of it, or its features."""
    assert batch.generation is not None
    block = jnp.asarray(batch.generation.tags.block)
    shows = ((block == PROMPT_BLOCK) | (block == GIVEN_BLOCK)).any(axis=1)
    words = batch.understanding
    return shows if words is None else shows | (words.index != NO_FEATURE).any(axis=1)


def first_register(stream: Stream, model: config.Model) -> Int[Array, " b"]:
    """Returns the position of the first register of each row."""
    is_register = stream.tokens[..., 0] == model.image_register_id
    return jnp.where(is_register, stream.tags.position, jnp.iinfo(jnp.int32).max).min(axis=1)


def predicted_cells(batch: Corrupted, most: int) -> Stream:
    """Returns the clean cells that a batch predicts, at most so many of a row, and padding."""
    stream, target, weight = batch.generation, batch.image_target, batch.image_weight
    assert stream is not None and target is not None and weight is not None
    predicted = weight > 0 if weight.ndim == 2 else (weight > 0).any(axis=-1)
    first = jnp.argsort(~predicted, axis=1, stable=True)[:, :most]

    def of(values):
        index = first.reshape(*first.shape, *[1] * (values.ndim - 2))
        return jnp.take_along_axis(jnp.asarray(values), index, axis=1)

    block = jnp.where(of(predicted), GIVEN_BLOCK, PAD_BLOCK)
    tags = make_tags(of(stream.tags.position), block, GIVEN_BLOCK)
    return Stream(of(target), of(stream.index), tags)
