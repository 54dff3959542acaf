# SPDX-License-Identifier: Apache-2.0
"""The bundled image tokenizer of real art: its bars, cells that are independent, and its fit."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.art import codebook, judge, sheet, world
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.models import vq, vq_files
from sparse_lavida_jax.models.image_codec import ImageCodec

SCENES = 24


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
    assert shares["named"] >= 0.99
    assert shares["coherent"] >= 0.9
    assert shares["ghosts"] == 0
    squares = np.square((images.astype(int) - decoded) / 255).mean()
    assert -10 * np.log10(squares) >= 27  # dB


def test_other_pixels_in_one_cell_change_no_codes_of_others(model, images, codes):
    changed = images.copy()
    changed[:4, 40:48, 16:24] = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3))
    differs = vq.encode_images(model, changed[:4], batch=4) != codes[:4]
    assert differs[:, 10:12, 4:6].any()
    differs[:, 10:12, 4:6] = False
    assert not differs.any()


def test_an_empty_scene_is_exact_on_every_background(model):
    empty = [world.render(world.ArtScene(name, ())) for name in world.BACKGROUNDS]
    images = np.stack(empty)[:4]
    codes = vq.encode_images(model, images, batch=4)
    assert (codes.reshape(4, -1).max(axis=1) == 204 * np.arange(4)).all()
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


def test_a_codebook_of_one_thing_draws_it_as_it_is():
    whole = sheet.load()
    one = sheet.Sheet(whole.things[:1], {size: part[:1] for size, part in whole.sprites.items()})
    said = []
    settings = config.VQ(kind="cells", codebook_size=160)
    fitted = vq.CellModel(settings, rngs=nnx.Rngs(0))
    contents = codebook.fit(one, 160, said.append)
    assert not contents[0].any()
    fitted.codebook = nnx.Param(jnp.asarray(contents, jnp.float16))
    name, drawn = one.things[0].name, one.things[0].drawn
    things = [
        world.Placed(y, y, name, style, "large", drawn)
        for y, style in enumerate(sheet.STYLES)
    ]  # fmt: skip
    images = np.stack([world.render(world.ArtScene("pink", (thing,))) for thing in things])
    copies = vq.to_pixels(fitted, vq.encode_images(fitted, images, batch=3), batch=3)
    assert judge.naming(images, copies)["coherent"] == 1
    assert len(said) == codebook.FIT_ROUNDS
    first, last = (float(line.split(": ")[1].split()[0]) for line in (said[0], said[-1]))
    assert last > first > 20
