# SPDX-License-Identifier: Apache-2.0
"""Images full of things: what the painter of the image tokenizer learns from."""

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np
from jaxtyping import Float, Int, UInt8

from sparse_lavida_jax.art.cells import BLOCK
from sparse_lavida_jax.art.looks import COLOURS, MOST_APART, Looks, care
from sparse_lavida_jax.art.sheet import Sheet, blended
from sparse_lavida_jax.art.world import IMAGE_SIZE

CARE = 0.8  # power of the distance to the nearest drawing by which a block weighs less; ours
# An image has four quarters of 12x12 blocks.
QUARTER = IMAGE_SIZE // BLOCK // 2
OFTEN = 0.75  # share of the drawings that show one of the things to draw often; ours
LARGE, ONE_SMALL, FILLED = 0.55, 0.15, 0.85  # shares: of quarters, of quarters, of the rest


@dataclasses.dataclass(frozen=True)
class TrainingImages:
    """Every look on every background.

    Attributes:
        looks: by size, the small one first.
        pixels: [background, look] by size.
        often: looks of the things that most drawings show, by size.
    """

    looks: list[Looks]
    pixels: list[UInt8[np.ndarray, "n _l _h _w 3"]]
    often: list[Int[np.ndarray, " _o"]]

    @staticmethod
    def of(sheet: Sheet, often: Collection[str] = ()) -> "TrainingImages":
        """Draws all looks.

        Args:
            often: names of things that most drawings show.
        """
        looks = [Looks.of(sheet, size) for size in sheet.sprites]
        pixels = [
            np.stack(
                [
                    blended(np.broadcast_to(colour, (*one.drawings.shape[:3], 3)), one.drawings)
                    for colour in COLOURS.astype(np.uint8)
                ]
            )
            for one in looks
        ]
        chosen = [np.flatnonzero(np.isin(one.names, [*often])) for one in looks]
        return TrainingImages(looks, pixels, chosen)

    def batch(
        self, rng: np.random.Generator, count: int
    ) -> tuple[UInt8[np.ndarray, "b h w 3"], Float[np.ndarray, "b y x"]]:
        """Returns images and the weights of their blocks."""
        sides = IMAGE_SIZE // BLOCK
        grounds = rng.integers(len(COLOURS), size=count)
        images = np.empty((count, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        images[:] = COLOURS[grounds, None, None]
        weights = care(np.full((count, sides, sides), MOST_APART, np.float32), CARE)
        for i, ground in enumerate(grounds):
            for size, y, x in _places(rng):
                look, side = self._look(rng, size), _sides(self.looks[size])
                rows, columns = slice(y, y + side), slice(x, x + side)
                weights[i, rows, columns] = care(self.looks[size].apart[look], CARE)
                rows, columns = (slice(BLOCK * at, BLOCK * (at + side)) for at in (y, x))
                images[i, rows, columns] = self.pixels[size][ground, look]
        return images, weights

    def _look(self, rng: np.random.Generator, size: int) -> int:
        if len(self.often[size]) and rng.random() < OFTEN:
            return int(rng.choice(self.often[size]))
        return int(rng.integers(len(self.looks[size].points)))


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
