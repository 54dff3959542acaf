# SPDX-License-Identifier: Apache-2.0
"""Samples and training images: the nearest is found, and memorised ones are counted."""

import contextlib
import pathlib
import types

import numpy as np
import pytest
import stand_ins
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.art import art_batches, world
from sparse_lavida_jax.evals import exact, nearest
from sparse_lavida_jax.mixture.records import Record
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.pipeline import SparseLaViDa

ART = config.read(pathlib.Path(__file__).parents[2] / "configs/art.py")
SETTINGS = config.VQ(
    image_size=8, channels=(4, 4), latent_channels=3, codebook_size=8, norm_groups=1
)
MODEL = vq.VQModel(SETTINGS, rngs=nnx.Rngs(0))


def test_the_nearest_is_that_of_the_least_distance():
    training = np.random.default_rng(0).normal(size=(20, 2, 2, 3)).astype(np.float32)
    samples = training[[7, 3, 19]] + 0.01
    np.testing.assert_array_equal(nearest.nearest(samples, training), [7, 3, 19])


@pytest.mark.parametrize("count", [3, nearest.ENOUGH])
def test_what_is_remembered_is_counted(count):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    images[2] = images[0]
    codes = vq.encode_images(MODEL, images)
    records = [
        Record("text_to_image", "own", str(i), (f"image {i}",), target=one[None])
        for i, one in enumerate(codes)
    ]

    class Pipe(SparseLaViDa):
        def __init__(self):
            self.codec = types.SimpleNamespace(vq=MODEL)

        def generate(self, prompts):
            return types.SimpleNamespace(pixels=[images[int(one.split()[1])] for one in prompts])

    said, tiles = nearest.compare(Pipe(), records, 2)
    drawn = count if count == nearest.ENOUGH else 2
    assert f"{drawn} of {drawn} samples share at least 90%" in said
    briefly, shown = nearest.compare(Pipe(), records, 2, is_trained=False)
    assert "trained too briefly to count copies" in briefly and "%" not in briefly
    assert [words for _, words in shown] == [words for _, words in tiles]
    vectors = np.asarray(MODEL.codebook[...])[codes].reshape(count, -1)
    alike = 0
    for i in range(drawn):
        rest = [j for j in range(count) if j != i]
        other = min(rest, key=lambda j, i=i: ((vectors[i] - vectors[j]) ** 2).sum())
        alike += (codes[i] == codes[other]).mean() >= nearest.REMEMBERED
    assert alike and f"{alike} of {drawn} training images share as many with another" in said
    assert "If far more samples than images do, the model has memorised them." in said
    assert [words for _, words in tiles[:2]] == ["image 0", "nearest: image 0"]
    assert ("image tokenizer: 0.0000" in said) == (count == nearest.ENOUGH)


def test_what_was_drawn_in_training_is_shown_next_to_its_nearest_image():
    """The model draws an image of training twice, and then what was asked for."""
    here = exact.world_of(ART)
    asked = [here.sample("draw", exact.EVAL_SEED, number, "test") for number in range(3)]
    encoder = stand_ins.encoder(ART)
    seen = art_batches.ArtBatches(ART, encoder).first("draw", 20)
    drawn = [here.render(one.target) for one in (seen[7], seen[7], asked[2])]

    def cells_of(pixels):
        parts = pixels.reshape(-1, 12, world.CELL, 12, world.CELL, 3).swapaxes(2, 3)
        return parts.reshape(-1, 144, world.CELL**2 * 3).astype(np.int32)

    class Pipe(SparseLaViDa):
        def __init__(self):
            self.settings, self.codec = ART, types.SimpleNamespace(encode=cells_of)
            self.prompts = types.SimpleNamespace(encoder=encoder)

        def generate(self, prompts, **_):
            assert prompts == [one.prompt for one in asked]
            return types.SimpleNamespace(pixels=drawn)

    said, tiles, shares = nearest.remembered(Pipe(), 3, known=20)
    assert (
        "2 of 3 share at least 90% with it" in said and shares[:2] == [1.0, 1.0] and shares[2] < 0.9
    )
    np.testing.assert_array_equal(tiles[1][0], drawn[0])
    assert tiles[1][1:] == (f"nearest: {seen[7].prompt}", None)
    assert [ok for _, _, ok in tiles[::2]] == [False, False, True]


def test_the_background_is_not_compared():
    cells = np.array([[1, 1]] * 5 + [[1, 2], [3, 1]])
    np.testing.assert_array_equal(nearest.is_drawn(cells), [False] * 5 + [True] * 2)
    assert nearest.is_drawn(cells[:3]).all()


def test_the_first_images_of_training_are_those_that_its_batches_show(monkeypatch):
    batches, shown = art_batches.ArtBatches(ART, stand_ins.encoder(ART)), []

    def noted(task, sample, rng):
        shown.append((task, sample.prompt, sample.target))
        raise NotImplementedError  # rows need an encoder

    monkeypatch.setattr(batches, "_example", noted)
    (group,) = (name for name, members in batches.groups.items() if "draw" in members)
    for number in range(40):
        with contextlib.suppress(NotImplementedError):
            batches.made(group, number, 0)
    drawn = [tuple(rest) for task, *rest in shown if task == "draw"]
    found = [(one.prompt, one.target) for one in batches.first("draw", len(drawn))]
    assert len(drawn) > 5 and found == drawn
