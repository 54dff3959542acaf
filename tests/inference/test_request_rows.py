# SPDX-License-Identifier: Apache-2.0
"""Inputs become rows, and masks and boxes become cells."""

import dataclasses
import re
import time
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import stand_ins
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference import checks, regions, requests
from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.prompting.gaps import parse_template, words_template
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import options, presets

IMAGE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def result(*shown):
    return Result("generate", (), (), config.Sampling(), Origin(), {}, pixels=shown)


def test_images_come_from_arrays_images_files_and_results(tmp_path):
    path = tmp_path / "picture.png"
    image_files.write(path, IMAGE)
    given = [IMAGE, Image.fromarray(IMAGE), path, str(path), result(IMAGE, IMAGE)]
    shown = requests.shown_images(given)
    assert len(shown) == 6
    for one in shown:
        np.testing.assert_array_equal(one.pixels, IMAGE)
    assert [one.path for one in shown] == [None, None, path, path, None, None]
    with pytest.raises(image_files.ImageError, match="'generate' holds no image"):
        requests.shown_images(result())


def test_one_of_either_goes_with_all_of_the_other():
    def rows(words, shown, copies=1, seed=5):
        pairs = requests.paired(words, shown, copies)
        seeds = checks.row_seeds(seed, len(pairs), copies)
        return [(*pair, seed) for pair, seed in zip(pairs, seeds, strict=True)]

    def short(rows):
        return [(words, len(images), seed) for words, images, seed in rows]

    assert short(rows("a", None)) == [("a", 0, 5)]
    assert short(rows(["a", "b"], IMAGE)) == [("a", 1, 5), ("b", 1, 6)]
    assert short(rows("a", [IMAGE, IMAGE], seed=[9, 2])) == [("a", 1, 9), ("a", 1, 2)]
    copied = [("a", 0, 5), ("a", 0, 6), ("b", 0, 7), ("b", 0, 8)]
    assert short(rows(["a", "b"], None, copies=2)) == copied
    assert short(rows(["a", "b"], None, copies=2, seed=[5, 7])) == copied


@pytest.mark.parametrize(
    ("words", "shown", "told"),
    [
        (["a", "b"], [IMAGE] * 3, "2 prompts and 3 images do not go together"),
        ([], IMAGE, "give at least one prompt"),
        ("\n", None, "the prompt is empty"),
    ],
)
def test_rows_that_do_not_go_together_are_reported(words, shown, told):
    with pytest.raises(RequestError, match=told):
        requests.paired(words, shown)


def test_wrong_seeds_are_refused():
    assert checks.row_seeds(3, 2) == [3, 4]
    with pytest.raises(RequestError, match="1 seeds were given for 2 rows"):
        checks.row_seeds([3], 2)
    assert checks.row_seeds(2**31 - 1, 2) == [2**31 - 1, 0]
    with pytest.raises(RequestError, match="seed=-1 is out of range: 0 to 18446744073709551615"):
        checks.row_seeds(-1, 2)


def test_numbers_are_those_of_all_rows_or_of_each():
    assert checks.row_numbers("temperature", [0, None], 2) == [0.0, None]
    assert checks.row_numbers("guidance", 1.5, 2) == [1.5, 1.5]
    with pytest.raises(RequestError, match="3 values of temperature were given for 2 rows: give"):
        checks.row_numbers("temperature", [0.1, 0.2, 0.3], 2)
    for wrong in (-1, float("nan"), float("inf"), 1e308, 101):
        told = re.escape(f"guidance={wrong} is out of range: it must be 0 to 100")
        with pytest.raises(RequestError, match=told):
            checks.row_numbers("guidance", [1.0, wrong], 2)
        with pytest.raises(config.ConfigError, match=r"guidance=.* is out of range"):
            config.Sampling(guidance=wrong)


@pytest.mark.parametrize("words", ["a \ud800 circle", ["a", "b\udfff"]])
def test_half_a_character_is_reported(words):
    with pytest.raises(RequestError, match="of the prompt is half a character: leave it out"):
        requests.paired(words, None)
    with pytest.raises(RequestError, match="half a character"):
        parse_template("___ \ud800")
    with pytest.raises(RequestError, match="half a character"):
        words_template(["\ud800"])


def test_scales_of_a_row_are_its_own_or_those_of_the_settings():
    """All are numbers once a request is made, and its own guidance applies to edits too."""
    asked = config.Sampling(
        temperature=0.4, guidance=4.0, guidance_edit=1.2, text=config.TextSampling(temperature=0.6)
    )
    own = {"temperature": [0.0, None], "guidance": [None, 1.5]}
    first, second = requests._scales(asked, own, 2, 1, draws=True)
    assert first == presets.scales(asked, "image") | {"temperature": 0.0}
    assert second == presets.scales(asked, "image") | {"guidance": 1.5, "guidance_edit": -1.0}
    assert requests._scales(asked, {}, 1, 1, draws=False) == [presets.scales(asked, "text")]
    row = Request(task="generate", sampling=asked, **second)
    alone = dataclasses.replace(asked, guidance=1.5, guidance_edit=-1.0)
    assert row.own_sampling == alone
    assert (
        Request(task="generate", sampling=asked, **presets.scales(asked, "image")).own_sampling
        == asked
    )


