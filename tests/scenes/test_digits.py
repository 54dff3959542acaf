# SPDX-License-Identifier: Apache-2.0
"""Digits are drawn, read and judged exactly."""

import subprocess
import sys

import numpy as np
import pytest

from sparse_lavida_jax.data import grey
from sparse_lavida_jax.scenes import digits


def test_splits_are_disjoint_and_complete():
    train, test = digits.load("train")[0], digits.load("test")[0]
    assert (len(train), len(test)) == (1437, 360)
    assert not {codes.tobytes() for codes in train} & {codes.tobytes() for codes in test}


@pytest.mark.parametrize("size", [8, 64, 96])
def test_what_is_drawn_is_read(size):
    for codes in digits.load("test")[0][:50]:
        pixels = grey.render(codes, size)
        assert pixels.shape == (size, size, 3)
        np.testing.assert_array_equal(grey.read(pixels)[:, 0], codes)
    levels = np.arange(64) % grey.LEVELS
    np.testing.assert_array_equal(grey.read(grey.render(levels, size))[:, 0], levels)


def test_the_judge_is_right_about_98_of_100_images_it_never_saw():
    codes, labels = digits.load("test")
    right = [digits.classify(one)[0] == label for one, label in zip(codes, labels, strict=True)]
    assert np.mean(right) == pytest.approx(0.978, abs=0.001)


def test_examples_are_random_access_and_say_their_digit():
    samples = [digits.sample(0, index) for index in range(200)]
    assert {sample.digit for sample in samples} == {*range(10)}
    for index in (199, 3):
        np.testing.assert_array_equal(digits.sample(0, index).codes, samples[index].codes)
    names = {sample.digit: sample.prompt for sample in samples}
    assert names[7] == "a handwritten seven"


def test_a_right_digit_scores_and_a_wrong_one_is_called_what_it_is():
    sample = digits.sample(0, 0)
    assert digits.score(sample, grey.render(sample.codes)).ok
    other = next(s for s in (digits.sample(0, i) for i in range(99)) if s.digit != sample.digit)
    judged = digits.score(sample, grey.render(other.codes))
    assert not judged.ok
    assert judged.reason == (
        f"this is a {digits.NAMES[other.digit]}, not a {digits.NAMES[sample.digit]}"
    )


def test_noise_and_blank_paper_are_no_digits():
    sample = digits.sample(0, 0)
    noise = np.random.default_rng(0).integers(0, 17, 64)
    for codes in (noise, np.zeros(64, int), np.full(64, 16)):
        judged = digits.score(sample, grey.render(codes))
        assert not judged.ok and "no digit" in judged.reason


def test_bad_values_are_explained():
    with pytest.raises(ValueError, match=r"64 grey levels of 0\.\.16"):
        grey.render(np.full(64, 17))
    with pytest.raises(ValueError, match="multiple of 8"):
        grey.render(np.zeros(64, int), 100)
    with pytest.raises(ValueError, match="Choose one of train, test"):
        digits.load("dev")


def test_without_scikit_learn_the_error_says_what_to_install():
    script = (
        "import sys; sys.modules['sklearn'] = sys.modules['sklearn.datasets'] = None\n"
        "from sparse_lavida_jax.scenes import digits\n"
        "digits.sample(0, 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode
    assert "pip install 'sparse-lavida-jax[digits]'" in ended.stderr
