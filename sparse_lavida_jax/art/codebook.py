# SPDX-License-Identifier: Apache-2.0
"""What training of an image tokenizer needs of the art world: where a codebook starts, a report."""

import numpy as np
from jaxtyping import Float, UInt8

from sparse_lavida_jax.art import judge

ROUNDS = 12  # Lloyd's iterations


def means(points: Float[np.ndarray, "n d"], most: int) -> Float[np.ndarray, "c d"]:
    """Returns at most `most` means of points, by Lloyd's iterations.

    They start at the most common points, a quarter of them, and at arbitrary ones; equal points
    count as often as they occur. So the contents of most cells, the backgrounds, are met exactly.
    """
    points, counts = np.unique(points, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    common, rare = order[: most // 4], order[most // 4 :]
    codes = points[[*common, *np.random.default_rng(0).permutation(rare)][:most]]
    for _ in range(ROUNDS):
        # |x - c|^2 without |x|^2, which is the same for every code.
        nearest = np.argmin((codes**2).sum(axis=1) - 2 * points @ codes.T, axis=1)
        totals = np.bincount(nearest, counts, len(codes))
        sums = [np.bincount(nearest, counts * column, len(codes)) for column in points.T]
        moved = np.stack(sums, axis=1) / np.maximum(totals, 1)[:, None]
        codes = np.where(totals[:, None] > 0, moved, codes).astype(points.dtype)
    return codes


def report(images: UInt8[np.ndarray, "n h w 3"], decoded: UInt8[np.ndarray, "n h w 3"]) -> str:
    """Says how well the decoded images can be read: see `judge.naming`."""
    shares = judge.naming(images, decoded).items()
    return "things " + ", ".join(f"{name} {share:.3f}" for name, share in shares)
