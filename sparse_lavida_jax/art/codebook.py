# SPDX-License-Identifier: Apache-2.0
"""What training of an image tokenizer needs of the art world: codebooks, and a report."""

import itertools
from collections.abc import Callable

import einops
import numpy as np
from jaxtyping import Float, Int, UInt8

from sparse_lavida_jax.art import cells, judge
from sparse_lavida_jax.art.judge import LEAST_CONTRAST
from sparse_lavida_jax.art.sheet import SIZES, Sheet
from sparse_lavida_jax.art.world import BACKGROUNDS, CELL, STEP

ROUNDS = 12  # Lloyd's iterations
# Of the codes that add up to a cell; all ours.
START_ROUNDS = 5  # Lloyd's iterations for each quarter of a cell
FIT_ROUNDS = 8  # of all four places
SMOOTH = 8.0  # levels, root mean square: nearer drawings weigh no more than about this
CARE = 1.6  # power of the distance to the nearest drawing by which a cell weighs less
MOST_APART = 4000.0  # squared levels: cells farther from all others weigh the same
AT_ONCE = 8192  # points whose distances are held
MEAN = np.array([*BACKGROUNDS.values()], np.float32).mean(axis=0)
SPREAD = float(np.sqrt(np.array([*BACKGROUNDS.values()], np.float32).var(axis=0).sum()))

Contents = Float[np.ndarray, "c g i j 4"]


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


def fit(sheet: Sheet, codebook_size: int, say: Callable[[str], None]) -> Contents:
    """Returns the codebook of `cells.CellModel`: what each code adds to a cell, at each place.

    At first a place is a quarter of the cell, and its codes are means of the quarters. Then one
    place after another takes the means of what the other three leave, so that codes spread over
    the whole cell. The first code of a place is empty.

    Args:
        sheet: every cell of its things counts once, at each offset and facing.
        say: is told the error after each round.
    """
    points, weights = every_cell(sheet)
    table = np.zeros((codebook_size, cells.PLACES, CELL, CELL, 4), np.float32)
    books = table.reshape(codebook_size, cells.PLACES, -1)
    counts = cells.contents_of(codebook_size), *[codebook_size] * (cells.PLACES - 1)
    codes = np.zeros((len(points), cells.PLACES), int)
    numbers = einops.rearrange(
        np.arange(points.shape[1]), "(p y q x c) -> (p q) (y x c)", p=2, q=2, y=CELL // 2, c=4
    )
    rng = np.random.default_rng(0)
    for place, (count, quarter) in enumerate(zip(counts, numbers, strict=True)):
        part = np.ascontiguousarray(points[:, quarter])
        share = weights / weights.sum()
        start = part[rng.choice(len(part), count, replace=False, p=share)]
        start[0] = 0
        for _ in range(START_ROUNDS):
            nearest = _nearest(part, start)
            error = weights * np.square(part - start[nearest]).sum(axis=1)
            unused = np.setdiff1d(np.arange(1, count), nearest)[: np.count_nonzero(error)]
            start = _moved(part, weights, nearest, start)
            if len(unused):
                share = error / error.sum()
                start[unused] = part[rng.choice(len(part), len(unused), replace=False, p=share)]
        books[:count, place, quarter] = start
        codes[:, place] = _nearest(part, start)
    rest = points - sum(books[codes[:, place], place] for place in range(cells.PLACES))
    for round_ in range(FIT_ROUNDS):
        for place, count in enumerate(counts):
            rest += books[codes[:, place], place]
            book = np.ascontiguousarray(books[:count, place])
            codes[:, place] = _nearest(rest, book)
            books[:count, place] = _moved(rest, weights, codes[:, place], book)
            rest -= books[codes[:, place], place]
        error = np.square(rest).sum(axis=1).mean() / (3 * CELL**2)
        say(f"round {round_ + 1} of {FIT_ROUNDS}: {10 * np.log10(255**2 / error):.2f} dB a cell")
    return _unscaled(table)


