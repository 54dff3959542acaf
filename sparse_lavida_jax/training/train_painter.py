# SPDX-License-Identifier: Apache-2.0
"""Trains the image tokenizer of art: its codebook is fitted, then its painter learns from scenes.

A wrong style or facing in a single block is a small error in pixels, so blocks weigh more the less
they differ from other looks of their thing (`art.looks`).
"""

from collections.abc import Callable

import einops
import jax.numpy as jnp
import numpy as np
import rich.console
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.art import codebook, training_images
from sparse_lavida_jax.art.cells import BLOCK, CellModel, Painter, is_near_things
from sparse_lavida_jax.art.sheet import Sheet, taught
from sparse_lavida_jax.models import vq, vq_files
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.training.short_stages import check_length, descend

SQUARES = 5.0  # weight of squared errors relative to absolute ones, in the loss; ours


@runtime.interrupts_held()
@jax_settings.defaults()
def fit(
    settings: config.Config,
    sheet: Sheet,
    console: rich.console.Console,
    is_asked_to_stop: Callable[[int], bool] = lambda step: False,
) -> CellModel:
    """Returns an image tokenizer with the settings `settings.vq`.

    With `train.init_from`, the folder or name of one, its codes stay, so that models can go on with
    them, and only its painter is trained. Most drawings show the `data.things` things
    that a model is taught; with 0, all are drawn equally often.

    Args:
        sheet: the things that it is to draw.
        console: where progress is shown.
        is_asked_to_stop: called after each step, with its number.

    Raises:
        ConfigError: a length in seconds, nothing but warm-up, or other settings in `init_from`.
        VQError: `init_from` names no image tokenizer.
        KeyboardInterrupt: it was asked to stop, or Ctrl-C was pressed.
    """
    check_length(settings)
    if settings.train.init_from:
        model, made = vq_files.load(settings.train.init_from)
        if made != settings.vq or not isinstance(model, CellModel):
            raise config.ConfigError(
                f"Train.init_from={settings.train.init_from!r} is an image tokenizer with other"
                " settings than `vq`. Give both the same."
            )
    else:
        model = CellModel(settings.vq, rngs=nnx.Rngs(settings.seed))
        contents = codebook.fit(sheet, settings.vq.codebook_size, console.print)
        model.codebook = nnx.Param(jnp.asarray(contents, jnp.float16))
    often = [one.name for one in taught(settings.data).things if settings.data.things]
    scenes = training_images.TrainingImages.of(sheet, often)

    def batch_of(step: int):
        rng = np.random.default_rng((settings.seed, step))
        images, weights = scenes.batch(rng, settings.train.batch_size)
        # As of any image: a cell may have the codes of another background than that of the image.
        return images, vq.encode_images(model, images, batch=len(images)), weights

    def loss(painter: Painter, *batch: Array):
        return _loss(painter, model, *batch)

    how = "image tokenizer", console, is_asked_to_stop
    model.painter = descend(settings, model.painter, loss, batch_of, *how)
    return model


def _loss(
    painter: Painter,
    model: CellModel,
    images: UInt8[Array, "b h w 3"],
    codes: Int[Array, "b y x"],
    weights: Float[Array, "b y x"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    painted = model.paint(codes, painter)
    cut = "b (y i) (x j) c -> b y x (i j c)"
    errors = einops.rearrange(painted - vq.to_float(images), cut, i=BLOCK, j=BLOCK)
    weights = weights * is_near_things(codes)
    total = jnp.sum(weights)
    absolute = jnp.sum(weights * jnp.mean(jnp.abs(errors), axis=-1)) / total
    squared = jnp.sum(weights * jnp.mean(errors**2, axis=-1)) / total
    return absolute + SQUARES * squared, {"pixel_error": absolute}
