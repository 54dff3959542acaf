# SPDX-License-Identifier: Apache-2.0
"""Images full of things, with their codes: what the painter of the image tokenizer learns from."""

import dataclasses
from collections.abc import Iterator

import einops
import numpy as np
from jaxtyping import Float, Int, UInt8

from sparse_lavida_jax.art.cells import BLOCK
from sparse_lavida_jax.art.codebook import Contents, nearest
from sparse_lavida_jax.art.looks import COLOURS, MOST_APART, Looks, care
from sparse_lavida_jax.art.sheet import Sheet, blended
from sparse_lavida_jax.art.world import IMAGE_SIZE

CARE = 0.8  # power of the distance to the nearest drawing by which a block weighs less; ours
# An image has four quarters of 12x12 blocks.
QUARTER = IMAGE_SIZE // BLOCK // 2
LARGE, ONE_SMALL, FILLED = 0.55, 0.15, 0.85  # shares: of quarters, of quarters, of the rest


@dataclasses.dataclass(frozen=True)
class TrainingImages:
    """Every look on every background, and its codes.

    Attributes:
        looks: by size, the small one first.
        pixels: [background, look] by size.
        codes: the same; the nearest ones on that background.
    """

    looks: list[Looks]
    pixels: list[UInt8[np.ndarray, "n _l _h _w 3"]]
    codes: list[Int[np.ndarray, "n _l _y _x"]]

    @staticmethod
    def of(sheet: Sheet, contents: Contents) -> "TrainingImages":
        looks, pixels, codes = [], [], []
        books = [contents[..., :3] + (1 - contents[..., 3:] / 255) * one for one in COLOURS]
        for size in sheet.sprites:
            one = Looks.of(sheet, size)
            shape = *one.drawings.shape[:3], 3
            drawn = [
                blended(np.broadcast_to(colour.astype(np.uint8), shape), one.drawings)
                for colour in COLOURS
            ]
            cut = "l (y i) (x j) c -> (l y x) (i j c)"
            found = [
                nearest(
                    einops.rearrange(each.astype(np.float32), cut, i=BLOCK, j=BLOCK),
                    book.reshape(len(book), -1),
                )
                for each, book in zip(drawn, books, strict=True)
            ]
            looks.append(one)
            pixels.append(np.stack(drawn))
            codes.append(np.stack(found).reshape(len(COLOURS), *one.points.shape[:3]))
        return TrainingImages(looks, pixels, codes)

    def batch(
        self, rng: np.random.Generator, count: int
    ) -> tuple[UInt8[np.ndarray, "b h w 3"], Int[np.ndarray, "b y x"], Float[np.ndarray, "b y x"]]:
        """Returns images, their codes, and the weights of blocks."""
        sides = IMAGE_SIZE // BLOCK
        grounds = rng.integers(len(COLOURS), size=count)
        images = np.empty((count, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        images[:] = COLOURS[grounds, None, None]
        codes = np.empty((count, sides, sides), np.int32)
        codes[:] = grounds[:, None, None]
        weights = care(np.full(codes.shape, MOST_APART, np.float32), CARE)
        for i, ground in enumerate(grounds):
            for size, y, x in _places(rng):
                look, side = rng.integers(len(self.looks[size].points)), _sides(self.looks[size])
                rows, columns = slice(y, y + side), slice(x, x + side)
                codes[i, rows, columns] = self.codes[size][ground, look]
                weights[i, rows, columns] = care(self.looks[size].apart[look], CARE)
                rows, columns = (slice(BLOCK * at, BLOCK * (at + side)) for at in (y, x))
                images[i, rows, columns] = self.pixels[size][ground, look]
        return images, codes, weights


def _places(rng: np.random.Generator) -> Iterator[tuple[int, int, int]]:
    """Yields sizes, rows and columns of blocks that fill an image."""
    for top, left in ((0, 0), (0, QUARTER), (QUARTER, 0), (QUARTER, QUARTER)):
        kind = rng.random()
        if kind < LARGE:
            yield 1, top + int(rng.integers(3)), left + int(rng.integers(3))
        elif kind < LARGE + ONE_SMALL:
            yield 0, top + int(rng.integers(7)), left + int(rng.integers(7))
        else:
            half = QUARTER // 2
            for y, x in ((0, 0), (0, half), (half, 0), (half, half)):
                if rng.random() < FILLED:
                    yield 0, top + y, left + x


def _sides(looks: Looks) -> int:
    return looks.points.shape[1]
