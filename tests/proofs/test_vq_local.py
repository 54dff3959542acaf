# SPDX-License-Identifier: Apache-2.0
"""With image tokenizers of the scenes, the codes of a cell depend only on its content.

The data pipeline looks up codes in a table of appearances; these tests justify that.
"""

import dataclasses
import functools

import einops
import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax.models import vq, vq_files
from sparse_lavida_jax.scenes import world

SCENES = 1000
DECODED = 250  # of them
APPEARANCES = world.NUM_APPEARANCES + 1


@dataclasses.dataclass(frozen=True)
class Coded:
    grids: np.ndarray  # appearances [n 6 6]
    pixels: np.ndarray
    cells: np.ndarray  # codes of every cell [n 6 6 g]
    decoded: np.ndarray
    coded_again: np.ndarray


def cells_of(codes: np.ndarray) -> np.ndarray:
    return einops.rearrange(codes, "n (r i) (c j) -> n r c (i j)", r=world.GRID, c=world.GRID)


def render(grids: np.ndarray) -> np.ndarray:
    return np.stack([world.render(grid) for grid in grids])


@functools.cache
def table(name: str) -> np.ndarray:
    """The codes of each appearance, alone in the middle of an image."""
    grids = np.zeros((APPEARANCES, world.GRID, world.GRID), int)
    grids[:, 3, 2] = np.arange(APPEARANCES)
    return cells_of(vq.encode_images(vq_files.load(name)[0], render(grids)))[:, 3, 2]


@functools.cache
def coded(name: str) -> Coded:
    model, rng = vq_files.load(name)[0], np.random.default_rng(7)
    shape = (SCENES, world.GRID, world.GRID)
    filled = rng.random(shape) < rng.random((SCENES, 1, 1))
    grids = np.where(filled, rng.integers(1, APPEARANCES, shape), world.EMPTY)
    pixels = render(grids)
    codes = vq.encode_images(model, pixels)
    decoded = vq.to_pixels(model, codes[:DECODED])
    again = vq.encode_images(model, decoded)
    return Coded(grids, pixels, cells_of(codes), decoded, cells_of(again))


each_codec = pytest.mark.parametrize(
    ("name", "codes_a_cell"), [("scenes", 1), (stand_ins.FOUR_CODES, 4)]
)


@each_codec
def test_every_appearance_has_codes_of_its_own(name, codes_a_cell):
    assert table(name).shape == (APPEARANCES, codes_a_cell)
    assert len(np.unique(table(name), axis=0)) == APPEARANCES


@pytest.mark.slow
@each_codec
def test_the_table_gives_the_codes_of_whole_scenes(name, codes_a_cell):
    np.testing.assert_array_equal(coded(name).cells, table(name)[coded(name).grids])


@each_codec
def test_an_image_full_of_one_thing_has_the_codes_of_one(name, codes_a_cell):
    full = np.broadcast_to(
        np.arange(APPEARANCES)[:, None, None], (APPEARANCES, world.GRID, world.GRID)
    )
    cells = cells_of(vq.encode_images(vq_files.load(name)[0], render(full)))
    np.testing.assert_array_equal(cells, table(name)[full])


@each_codec
def test_decoded_images_are_close_and_can_be_read(name, codes_a_cell):
    scene = coded(name)
    error = np.abs(scene.pixels[:DECODED].astype(int) - scene.decoded).mean() / 255
    assert error < 0.02
    for grid, pixels in zip(scene.grids[:DECODED], scene.decoded, strict=True):
        assert world.read(pixels) == world.Scene(tuple(grid.ravel().tolist()))


@each_codec
def test_a_drawn_image_can_be_edited_as_if_it_were_rendered(name, codes_a_cell):
    np.testing.assert_array_equal(coded(name).coded_again, coded(name).cells[:DECODED])


@each_codec
def test_the_tokenizer_is_small(name, codes_a_cell):
    assert (vq_files.find(name) / "params.safetensors").stat().st_size < 1_000_000
