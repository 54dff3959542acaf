# SPDX-License-Identifier: Apache-2.0
"""What a model makes of captions it was trained on, next to the training images nearest to that.

A model of few images remembers them, and samples alone look like skill. Images are compared by the
codebook vectors of the model's own image tokenizer. The Fréchet distance in their means over an
image is no FID, which needs another network: it compares models with one image tokenizer.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from sparse_lavida_jax.evals.scorers import frechet_distance
from sparse_lavida_jax.mixture.records import Record
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.pipeline import SparseLaViDa

MOST_RECORDS = 10_000  # training images that are compared with
ENOUGH = 256  # images on either side of a Fréchet distance
REMEMBERED = 0.9  # share of equal codes from which on an image is taken for a training image


def compare(
    pipe: SparseLaViDa, records: Sequence[Record], count: int
) -> tuple[str, list[tuple[np.ndarray, str]]]:
    """Draws captions of records and finds the training image nearest to each.

    Args:
        records: images with captions, of which the first crop is taken.
        count: captions to draw; as many as a Fréchet distance needs, if there are so many records.

    Returns:
        A sentence or two, and `2 * count` images with captions: a sample, then its neighbour.
    """
    codec = pipe.codec
    assert codec is not None and codec.vq is not None
    many = len(records) >= ENOUGH
    asked = [record.asked[0] for record in records[: ENOUGH if many else count]]
    drawn = np.stack(pipe.generate(asked).pixels)
    codes = vq.encode_images(codec.vq, drawn)
    known = np.stack([record.target[0] for record in records])
    table = np.asarray(codec.vq.codebook[...], np.float32)
    found = nearest(table[codes], table[known])
    shown = vq.decode_codes(codec.vq, known[found[:count]])
    tiles: list[tuple[np.ndarray, str]] = []
    for i, image in enumerate(shown):
        tiles += [(drawn[i], asked[i]), (image, f"nearest: {records[found[i]].asked[0]}")]
    same = (codes == known[found]).mean(axis=(1, 2)) >= REMEMBERED
    said = (
        f"Captions of training images, drawn, each next to the nearest of {len(records)} training"
        f" images. {same.sum()} of {len(drawn)} samples share at least {REMEMBERED:.0%} of their"
        " codes with it: they are remembered."
    )
    if many:
        distance = frechet_distance(table[codes].mean(axis=(1, 2)), table[known].mean(axis=(1, 2)))
        said += (
            " Fréchet distance to the training images, in features of the model's own image"
            f" tokenizer: {distance:.4f} ({len(drawn)} samples). It is no FID."
        )
    return said, tiles


def nearest(
    samples: Float[np.ndarray, "n y x d"], training: Float[np.ndarray, "m y x d"]
) -> Int[np.ndarray, " n"]:
    """Returns for each sample the number of the training image with the least squared distance."""
    flat = training.reshape(len(training), -1)
    size = (flat**2).sum(axis=1)
    return np.array(
        [np.argmin(size - 2 * (flat @ one)) for one in samples.reshape(len(samples), -1)]
    )
