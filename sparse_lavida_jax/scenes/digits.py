# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits, a small real data set: scikit-learn's, 8x8 cells of 17 grey levels.

The grey levels are the codes of an image, so that no image tokenizer is needed. Drawn digits are
judged by their nearest neighbour among the training images.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax.data import grey
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.task import Judgement

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPLITS = ("train", "test")
EVERY = 5  # every fifth image is in the test split; both splits have all writers
# An image is not a digit if its squared error per cell, in levels, exceeds this. Our choice: test
# images are at most 13.9 from the nearest training image, noise is at 40 and more.
FARTHEST = 14.0


@dataclasses.dataclass(frozen=True)
class Digit:
    """One handwritten digit and its name."""

    prompt: str
    digit: int
    codes: Int[np.ndarray, "l 1"]  # grey levels in raster order


def prompt_of(digit: int) -> str:
    """Returns "a handwritten seven"."""
    return f"a handwritten {NAMES[digit]}"


def sample(seed: int, index: int, split: str = "train") -> Digit:
    """Returns example number `index` of an endless random sequence of images.

    Raises:
        ValueError: an unknown split, or a negative seed or index.
        ModuleNotFoundError: scikit-learn, which contains the images, is not installed.
    """
    codes, labels = load(split)
    chosen = Dice(seed, f"digits/{split}", index).below(len(labels))
    digit = int(labels[chosen])
    return Digit(prompt_of(digit), digit, codes[chosen][:, None])


@functools.lru_cache(maxsize=2)
def load(split: str) -> tuple[Int[np.ndarray, "n l"], Int[np.ndarray, " n"]]:
    """Returns the grey levels and the digits of a split."""
    if split not in SPLITS:
        raise ValueError(f"there is no split '{split}'. Choose one of {', '.join(SPLITS)}.")
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed."
            " Run `pip install 'sparse-lavida-jax[digits]'`."
        ) from error
    levels, digits = (np.asarray(part).astype(np.int32) for part in load_digits(return_X_y=True))
    in_test = np.arange(len(digits)) % EVERY == 0
    chosen = in_test if split == "test" else ~in_test
    codes, labels = levels[chosen], digits[chosen]
    codes.flags.writeable = labels.flags.writeable = False
    return codes, labels


def classify(codes: Int[np.ndarray, "..."]) -> tuple[int, float]:
    """Returns the digit of the nearest training image, and its squared distance per cell."""
    known, labels = load("train")
    errors = np.square(known - codes.reshape(-1)).mean(axis=1)
    nearest = int(np.argmin(errors))
    return int(labels[nearest]), float(errors[nearest])


def score(sample: Digit, pixels: UInt8[np.ndarray, "h w 3"]) -> Judgement:
    """Judges a drawn digit."""
    digit, distance = classify(grey.read(pixels))
    if distance > FARTHEST:
        return Judgement(
            False, f"this is no digit: {distance:.1f} from the nearest, a {NAMES[digit]}"
        )
    if digit != sample.digit:
        return Judgement(False, f"this is a {NAMES[digit]}, not a {NAMES[sample.digit]}")
    return Judgement(True, "")
