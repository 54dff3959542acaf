# SPDX-License-Identifier: Apache-2.0
"""Samples for training captions, each shown with its nearest training image.

A model trained on few images memorizes them, and its samples alone look like skill. Images are
compared by the codebook vectors of the model's own image tokenizer. The Fréchet distance uses the
mean of these vectors over an image. It is not FID, which needs another network, and only compares
models that share an image tokenizer.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from sparse_lavida_jax.art.art_batches import ArtBatches
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.evals.scorers import frechet_distance
from sparse_lavida_jax.mixture.records import Record
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.pipeline import SparseLaViDa

MOST_RECORDS = 10_000  # the largest number of training images to compare with
MOST_DRAWN = 1024  # likewise, of art, whose images are drawn and encoded for it
ENOUGH = 256  # images needed on each side of a Fréchet distance
REMEMBERED = 0.9  # share of equal codes from which a sample counts as memorized


def compare(
    pipe: SparseLaViDa, records: Sequence[Record], count: int, is_trained: bool = True
) -> tuple[str, list[tuple[np.ndarray, str]]]:
    """Draws captions of records and finds the nearest training image to each sample.

    Args:
        records: images with captions; the first crop of each image is used.
        count: captions to draw; if there are enough records for a Fréchet distance, as many as it
            needs are drawn, and `count` shown.
        is_trained: whether the model was trained for long enough that it could copy.

    Returns:
        A sentence or two, and `2 * count` captioned images: each sample, then its nearest image.
    """
    codec = pipe.codec
    assert codec is not None and codec.vq is not None
    many = is_trained and len(records) >= ENOUGH
    asked = [record.asked[0] for record in records[: ENOUGH if many else count]]
    drawn = np.stack(pipe.generate(asked).pixels)
    codes = vq.encode_images(codec.vq, drawn)
    known = np.stack([record.target[0] for record in records])
    table = np.asarray(codec.vq.codebook[...], np.float32)
    found = nearest(table[codes], table[known])
    shown = vq.to_pixels(codec.vq, known[found[:count]])
    tiles: list[tuple[np.ndarray, str]] = []
    for i, image in enumerate(shown):
        tiles += [(drawn[i], asked[i]), (image, f"nearest: {records[found[i]].asked[0]}")]
    some = known[: len(drawn)]
    others = known[nearest(table[some], table[known], others=True)]
    pairs = (codes, known[found]), (some, others)
    same, alike = (((a == b).mean(axis=(1, 2)) >= REMEMBERED).sum() for a, b in pairs)
    said = (
        f"Samples for captions of training images, each next to the nearest of {len(records)}"
        " training images."
    )
    if not is_trained:
        return f"{said} The model was trained too briefly to count copies.", tiles
    said += (
        f" {same} of {len(drawn)} samples share at least {REMEMBERED:.0%} of"
        f" their codes with it; {alike} of {len(some)} training images share as many with"
        " another one. If far more samples than images do, the model has memorised them."
    )
    if many:
        distance = frechet_distance(table[codes].mean(axis=(1, 2)), table[known].mean(axis=(1, 2)))
        said += (
            " Fréchet distance to the training images, in features of the model's own image"
            f" tokenizer: {distance:.4f} ({len(drawn)} samples). This is not an FID."
        )
    return said, tiles


def remembered(
    pipe: SparseLaViDa, prompts: int, known: int = MOST_DRAWN
) -> tuple[str, list[tuple[np.ndarray, str, bool | None]], list[float]]:
    """Draws combinations of art that training showed, and finds the nearest images of training.

    What is drawn rightly here may be memory; prompts of held-out combinations say what is not.

    Args:
        prompts: how many are drawn; they are not those of training.
        known: training images to compare with: the first after the lessons of the last run.

    Returns:
        A sentence, twice as many captioned images (each sample, whether it is right, and then its
        nearest image), and the share of the cells of each sample, without those of its background,
        that are the same in its nearest image.
    """
    here, codec = exact.world_of(pipe.settings), pipe.codec
    assert codec is not None

    asked = [here.sample("draw", exact.EVAL_SEED, number, "test") for number in range(prompts)]
    seen = ArtBatches(pipe.settings, pipe.prompts.encoder).first("draw", known)
    drawn = pipe.generate([one.prompt for one in asked], as_written=True).pixels
    training = codec.encode(np.stack([here.render(one.target) for one in seen]))
    tiles, shares = list[tuple[np.ndarray, str, bool | None]](), list[float]()
    for sample, image, codes in zip(asked, drawn, codec.encode(np.stack(drawn)), strict=True):
        equal = (training == codes).all(axis=-1)[:, is_drawn(codes)].mean(axis=1)
        found = int(equal.argmax())
        shares.append(float(equal[found]))
        tiles.append((image, sample.prompt, here.score(sample, image).ok))
        tiles.append((here.render(seen[found].target), f"nearest: {seen[found].prompt}", None))
    copies = sum(share >= REMEMBERED for share in shares)
    said = (
        "Prompts of combinations that training showed, each next to the nearest of"
        f" {known:,} training images, by equal cells other than the background: {copies} of"
        f" {prompts} share at least {REMEMBERED:.0%} with it. What is right here may be memory."
    )
    return said, tiles, shares


def is_drawn(cells: Int[np.ndarray, "l g"]) -> Bool[np.ndarray, " l"]:
    """Returns which cells of an image differ from its most common one; if none does, all."""
    kinds, counts = np.unique(cells, axis=0, return_counts=True)
    differs = (cells != kinds[counts.argmax()]).any(axis=-1)
    return differs | ~differs.any()


def nearest(
    samples: Float[np.ndarray, "n y x d"],
    training: Float[np.ndarray, "m y x d"],
    *,
    others: bool = False,
) -> Int[np.ndarray, " n"]:
    """Returns, for each sample, the index of the training image at the least squared distance.

    Args:
        others: the samples are the first training images; another one is found for each.
    """
    flat = training.reshape(len(training), -1)
    distances = (flat**2).sum(axis=1) - 2 * samples.reshape(len(samples), -1) @ flat.T
    if others:
        np.fill_diagonal(distances, np.inf)
    return distances.argmin(axis=1)
