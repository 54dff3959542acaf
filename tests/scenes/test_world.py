# SPDX-License-Identifier: Apache-2.0
"""Drawn images can be read back, even blurred; broken ones are refused."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sparse_lavida_jax.scenes import world
from sparse_lavida_jax.scenes.world import Object, Scene, Unreadable

CELL = 16
grids = st.lists(
    st.one_of(st.just(0), st.integers(0, world.NUM_APPEARANCES)), min_size=36, max_size=36
)


def alone(*cells):
    """A scene with these appearances in the first cells."""
    return Scene(tuple(cells) + (0,) * (world.NUM_CELLS - len(cells)))


def everything():
    """Scenes that show all appearances."""
    return [alone(*range(1, 37)), alone(*range(37, 49))]


def blurred(pixels, rng):
    """Each pixel averaged with its neighbours, every channel off by a tint, and some noise."""
    padded = np.pad(pixels.astype(float), ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    both = (rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / 4
    noisy = both + rng.normal(0, 4, 3) + rng.normal(0, 5, both.shape)
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)


@hypothesis.given(grids, st.sampled_from([48, 66, 96, 192]))
def test_what_is_drawn_is_read(cells, size):
    scene = Scene(tuple(cells))
    pixels = world.render(scene, size)
    assert pixels.shape == (size, size, 3)
    assert world.read(pixels) == scene


def test_a_blurred_tinted_noisy_image_is_read():
    rng = np.random.default_rng(0)
    for _ in range(10):
        for scene in everything():
            assert world.read(blurred(world.render(scene), rng)) == scene


def test_a_cell_depends_only_on_what_stands_in_it():
    rng = np.random.default_rng(1)
    grid = rng.integers(0, 49, (6, 6))
    pixels = world.render(grid)
    for y in range(6):
        for x in range(6):
            patch = pixels[y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL]
            np.testing.assert_array_equal(patch, world.stamps_of(CELL)[grid[y, x]])


def test_objects_have_the_colour_and_the_extent_they_are_called():
    for thing in world.OBJECTS:
        pixels = world.render(alone(thing.index))[:CELL, :CELL]
        touched = (pixels != world.BACKGROUND).any(axis=-1)
        rows, columns = np.flatnonzero(touched.any(axis=1)), np.flatnonzero(touched.any(axis=0))
        # 8 pixels, or 13 whose edges fall on half pixels.
        extent = {"small": 8, "large": 14}[thing.size]
        assert columns[-1] - columns[0] + 1 == rows[-1] - rows[0] + 1 == extent
        assert tuple(pixels[CELL // 2, CELL // 2]) == world.PAINT[thing.colour]


def test_edges_are_anti_aliased():
    pixels = world.render(alone(Object("circle", "red", "large").index))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 5


def test_half_an_object_is_refused_with_its_place():
    for thing in world.OBJECTS:
        for half in (np.s_[:8], np.s_[8:], np.s_[:, :8], np.s_[:, 8:]):
            pixels = world.render(Scene.of({8: thing}))
            pixels[CELL : 2 * CELL, 2 * CELL : 3 * CELL][half] = world.BACKGROUND
            found = world.read(pixels)
            assert isinstance(found, Unreadable), thing
            assert "row 2, column 3" in found.reason
            assert found.cells[8] == world.UNREADABLE
            assert found.cells[:8] == (0,) * 8


def test_two_things_in_one_cell_are_refused():
    rng = np.random.default_rng(2)
    stamps = world.stamps_of(CELL)
    refused = 0
    for _ in range(200):
        first, second = rng.choice(np.arange(1, 49), 2, replace=False)
        pixels = world.render(world.EMPTY_SCENE)
        pixels[:CELL, :8] = stamps[first][:, :8]
        pixels[:CELL, 8:CELL] = stamps[second][:, 8:]
        refused += isinstance(world.read(pixels), Unreadable)
    # Red and blue halves of one shape may look like a purple one.
    assert refused >= 196


def test_noise_is_refused():
    noise = np.random.default_rng(3).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    assert isinstance(world.read(noise), Unreadable)


@pytest.mark.parametrize("shape", [(100, 100, 3), (96, 48, 3), (6, 6, 3)])
def test_an_image_of_a_wrong_size_is_an_error_that_says_the_sizes(shape):
    with pytest.raises(ValueError, match=r"multiple of 6 pixels, at least 48"):
        world.read(np.zeros(shape, np.uint8))


def test_a_scene_changes_only_where_it_is_changed():
    scene = alone(1, 2, 3)
    changed = scene.changed({1: 0, 5: 7})
    assert changed.cells[:6] == (1, 0, 3, 0, 0, 7)
    assert [cell for cell, _ in changed.objects()] == [0, 2, 5]
    assert len(changed) == 3
