# SPDX-License-Identifier: Apache-2.0
"""Scenes of real art: one to five things at places, in two sizes, on a plain background.

Places are multiples of `STEP`, half a cell of the image tokenizer, so that a thing may begin in the
middle of a cell. No two things share a cell: the pixels of a cell depend on one thing at most.
"""

import dataclasses

import numpy as np
from jaxtyping import UInt8

from sparse_lavida_jax.art.sheet import SIZES, Sheet, blended, load

IMAGE_SIZE = 96  # pixels per side, unless a model draws more cells
CELL = 8  # pixels per side of what one code describes
STEP = 4  # pixels between places; a location token is one step
CELL_STEPS = CELL // STEP
MIRRORED = {"left": "right", "right": "left", "": ""}
MOST_THINGS = 5
BACKGROUNDS = {
    "white": (243, 243, 238),
    "blue": (196, 222, 246),
    "green": (200, 234, 204),
    "yellow": (250, 236, 180),
    "pink": (250, 212, 222),
}


@dataclasses.dataclass(frozen=True, order=True)
class Placed:
    """A thing in a scene.

    Attributes:
        y, x: the top left corner of its box, in steps.
        name: its English name in the sheet.
        style: a key of `sheet.STYLES`.
        size: a key of `sheet.SIZES`.
        facing: "left" or "right"; "" for a thing without a front.
    """

    y: int
    x: int
    name: str
    style: str
    size: str
    facing: str = ""

    @property
    def side(self) -> int:
        """The side of its box, in steps."""
        return SIZES[self.size] // STEP

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom, in steps."""
        return self.x, self.y, self.x + self.side, self.y + self.side

    @property
    def cells(self) -> tuple[slice, slice]:
        """The rows and columns of the cells that its box touches."""
        x1, y1, x2, y2 = self.box
        return cells_of(y1, y2), cells_of(x1, x2)

    def __str__(self) -> str:
        facing = f" facing {self.facing}" if self.facing else ""
        return f"{self.size} {self.style} {self.name}{facing}"


def cells_of(start: int, end: int) -> slice:
    """Returns the cells that a range of steps touches."""
    return slice(start // CELL_STEPS, -(-end // CELL_STEPS))


@dataclasses.dataclass(frozen=True)
class ArtScene:
    """Things, in the order of their rows and columns, on a background.

    Attributes:
        background: a key of `BACKGROUNDS`.
        hidden: row and column of the cells that show the background alone.
    """

    background: str
    things: tuple[Placed, ...]
    hidden: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(background: str, things: "list[Placed] | tuple[Placed, ...]") -> "ArtScene":
        return ArtScene(background, tuple(sorted(things)))

    def __len__(self) -> int:
        return len(self.things)


def sprite_of(thing: Placed, sheet: Sheet) -> UInt8[np.ndarray, "side side 4"]:
    """Returns the drawing of a thing in a scene."""
    return sheet.sprite(thing.name, thing.style, thing.size, thing.facing)


def render(
    scene: ArtScene, side: int = IMAGE_SIZE, sheet: Sheet | None = None
) -> UInt8[np.ndarray, "side side 3"]:
    """Draws a scene, `side` pixels per side.

    Raises:
        ValueError: a thing is not inside the image.
    """
    image = np.full((side, side, 3), BACKGROUNDS[scene.background], np.uint8)
    for thing in scene.things:
        sprite = sprite_of(thing, sheet or load())
        rows, columns = (slice(STEP * at, STEP * at + len(sprite)) for at in (thing.y, thing.x))
        part = image[rows, columns]
        if part.shape[:2] != sprite.shape[:2]:
            raise ValueError(
                f"the box {thing.box} of the {thing} is not inside the image, which is"
                f" {side // STEP} steps wide and high."
            )
        image[rows, columns] = blended(part, sprite)
    for y, x in scene.hidden:
        image[y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL] = BACKGROUNDS[scene.background]
    return image


def overlap(first: Placed, second: Placed) -> bool:
    """Whether two things share a cell."""
    return all(
        one.start < other.stop and other.start < one.stop
        for one, other in zip(first.cells, second.cells, strict=True)
    )