def every_cell(sheet: Sheet) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, " n"]]:
    """Returns what every cell of every thing shows, at all offsets, and its weight.

    Distances between the points are those between pixels, averaged over the backgrounds: colours
    are relative to the mean background, and opacities scaled by the deviation of backgrounds.

    The nearer a cell is to a cell of another style or facing of its thing, or to nothing, the
    larger is its weight: there, a small error is taken for another drawing.
    """
    points, weights = [], []
    faced = np.array([bool(thing.drawn) for thing in sheet.things])
    for size, side in SIZES.items():
        sprites = sheet.sprites[size]
        looks = np.concatenate([sprites, sprites[..., ::-1, :]], axis=1)
        for y, x in itertools.product(range(0, CELL, STEP), repeat=2):
            wide = [-(-(side + offset) // CELL) * CELL for offset in (y, x)]
            whole = np.zeros((*looks.shape[:2], *wide, 4), np.uint8)
            whole[:, :, y : y + side, x : x + side] = looks
            cut = "n v (y i) (x j) c -> n v (y x) (i j) c"
            cell = _scaled(einops.rearrange(whole, cut, i=CELL, j=CELL))
            nearest = np.full(cell.shape[:3], MOST_APART, np.float32)
            others = [np.zeros_like(cell), *(np.roll(cell, i, 1) for i in range(1, cell.shape[1]))]
            for other in others:
                apart = np.square(cell - other).sum(axis=-1) / (3 * CELL**2)
                nearest = np.where(apart > LEAST_CONTRAST**2, np.minimum(nearest, apart), nearest)
            used = np.repeat(
                np.stack([np.ones_like(faced), faced], axis=1), sprites.shape[1], axis=1
            )
            used = used[..., None] & (cell != 0).any(axis=-1)
            points.append(cell[used])
            weights.append((nearest[used] + SMOOTH**2) ** -CARE)
    weight = np.concatenate(weights)
    return np.concatenate(points), weight / weight.mean()


def _scaled(pixels: UInt8[np.ndarray, "*n p 4"]) -> Float[np.ndarray, "*n _d"]:
    opacity = pixels[..., 3:].astype(np.float32) / 255
    parts = [pixels[..., :3] * opacity - opacity * MEAN, opacity * SPREAD]
    return np.concatenate(parts, axis=-1).reshape(*pixels.shape[:-2], -1)


def _unscaled(table: Contents) -> Contents:
    """Returns colours weighted by opacity, and opacities, in levels."""
    opacity = table[..., 3:] / SPREAD
    return np.concatenate([table[..., :3] + opacity * MEAN, 255 * opacity], axis=-1)


def _nearest(
    points: Float[np.ndarray, "n d"], codes: Float[np.ndarray, "c d"]
) -> Int[np.ndarray, " n"]:
    norms = np.square(codes).sum(axis=1)
    parts = (points[i : i + AT_ONCE] for i in range(0, len(points), AT_ONCE))
    return np.concatenate([np.argmin(norms - 2 * part @ codes.T, axis=1) for part in parts])


def _moved(
    points: Float[np.ndarray, "n d"],
    weights: Float[np.ndarray, " n"],
    nearest: Int[np.ndarray, " n"],
    codes: Float[np.ndarray, "c d"],
) -> Float[np.ndarray, "c d"]:
    """Returns the means of the points of each code; the first code stays."""
    order = np.argsort(nearest, kind="stable")
    ends = np.searchsorted(nearest[order], np.arange(len(codes) + 1))
    moved = codes.copy()
    for code in range(1, len(codes)):
        if len(own := order[ends[code] : ends[code + 1]]):
            moved[code] = weights[own] @ points[own] / weights[own].sum()
    return moved


def report(images: UInt8[np.ndarray, "n h w 3"], decoded: UInt8[np.ndarray, "n h w 3"]) -> str:
    """Says how well the decoded images can be read: see `judge.naming`."""
    shares = judge.naming(images, decoded).items()
    return "things " + ", ".join(f"{name} {share:.3f}" for name, share in shares)
