# SPDX-License-Identifier: Apache-2.0
"""Views, tokens, crops and boxes of images."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.data import images

RELEASED = config.Vision(
    image_size=384, patch_size=14, pool=2, newline=True,
    grid_sizes=((384, 768), (768, 384), (768, 768), (1152, 384), (384, 1152)),
)  # fmt: skip
# A feature covers two by two pixels, so that its content can be looked up.
SMALL = config.Vision(
    image_size=8, patch_size=2, pool=1, newline=True,
    grid_sizes=((8, 16), (16, 8), (16, 16), (24, 8), (8, 24)),
)  # fmt: skip
SIZES = st.tuples(st.integers(1, 60), st.integers(1, 60))


def noise(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def filled(width, height, value=255):
    return np.full((height, width, 3), value, np.uint8)


# --- the vision tower ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "grid", "tokens"),
    [
        ((1024, 1024), (768, 768), 871),
        ((512, 512), (768, 768), 871),
        ((640, 480), (768, 768), 709),
        ((1024, 768), (768, 768), 709),
        ((480, 640), (768, 768), 715),
        ((1920, 1080), (768, 768), 547),
        ((1080, 1920), (768, 768), 559),
        ((2000, 500), (1152, 384), 529),
        ((384, 384), (384, 768), 365),
    ],
)
def test_released_images_become_as_many_tokens_as_the_specification_counts(size, grid, tokens):
    assert images.choose_grid(size, RELEASED.grid_sizes) == grid
    assert len(images.token_index(size, RELEASED)) == tokens
    assert len(images.token_index(size, RELEASED, whole=True)) == 170


def test_of_grids_that_show_as_much_the_smallest_is_chosen():
    assert images.choose_grid((4, 8), ((16, 16), (8, 16), (16, 8))) == (8, 16)


def test_the_released_arithmetic_cuts_a_fraction_off():
    """13 * (360 / 13) is less than 360 in floats: this gives 12 rows instead of 14."""
    assert len(images.token_index((360, 360), RELEASED)) == 169 + 12 * 14


@hypothesis.given(SIZES)
def test_tokens_are_the_whole_image_then_rows_that_end_with_a_newline(size):
    width, height = images.choose_grid(size, SMALL.grid_sizes)
    newline = SMALL.num_tokens * (1 + width * height // SMALL.image_size**2)
    index = images.token_index(size, SMALL)
    np.testing.assert_array_equal(index[: SMALL.num_tokens], np.arange(SMALL.num_tokens))
    after = index[SMALL.num_tokens :]
    rows = np.split(after, np.flatnonzero(after == newline) + 1)
    assert len(rows.pop()) == 0
    assert len({len(row) for row in rows}) <= 1  # a very long image may have no row
    tokens = after[after != newline]
    assert len(set(tokens)) == len(tokens)
    assert ((SMALL.num_tokens <= tokens) & (tokens < newline)).all()


@hypothesis.given(SIZES)
def test_tokens_that_are_left_out_show_padding(size):
    """Half a feature on either side may be dropped too, and one row of padding may stay.

    As in the release, an image many times longer than wide may lose all rows.
    """
    hypothesis.assume(max(size) <= 4 * min(size))
    seen = images.see(filled(*size), SMALL)
    shown = seen.pixels.reshape(len(seen.pixels), 4, 2, 4, 2, 3).any(axis=-1).mean(axis=(2, 4))
    shown = np.append(shown.reshape(-1), 1.0)  # per feature; the newline counts as content
    left_out = np.setdiff1d(np.arange(seen.num_features), seen.index)
    assert (shown[left_out] <= 0.5).all()
    after = seen.index[SMALL.num_tokens :]
    rows = after.reshape((after == seen.num_features - 1).sum(), -1)[:, :-1]
    assert (~shown[rows].any(axis=1)).sum() <= 1
    assert (~shown[rows].any(axis=0)).sum() <= 1


def test_an_image_as_large_as_its_grid_is_cut_into_squares():
    image = noise(24, 8)
    cut = images.tiles(image, (24, 8), 8)
    np.testing.assert_array_equal(cut, [image[:, :8], image[:, 8:16], image[:, 16:]])
    image = noise(16, 16)
    cut = images.tiles(image, (16, 16), 8)
    np.testing.assert_array_equal(cut[1], image[:8, 8:])
    np.testing.assert_array_equal(cut[2], image[8:, :8])


def test_tiles_show_the_image_in_the_middle_of_black():
    top, bottom = images.tiles(filled(4, 4), (8, 16), 8)
    np.testing.assert_array_equal(top, np.concatenate([filled(8, 4, 0), filled(8, 4)]))
    np.testing.assert_array_equal(bottom, np.concatenate([filled(8, 4), filled(8, 4, 0)]))
    (wide,) = images.tiles(filled(1, 2), (8, 8), 8)
    np.testing.assert_array_equal(wide[0, :, 0], [0, 0, 255, 255, 255, 255, 0, 0])


def test_a_large_image_is_made_smaller_before_it_is_padded_to_a_square(monkeypatch):
    assert images.shrunk(filled(40, 2), 10).shape == (1, 10, 3)
    assert images.shrunk(filled(2, 400), 10).shape == (10, 1, 3)
    small = noise(10, 7)
    assert images.shrunk(small, 10) is small
    monkeypatch.setattr(images, "LARGEST_PADDED", 16)
    padded = []
    centred = images._centred

    def seen(image, size, *more):
        padded.append(size)
        return centred(image, size, *more)

    monkeypatch.setattr(images, "_centred", seen)
    large, small = filled(64, 32), filled(16, 8)
    np.testing.assert_array_equal(images.whole_view(large, 8), images.whole_view(small, 8))
    np.testing.assert_array_equal(images.source_view(large, 8, 4), images.source_view(small, 8, 4))
    assert padded == [(16, 16), (16, 16)]


def test_the_whole_view_has_grey_above_and_below_a_wide_image():
    view = images.whole_view(filled(8, 4), 8)
    np.testing.assert_array_equal(view[:, 0, 0], [127, 127, 255, 255, 255, 255, 127, 127])
    view = images.whole_view(filled(5, 8), 8)  # three columns do not divide: one left, two right
    np.testing.assert_array_equal(view[0, :, 0], [127, *[255] * 5, 127, 127])
    image = noise(8, 8)
    np.testing.assert_array_equal(images.whole_view(image, 8), image)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("newline", [False, True])
def test_features_are_those_of_all_views_and_the_newline(whole, newline):
    settings = dataclasses.replace(SMALL, newline=newline)
    seen = images.see(noise(16, 16), settings, whole=whole)
    assert seen.pixels.shape == (1 if whole else 5, 8, 8, 3)
    assert seen.num_features == len(seen.pixels) * 16 + newline
    assert set(seen.index) == set(range(seen.num_features))
    assert (seen.part.num_tokens, seen.part.feature_count) == (len(seen.index), seen.num_features)


def test_a_model_without_tiles_sees_an_image_whole():
    settings = dataclasses.replace(SMALL, grid_sizes=(), newline=False)
    seen = images.see(noise(9, 4), settings)
    np.testing.assert_array_equal(seen.pixels, images.whole_view(noise(9, 4), 8)[None])
    np.testing.assert_array_equal(seen.index, np.arange(settings.num_tokens))


def test_an_empty_image_is_refused():
    with pytest.raises(ValueError, match="5x0 pixels is empty: give it pixels"):
        images.see(filled(5, 0), SMALL)


# --- the image tokenizer ---------------------------------------------------------------------


def test_the_source_of_an_edit_is_padded_with_black():
    view = images.source_view(filled(4, 8), 8, 4)
    np.testing.assert_array_equal(view[3, :, 0], [0, 0, 255, 255, 255, 255, 0, 0])
    view = images.source_view(filled(5, 8), 8, 4)  # three columns do not divide: two left
    np.testing.assert_array_equal(view[0, :, 0], [0, 0, *[255] * 5, 0])
    assert images.source_view(noise(33, 50), 32, 16).shape == (32, 32, 3)


@pytest.mark.parametrize("side", [24, 0])
def test_images_that_do_not_divide_into_codes_are_refused(side):
    message = f"{side}x{side} pixels do not divide into codes of 16x16 pixels: use a multiple of 16"
    with pytest.raises(ValueError, match=message):
        images.source_view(noise(8, 8), side, 16)
    with pytest.raises(ValueError, match=message):
        images.training_crop(noise(8, 8), side, 0, 0, 16)


@pytest.mark.parametrize(
    ("size", "resized"), [((640, 480), (341, 256)), ((480, 640), (256, 341)), ((7, 7), (256, 256))]
)
def test_the_shortest_side_becomes_the_side_of_the_crop(size, resized):
    assert images.size_to_crop(size, 256) == resized


def test_a_crop_is_taken_where_it_is_asked_for():
    image = noise(24, 16)
    crop = images.training_crop(image, 16, 0, 5, 16)
    np.testing.assert_array_equal(crop, image[:, 5:21])
    crop = images.training_crop(image.transpose(1, 0, 2), 16, 8, 0, 16)
    np.testing.assert_array_equal(crop, image.transpose(1, 0, 2)[8:])


@pytest.mark.parametrize(("top", "left"), [(1, 0), (0, 9), (-1, 0), (0, -1)])
def test_a_crop_over_the_edge_is_refused(top, left):
    with pytest.raises(ValueError, match=r"is 24x16 after resizing: top is one of 0..0, left one"):
        images.training_crop(noise(24, 16), 16, top, left, 16)


def test_the_centre_crop_is_the_middle():
    image = noise(24, 16)
    np.testing.assert_array_equal(images.centre_crop(image, 16), image[:, 4:20])
    assert images.centre_crop(image, 32).shape == (32, 32, 3)


def test_crops_for_training_are_bilinear_and_those_of_the_benchmark_lanczos():
    image = noise(40, 40)
    for crop, kernel in (
        (images.training_crop(image, 16, 0, 0, 16), Image.Resampling.BILINEAR),
        (images.centre_crop(image, 16), Image.Resampling.LANCZOS),
    ):
        expected = np.asarray(Image.fromarray(image).resize((16, 16), kernel))
        np.testing.assert_array_equal(crop, expected)


def test_luminance_of_green_and_contrast_of_black_and_white():
    green = filled(4, 4) * np.array([0, 1, 0], np.uint8)
    assert images.luminance_and_contrast(green) == pytest.approx((0.7152, 0.0))
    halves = np.concatenate([filled(4, 2), filled(4, 2, 0)])
    assert images.luminance_and_contrast(halves) == pytest.approx((0.5, 0.5))


# --- boxes -----------------------------------------------------------------------------------


def test_boxes_are_in_the_frame_of_the_padded_image():
    assert images.box_to_locations((0, 0, 640, 480), (640, 480), 1024) == (0, 128, 1024, 896)
    assert images.box_to_locations((0, 0, 480, 640), (480, 640), 1024) == (128, 0, 896, 1024)
    assert images.locations_to_box((0, 128, 512, 512), (640, 480), 1024) == (0, 0, 320, 240)


def test_locations_are_those_of_what_the_model_sees():
    image = filled(20, 12, 0)
    image[2:6, 5:15] = 255
    x1, y1, x2, y2 = images.box_to_locations((5, 2, 15, 6), (20, 12), 40)
    rows, columns = np.nonzero(images.whole_view(image, 40)[..., 0] > 192)
    assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (x1, y1, x2, y2)


def test_halves_are_rounded_up_and_edges_clipped():
    assert images.box_to_locations((0.5, 1.5, 2.49, 99.0), (8, 8), 8) == (1, 2, 2, 8)
    assert images.box_to_locations((-3.0, 0.0, 8.0, 8.0), (8, 8), 8) == (0, 0, 8, 8)
    assert images.locations_to_box((0, 0, 8, 8), (8, 4), 8) == (0, 0, 8, 4)


@hypothesis.given(SIZES, st.tuples(*[st.floats(0, 1)] * 4), st.sampled_from([24, 1024]))
def test_a_box_comes_back_to_half_a_location(size, fractions, frame):
    box = tuple(fraction * size[i % 2] for i, fraction in enumerate(fractions))
    back = images.locations_to_box(images.box_to_locations(box, size, frame), size, frame)
    np.testing.assert_allclose(back, box, atol=max(size) / (2 * frame) + 1e-9)
