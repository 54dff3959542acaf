# SPDX-License-Identifier: Apache-2.0
"""The objective of a style code: the likelihood given a code, and what the code itself costs.

A row costs -log p(image | prompt, code) + KL(q || p): q(code | prompt, image) is the posterior,
from which the code is drawn, and p(code | prompt) the prior, from which the sampler draws it
(`models/style_code.py`). The sum is at least -log p(image | prompt), whatever q is
(docs/method.md). Some rows have no code, so that the model remains one of images without a code as
well; so do rows that show some of the image, or an image to be edited, whose style is given.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.style_code import queries
from sparse_lavida_jax.tags import GIVEN_BLOCK, PROMPT_BLOCK, Stream, make_tags
from sparse_lavida_jax.visibility import PAD_BLOCK

TEMPERATURE = 0.67  # of the relaxed draws through which the posterior gets its gradient
WITHOUT = 0.2  # share of the rows that have no code


@flax.struct.dataclass
class StyleDraws:
    """The random numbers of a step.

    Attributes:
        noise: Gumbel noise of each value.
        coded: whether a row may have a code.
    """

    noise: Float[Array, "b n c"]
    coded: Bool[Array, " b"]


class Coded(NamedTuple):
    """The style codes of a batch; all zeros for a row without one, except its posterior.

    Attributes:
        code: drawn from the posterior, one-hot; its gradient is that of the relaxed draw
            (arXiv:1611.01144).
        divergence: KL(q || p) of each row, in nats.
        posterior: the probability of each value.
    """

    code: Float[Array, "b n c"]
    divergence: Float[Array, " b"]
    posterior: Float[Array, "b n c"]


def draws(model: config.Model, step: Int[Array, ""], rows: int) -> StyleDraws | None:
    """Returns the random numbers of a step, by its number; None for a model without a code."""
    if not model.style_groups:
        return None
    of_noise, of_rows = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
    noise = jax.random.gumbel(of_noise, (rows, model.style_groups, model.style_values))
    return StyleDraws(noise, jax.random.uniform(of_rows, (rows,)) >= WITHOUT)


def coded(
    params: Denoiser, batch: Corrupted, features: Float[Array, "b v e"] | None, given: StyleDraws
) -> Coded:
    """Draws a code for each row, and says what it costs."""
    assert batch.generation is not None
    stream = asked(batch, params.settings)
    of_prior, of_posterior = params.style_states(batch.understanding, stream, features)
    logits = params.style_code.posterior_logits(of_prior, of_posterior)
    relaxed = jax.nn.softmax((logits + given.noise) / TEMPERATURE, axis=-1)
    hard = jax.nn.one_hot(relaxed.argmax(axis=-1), relaxed.shape[-1])
    code = hard + relaxed - jax.lax.stop_gradient(relaxed)
    prior = jax.nn.log_softmax(params.style_code.prior_logits(of_prior, hard), axis=-1)
    posterior = jax.nn.log_softmax(logits, axis=-1)
    divergence = (jnp.exp(posterior) * (posterior - prior)).sum(axis=(1, 2))
    has_code = given.coded & ~shows_image(batch.generation)
    return Coded(code * has_code[:, None, None], divergence * has_code, jnp.exp(posterior))


def asked(batch: Corrupted, model: config.Model) -> Stream:
    """Returns the generation stream of the pass that asks for the codes of a batch."""
    assert batch.generation is not None
    start = first_register(batch.generation, model)
    return queries(model, start, predicted_cells(batch, model.num_cells))


def shows_image(stream: Stream) -> Bool[Array, " b"]:
    """Returns which rows show cells before the first step: a source's, or given ones."""
    block = jnp.asarray(stream.tags.block)
    return ((block == PROMPT_BLOCK) | (block == GIVEN_BLOCK)).any(axis=1)


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
