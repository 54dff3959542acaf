# SPDX-License-Identifier: Apache-2.0
"""Trains the image tokenizer of art: its codebook is fitted, then its painter learns from scenes.

A wrong style or facing in a single block is a small error in pixels, so blocks weigh more the less
they differ from other looks of their thing (`art.looks`).
"""

import functools
from collections.abc import Callable

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, UInt8

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.art import codebook, training_images
from sparse_lavida_jax.art.cells import BLOCK, CellModel, Painter, is_near_things
from sparse_lavida_jax.art.sheet import Sheet
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.training import metrics

SQUARES = 5.0  # weight of squared errors relative to absolute ones, in the loss; ours


@runtime.interrupts_held()
@jax_settings.defaults()
def fit(
    settings: config.Config,
    sheet: Sheet,
    optimizer: optax.GradientTransformation,
    console: rich.console.Console,
    is_asked_to_stop: Callable[[int], bool] = lambda step: False,
) -> CellModel:
    """Returns an image tokenizer with the settings `settings.vq`.

    Args:
        sheet: the things that it is to draw.
        optimizer: of the painter.
        console: where progress is shown.
        is_asked_to_stop: called with the number of each step after it.

    Raises:
        KeyboardInterrupt: it was asked to stop, or Ctrl-C was pressed.
    """
    model = CellModel(settings.vq, rngs=nnx.Rngs(settings.seed))
    contents = codebook.fit(sheet, settings.vq.codebook_size, console.print)
    model.codebook = nnx.Param(jnp.asarray(contents, jnp.float16))
    scenes = training_images.TrainingImages.of(sheet, np.asarray(model.codebook, np.float32))
    painter = jax.tree.map(jnp.copy, model.painter)
    opt_state = optimizer.init(painter)  # pyright: ignore[reportArgumentType]  it is a pytree
    run, steps = _make_step(model, optimizer), settings.train.train_steps
    with metrics.ProgressBar("image tokenizer", steps, console=console) as bar:
        for step in range(steps):
            rng = np.random.default_rng((settings.seed, step))
            batch = scenes.batch(rng, settings.train.batch_size)
            painter, opt_state, terms = run(painter, opt_state, *batch)
            if is_asked_to_stop(step):
                jax.block_until_ready(painter)
                raise KeyboardInterrupt
            runtime.check_interrupt()
            if step % settings.train.log_every == 0 or step == steps - 1:
                error = float(terms["absolute"])
                bar.reach(step + 1, (step + 1) / steps, pixel_error=error)
    model.painter = painter
    return model


def _make_step(model: CellModel, optimizer: optax.GradientTransformation) -> Callable:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(painter: PyTree, opt_state: PyTree, images, codes, weights):
        gradient_of = jax.value_and_grad(_loss, has_aux=True)
        (_, terms), gradient = gradient_of(painter, model, images, codes, weights)
        updates, opt_state = optimizer.update(gradient, opt_state, painter)
        return jax.tree.map(jnp.add, painter, updates), opt_state, terms

    return step


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
    terms = {
        "absolute": jnp.sum(weights * jnp.mean(jnp.abs(errors), axis=-1)) / total,
        "squared": jnp.sum(weights * jnp.mean(errors**2, axis=-1)) / total,
    }
    return terms["absolute"] + SQUARES * terms["squared"], terms
