# SPDX-License-Identifier: Apache-2.0
"""Views, vision tokens and source images equal the recorded ones (cases C, C2, D, G2)."""

import numpy as np
import PIL
import pytest

from sparse_lavida_jax import config, sequence
from sparse_lavida_jax.convert import settings
from sparse_lavida_jax.data import images
from sparse_lavida_jax.tags import NO_FEATURE

# Recorded with Pillow 13; another version may round a byte the other way, twice.
TOLERANCE = 1e-5 if PIL.__version__.startswith("13.") else 4 / 255


def normalised(views, case):
    """Normalises bytes like the vision tower, channels first."""
    recorded = case.config["siglip_config"]["image_processor"]
    mean, deviation = (np.float32(recorded[name]) for name in ("image_mean", "image_std"))
    return ((views.astype(np.float32) / 255 - mean) / deviation).transpose(0, 3, 1, 2)


def seen(case, image, num_views):
    shown = images.see(image, settings.vision_settings(case.config), whole=num_views == 1)
    assert len(shown.pixels) == num_views
    return shown


@pytest.mark.parametrize("name", ["C_und", "D_edit"])
def test_views_are_the_recorded_ones(case, name):
    case = case(name)
    (expected,) = {**case.inputs, **case.outputs}["pixel_values"]
    shown = seen(case, case.inputs["image_uint8"], len(expected))
    np.testing.assert_allclose(normalised(shown.pixels, case), expected, atol=TOLERANCE)


def test_a_second_image_is_seen_whole_as_recorded(case):
    case = case("C_und")
    expected = case.outputs["two.pixel_values_2"]
    shown = seen(case, case.inputs["two.image_uint8_2"], len(expected))
    np.testing.assert_allclose(normalised(shown.pixels, case), expected, atol=TOLERANCE)


def test_an_image_is_resized_as_the_released_processor_does_it(case):
    case = case("G2_siglip")
    size = tuple(case.config["variants"]["preprocess"]["size"][::-1])
    view = images.resize(case.inputs["image_uint8"], size)
    expected = case.outputs["preprocessed"]
    np.testing.assert_allclose(normalised(view[None], case), expected, atol=TOLERANCE)


def test_the_source_of_an_edit_is_the_recorded_one(case):
    case = case("D_edit")
    (expected,) = case.outputs["enc.pixels"]
    factor = case.config["vq_config"]["downscale_factor"]
    view = images.source_view(case.inputs["image_uint8"], expected.shape[-1], factor)
    np.testing.assert_allclose(view.transpose(2, 0, 1) / 255, expected, atol=TOLERANCE)


def test_vision_tokens_are_the_recorded_features_at_real_geometry(case):
    case = case("C2_anyres_layout")
    tile, side = case.config["tile_size"], case.config["pooled_per_side"]
    vision = config.Vision(
        image_size=tile,
        patch_size=next(patch for patch in range(1, tile + 1) if tile // patch == side),
        pool=1,
        newline=True,
        grid_sizes=tuple((width, height) for width, height in case.config["image_grid_pinpoints"]),
    )
    for recorded in case.config["images"]:
        size, views = (recorded["width"], recorded["height"]), recorded["num_views"]
        index = images.token_index(size, vision, whole=views == 1)
        newline = views * case.config["pooled_tokens"]
        index = np.where(index == newline, case.config["image_newline_marker"], index)
        np.testing.assert_array_equal(index, case.outputs[recorded["map"]], recorded["map"])
        if recorded["resize_hw"] is not None:
            grid = images.choose_grid(size, vision.grid_sizes)
            np.testing.assert_array_equal(grid, case.outputs[recorded["resize_hw"]])
            across_down = np.array(grid) // tile
            np.testing.assert_array_equal(across_down, case.outputs[recorded["grid_wh"]])


def test_vision_tokens_are_spliced_in_as_recorded(case):
    """The features of each image by `Denoiser.see`, then the newline, image after image."""
    case = case("C_und")
    features, newline = case.outputs["projected_features"], case.weights["model.image_newline"]
    features = np.concatenate([features.reshape(-1, len(newline)), newline[None]])
    image = seen(case, case.inputs["image_uint8"], case.outputs["pixel_values"].shape[1])
    is_image = case.outputs["new_input_ids"] == case.config["golden_ids"]["IMAGE_INDEX"]
    spliced = case.outputs["inputs_embeds"][is_image]
    np.testing.assert_allclose(features[image.index], spliced, atol=1e-4)


def test_tokens_of_two_images_stand_where_recorded(case):
    case = case("C_und")
    image = case.config["golden_ids"]["IMAGE_INDEX"]
    views = case.config["variants"]["two"]["views"]
    pictures = [
        seen(case, case.inputs[name], count)
        for name, count in zip(("image_uint8", "two.image_uint8_2"), views, strict=True)
    ]
    (ids,) = case.inputs["two.input_ids"]
    left = iter(pictures)
    parts = [next(left).part if i == image else sequence.Text(np.array([i])) for i in ids]
    mask = case.config["golden_ids"]["MASK"]
    row = sequence.prompt_row((*parts, sequence.Response(1)), text_mask_id=mask, codes_per_token=1)
    spliced = np.where(row.feature == NO_FEATURE, row.ids, image)
    np.testing.assert_array_equal(spliced[None], case.outputs["two.new_input_ids"])

    # The first image's features are recorded, and so is the newline that both end with.
    width = case.outputs["projected_features"].shape[-1]
    newline = case.weights["model.image_newline"][None]
    features = [case.outputs["projected_features"].reshape(-1, width), newline]
    second = np.full((pictures[1].num_features - 1, width), np.nan)
    features = np.concatenate([*features, second, newline])
    expected, known = case.outputs["two.inputs_embeds"][0], row.feature != NO_FEATURE
    found = features[row.feature[known]]
    recorded = ~np.isnan(found).any(axis=1)
    assert recorded.sum() == known.sum() - len(second)
    np.testing.assert_allclose(found[recorded], expected[known][recorded], atol=1e-4)
