# SPDX-License-Identifier: Apache-2.0
"""The bundled image tokenizer of real art: its bars, cells that are independent, its training."""

import dataclasses
import io

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge, sheet, training_images, world
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.models import vq, vq_files
from sparse_lavida_jax.models.image_codec import ImageCodec
from sparse_lavida_jax.training import train_painter

SCENES = 48


@pytest.fixture(scope="module")
def model():
    return vq_files.load("art")[0]


@pytest.fixture(scope="module")
def images():
    return np.stack([world.render(ArtDice(7, "cells", i).scene()) for i in range(SCENES)])


@pytest.fixture(scope="module")
def codes(model, images):
    return vq.encode_images(model, images, batch=4)


def test_things_in_reconstructions_are_named_rightly_and_are_of_one_style(model, images, codes):
    decoded = vq.to_pixels(model, codes, batch=4)
    shares = judge.naming(images, decoded)
    # Of 1,024 held-out scenes .998 are named and .956 coherent (benchmarks/results/cpu/preview).
    # Here are 133 things: all are named, and one that is not leaves .992.
    assert shares["named"] >= 0.99
    assert shares["coherent"] >= 0.92
    assert shares["ghosts"] <= 1 / SCENES
    squares = np.square((images.astype(int) - decoded) / 255).mean()
    assert -10 * np.log10(squares) >= 27  # dB


def test_other_pixels_in_one_cell_change_no_codes_of_others(model, images, codes):
    changed = images.copy()
    changed[:4, 40:48, 16:24] = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3))
    differs = vq.encode_images(model, changed[:4], batch=4) != codes[:4]
    assert differs[:, 10:12, 4:6].any()
    differs[:, 10:12, 4:6] = False
    assert not differs.any()


def test_a_block_is_painted_from_the_codes_of_four_blocks_around_it_and_no_farther(model, codes):
    near = slice(16 - 4, 17 + 4)
    other = codes[:4].copy()
    other[:, 16, 16] = 500
    before, after = (vq.to_pixels(model, one, batch=4) for one in (codes[:4], other))
    differs = (before != after).any(axis=-1).reshape(4, 24, 4, 24, 4).any(axis=(2, 4))
    beyond_its_cell = differs.copy()
    beyond_its_cell[:, 16:18, 16:18] = False
    assert differs[:, 16, 16].all() and beyond_its_cell.any()
    differs[:, near, near] = False
    assert not differs.any()


def test_an_empty_scene_is_exact_on_every_background(model):
    empty = [world.render(world.ArtScene(name, ())) for name in world.BACKGROUNDS]
    images = np.stack(empty)[:4]
    codes = vq.encode_images(model, images, batch=4)
    assert (codes == np.arange(4)[:, None, None]).all()
    assert (vq.to_pixels(model, codes, batch=4) == images).all()


def test_a_model_with_four_codes_a_cell_takes_it(images):
    settings = config.Model(codes_per_token=4, grid_size=12, codebook_size=1024)
    codec = ImageCodec("art", settings)
    cells = codec.encode(images[:1])
    assert cells.shape == (1, 144, 4)
    assert judge.naming(images[:1], codec.to_pixels(cells))["named"] == 1
    with pytest.raises(config.ConfigError, match="choose another Data"):
        ImageCodec("art", dataclasses.replace(settings, codebook_size=512))


def test_a_cell_that_is_cut_is_refused(model):
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode(jnp.zeros((1, 12, 8, 3)))


def test_the_codes_of_a_drawing_hardly_depend_on_the_background(model):
    thing = world.Placed(4, 4, "owl", "noto", "large", "")
    images = np.stack([world.render(world.ArtScene(name, (thing,))) for name in world.BACKGROUNDS])
    codes = vq.encode_images(model, images, batch=5)[:, 4:14, 4:14]
    drawn = (codes >= len(world.BACKGROUNDS)).all(axis=0)
    assert drawn.mean() > 0.5
    assert (codes == codes[:1])[:, drawn].mean() > 0.9


def test_the_painter_learns_one_thing_and_then_goes_on_with_the_same_codes(tmp_path):
    whole = sheet.load()
    one = sheet.Sheet(whole.things[:1], {size: part[:1] for size, part in whole.sprites.items()})
    vq_settings = config.VQ(kind="cells", codebook_size=45, latent_channels=32, layers_per_block=1)
    train = config.Train(stage="vq", train_steps=240, batch_size=2)
    rates = {"learning_rate": 3e-2, "warmup_steps": 2, "final_fraction": 0.02}
    optimizer = config.Optimizer(**rates, b1=0.9, b2=0.99)
    settings = config.Config(vq=vq_settings, train=train, optimizer=optimizer)
    console = rich.console.Console(file=io.StringIO())
    fitted = train_painter.fit(settings, one, console)
    images, weights = training_images.TrainingImages.of(one).batch(np.random.default_rng(5), 4)
    codes = vq.encode_images(fitted, images, batch=4)
    assert len(np.unique(weights[codes < len(world.BACKGROUNDS)])) < len(np.unique(weights))
    painted = np.square(vq.to_pixels(fitted, codes, batch=4) - images.astype(float)).mean()
    vq_files.save(tmp_path, fitted)
    begun = dataclasses.replace(train, init_from=str(tmp_path), train_steps=40)
    slower = dataclasses.replace(optimizer, learning_rate=5e-3)
    further = dataclasses.replace(settings, train=begun, optimizer=slower)
    learned = train_painter.fit(further, one, console)
    np.testing.assert_array_equal(learned.codebook[...], fitted.codebook[...])
    now = np.square(vq.to_pixels(learned, codes, batch=4) - images.astype(float)).mean()
    assert 0 != abs(now - painted) and now < 1.05 * painted
    other = dataclasses.replace(vq_settings, latent_channels=16)
    with pytest.raises(config.ConfigError, match="other settings"):
        train_painter.fit(dataclasses.replace(further, vq=other), one, console)
    fitted.painter.out.kernel = nnx.Param(0 * fitted.painter.out.kernel)
    fitted.painter.out.bias = nnx.Param(0 * fitted.painter.out.bias)
    plain = np.square(vq.to_pixels(fitted, codes, batch=4) - images.astype(float)).mean()
    assert painted < 0.8 * plain
    with pytest.raises(KeyboardInterrupt):
        train_painter.fit(settings, one, console, lambda step: step == 1)


def test_most_drawings_are_of_the_things_to_be_seen_often():
    names = "lion", "camera"
    scenes = training_images.TrainingImages.of(sheet.load(), names)
    looks = scenes.looks[0]
    rng = np.random.default_rng(0)
    shown = [looks.names[scenes._look(rng, 0)] in names for _ in range(400)]
    assert 0.65 < np.mean(shown) < 0.85
