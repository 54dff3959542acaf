# SPDX-License-Identifier: Apache-2.0
"""Scores defined by formulas, against other computations and published values."""

import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.linalg

from sparse_lavida_jax.data import images
from sparse_lavida_jax.evals import scorers

words = st.text("abc ", max_size=6)


@functools.cache
def distance(one, other):
    """The definition: the cheapest of the three ways to treat the last characters."""
    if not one or not other:
        return len(one) + len(other)
    return min(
        distance(one[:-1], other) + 1,
        distance(one, other[:-1]) + 1,
        distance(one[:-1], other[:-1]) + (one[-1] != other[-1]),
    )


@hypothesis.given(words, words)
def test_the_edit_distance_is_levenshteins(one, other):
    assert scorers.edit_distance(one, other) == distance(one, other)


@pytest.mark.parametrize(
    ("answer", "wanted", "value"),
    [
        ("The  Coca Cola", ["coca cola", "the coca cola"], 1.0),
        ("coco cola", ["coca cola"], 1 - 1 / 9),
        ("cola", ["coca cola"], 0.0),  # 4 of 9 characters correct: below one half
        ("abcd", ["abxy"], 0.5),
        ("", ["a"], 0.0),
    ],
)
def test_anls_is_that_of_the_site(answer, wanted, value):
    assert scorers.anls(answer, wanted) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "wanted", "right"),
    [
        ("104.9", "100", True), ("105.1", "100", False), ("95", "100", True),
        ("50%", "0.5", True), ("50", "50%", False), ("-10", "-10.4", True),
        ("Blue", " blue", True), ("blue", "dark blue", False), ("0", "0", True),
        ("0.01", "0", False), ("50 %", "50%", True), ("10", "ten", False), ("1.2.3", "1.2", False),
    ],
)  # fmt: skip
def test_numbers_may_differ_by_a_twentieth(answer, wanted, right):
    assert scorers.relaxed_match(answer, wanted) == right


boxes = st.tuples(*[st.integers(0, 9)] * 4).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)


@hypothesis.given(boxes, boxes)
def test_the_overlap_counts_pixels(one, other):
    pixels = np.zeros((2, 10, 10), bool)
    for mask, (x1, y1, x2, y2) in zip(pixels, (one, other), strict=True):
        mask[y1:y2, x1:x2] = True
    either = (pixels[0] | pixels[1]).sum()
    expected = (pixels[0] & pixels[1]).sum() / either if either else 0.0
    assert images.overlap(one, other) == pytest.approx(expected)


def test_a_box_without_area_overlaps_nothing():
    assert images.overlap((5, 5, 2, 2), (0, 0, 9, 9)) == 0.0


def test_the_frechet_distance_is_that_of_a_square_root_of_the_product():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6))
    other = rng.normal(size=(150, 6)) + 0.5
    first, second = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    root = scipy.linalg.sqrtm(first @ second).real
    gap = one.mean(0) - other.mean(0)
    expected = gap @ gap + np.trace(first + second - 2 * root)
    assert scorers.frechet_distance(one, other) == pytest.approx(expected, rel=1e-6)
    assert scorers.frechet_distance(one, one) == pytest.approx(0, abs=1e-6)


def test_the_frechet_distance_of_one_feature_is_of_mean_and_deviation():
    one, other = np.array([[0.0], [2.0]]), np.array([[10.0], [18.0]])
    deviations = 2**0.5, 32**0.5
    expected = (1 - 14) ** 2 + (deviations[0] - deviations[1]) ** 2
    assert scorers.frechet_distance(one, other) == pytest.approx(expected)


def test_a_single_row_of_features_is_refused():
    with pytest.raises(ValueError, match="two rows or more"):
        scorers.frechet_distance(np.ones((1, 3)), np.ones((5, 3)))