@pytest.mark.parametrize(
    ("scales", "image", "edit"),
    [
        ({"guidance": 0.0}, False, False),
        ({"guidance": 3.0}, True, True),
        ({"guidance": 3.0, "guidance_edit": 0.0}, True, False),
        ({"guidance": 0.0, "guidance_edit": 2.0}, False, True),
        ({"guidance": 0.0, "guidance_image": 1.0}, False, True),
    ],
)
def test_a_row_is_guided_if_a_scale_of_its_kind_is(scales, image, edit):
    row = Request(task="", **scales)
    assert presets.is_guided(row, has_source=False) == image
    assert presets.is_guided(row, has_source=True) == edit


@hypothesis.given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 40), st.data())
def test_a_cell_is_untouched_where_no_pixel_overlaps_it(grid, height, width, data):
    y, x = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    pixels = np.zeros((height, width), bool)
    pixels[y, x] = True
    free = ~regions.cell_mask(pixels, grid)
    for row in range(grid):
        for column in range(grid):
            apart = (
                (y + 1) * grid <= row * height
                or y * grid >= (row + 1) * height
                or (x + 1) * grid <= column * width
                or x * grid >= (column + 1) * width
            )
            assert free[row, column] == apart


def test_cells_of_a_large_mask_take_little_time_and_memory():
    pixels = np.zeros((4096, 4096), bool)
    pixels[-1, -1] = True
    tracemalloc.start()
    began = time.thread_time()
    try:
        free = ~regions.cell_mask(pixels, 64)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began < 1
    assert not free[-1, -1] and free.sum() == 64 * 64 - 1


def test_an_image_stands_in_whole_cells(caplog):
    tall = np.zeros((64, 32, 3), np.uint8)
    assert regions.inner_box(tall, None, 96, 16) == (32, 16, 64, 80)
    assert regions.inner_box(tall, (17, 30, 40, 33), 96, 16) == (16, 16, 48, 48)
    large = np.zeros((960, 480, 3), np.uint8)
    assert caplog.messages == []
    assert regions.inner_box(large, None, 96, 16) == (32, 16, 64, 64)
    assert caplog.messages == ["the image is as large as the new one, 96 pixels: it is halved."]
    with pytest.raises(image_files.ImageError, match="leaves nothing to draw"):
        regions.inner_box(tall, (1, 1, 95, 95), 96, 16)
    canvas, mask = regions.placed(tall + 9, (32, 16, 64, 80), 96, 16)
    assert (canvas[16:80, 32:64] == 9).all()
    assert canvas.sum() == 9 * 64 * 32 * 3
    assert np.argwhere(~mask)[[0, -1]].tolist() == [[1, 2], [4, 3]]


def test_an_image_that_is_recorded_must_be_the_same(tmp_path):
    path = tmp_path / "picture.png"
    image_files.write(path, IMAGE)
    (shown,) = requests.shown_images(path)
    record = {"picture": shown.as_json()}
    assert requests.recorded_image({"picture": None}, None) is None
    np.testing.assert_array_equal(requests.recorded_image(record, None).pixels, IMAGE)
    with pytest.raises(RequestError, match="their pixels differ"):
        requests.recorded_image(record, IMAGE + 1)
    with pytest.raises(RequestError, match="an image of no file"):
        requests.recorded_image({"picture": requests.ShownImage(IMAGE).as_json()}, None)


def test_a_quality_is_a_number_of_steps_and_revisions():
    def found(own, cells):
        return [options.quality_options(one, own, cells) for one in options.QUALITIES]

    own = config.Sampling(num_steps=12)
    assert found(own, 144) == [{"steps": 6}, {"steps": 12}, {"steps": 24}]
    own = dataclasses.replace(own, low_steps=3, revisions=9)
    assert [tuple(one.values()) for one in found(own, 16)] == [(3, 5), (12, 9), (16, 16)]
    with pytest.raises(RequestError, match=r"'best'.*choose one of low, medium, high"):
        options.quality_options("best", own, 144)


def test_a_request_has_a_quality_or_a_number_of_steps():
    pipe = stand_ins.pipe_of_tasks(("draw",), 1)
    (made,) = pipe.requests("generate", "a red circle", quality="low")
    own = pipe.settings.sampling
    assert made.sampling.num_steps == max(1, own.num_steps // 2)
    how = {"sampling": dataclasses.replace(own, revisions=4)}
    halved, kept = (
        pipe.requests("generate", "a red circle", quality="low", **how, **more)[0]
        for more in ({}, {"revisions": 3})
    )
    assert (halved.sampling.revisions, kept.sampling.revisions) == (2, 3)
    with pytest.raises(RequestError, match=r"quality is a number of steps.*give one of them"):
        pipe.requests("generate", "a red circle", quality="low", num_inference_steps=3)
    small = config.changed(pipe.settings, {"model": {"cell_positions": False}})
    smaller = requests.RequestMaker(small, pipe.prompts, pipe.codec.image_size)
    cell = pipe.codec.image_size // small.model.grid_size
    asked = {"quality": "high", "size": (cell, 3 * cell)}
    (made,) = smaller.make("generate", "a red circle", None, asked)
    assert made.sampling.num_steps == 3 < 2 * own.num_steps
    with pytest.raises(RequestError, match="ask takes no quality"):
        pipe.requests("ask", "how many?", quality="low")
