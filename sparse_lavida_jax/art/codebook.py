# SPDX-License-Identifier: Apache-2.0
"""What training of an image tokenizer needs of the art world: codebooks, and a report."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int, UInt8

from sparse_lavida_jax.art import judge
from sparse_lavida_jax.art.cells import BLOCK
from sparse_lavida_jax.art.looks import COLOURS, Looks, care, unscaled
from sparse_lavida_jax.art.sheet import Sheet
from sparse_lavida_jax.art.world import BACKGROUNDS

ROUNDS = 12  # Lloyd's iterations of `means`
# Of the codebook of blocks; all ours.
FIT_ROUNDS = 40
FIRST_RESTART, LAST_RESTART = 3, 34  # rounds between which the least useful codes start again
RESTARTS = 0.05  # share of the codes
CARE = 0.8  # power of the distance to the nearest drawing by which a block weighs less
AT_ONCE = 8192  # points whose distances are held

Contents = Float[np.ndarray, "c i j 4"]


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
        codes = _moved(points, counts.astype(float), nearest(points, codes), codes)
    return codes


def fit(sheet: Sheet, codebook_size: int, say: Callable[[str], None]) -> Contents:
    """Returns the codebook of `cells.CellModel`: the backgrounds, then means of blocks.

    Means are Lloyd's, from arbitrary blocks; in most rounds the codes with the least error start
    again at blocks with large errors.

    Args:
        sheet: every block of its things counts once for each facing.
        say: called with a line about the error, every ten rounds.
    """
    looks = [Looks.of(sheet, size) for size in sheet.sprites]
    points = np.concatenate([look.points[look.is_drawn] for look in looks])
    near = np.concatenate([look.apart[look.is_drawn] for look in looks])
    weights = care(near, CARE)
    rng, count = np.random.default_rng(0), codebook_size - len(BACKGROUNDS)
    codes = points[rng.choice(len(points), count, replace=False, p=weights / weights.sum())]
    for round_ in range(FIT_ROUNDS):
        owner = nearest(points, codes)
        squares = np.square(points - codes[owner]).sum(axis=1)
        errors = weights * squares
        codes = _moved(points, weights, owner, codes)
        if FIRST_RESTART <= round_ < LAST_RESTART:
            useless = np.argsort(np.bincount(owner, errors, count), kind="stable")
            useless = useless[: int(RESTARTS * count)]
            chosen = rng.choice(len(points), len(useless), p=errors / errors.sum())
            codes[useless] = points[chosen]
        if round_ % 10 == 9:
            error = squares.mean() / (3 * BLOCK**2)
            decibels = 10 * np.log10(255**2 / error)
            say(f"round {round_ + 1} of {FIT_ROUNDS}: {decibels:.2f} dB a block")
    plain = np.full((len(COLOURS), BLOCK**2, 4), 255, np.float32)
    plain[..., :3] = COLOURS[:, None]
    contents = np.concatenate([plain, unscaled(codes.reshape(count, -1, 4))])
    return contents.reshape(codebook_size, BLOCK, BLOCK, 4)


def nearest(
    points: Float[np.ndarray, "n d"], codes: Float[np.ndarray, "c d"]
) -> Int[np.ndarray, " n"]:
    """Returns the nearest code of each point, of equal ones the first."""
    # |x - c|^2 without |x|^2, which is the same for every code.
    norms = np.square(codes).sum(axis=1)
    parts = (points[i : i + AT_ONCE] for i in range(0, len(points), AT_ONCE))
    return np.concatenate([np.argmin(norms - 2 * part @ codes.T, axis=1) for part in parts])


def report(
    images: UInt8[np.ndarray, "n h w 3"],
    decoded: UInt8[np.ndarray, "n h w 3"],
    sheet: Sheet | None = None,
) -> str:
    """Says how well the decoded images can be read: see `judge.naming`."""
    shares = judge.naming(images, decoded, sheet).items()
    return "things " + ", ".join(f"{name} {share:.3f}" for name, share in shares)


def _moved(
    points: Float[np.ndarray, "n d"],
    weights: Float[np.ndarray, " n"],
    owner: Int[np.ndarray, " n"],
    codes: Float[np.ndarray, "c d"],
) -> Float[np.ndarray, "c d"]:
    """Returns the means of the points of each code; a code without points stays."""
    totals = np.bincount(owner, weights, len(codes))
    sums = [np.bincount(owner, weights * column, len(codes)) for column in points.T]
    moved = np.stack(sums, axis=1) / np.maximum(totals, 1e-9)[:, None]
    return np.where(totals[:, None] > 0, moved, codes).astype(points.dtype)
