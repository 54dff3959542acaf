# SPDX-License-Identifier: Apache-2.0
"""Labels of every cell of a scene: what `training/vision_tower.py` teaches a tower to see."""

import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.sheet import SIZES, STYLES, Sheet
from sparse_lavida_jax.art.world import CELL, CELL_STEPS, STEP, ArtScene, render

FACINGS = ("", "left", "right")
OFFSETS = CELL_STEPS + max(SIZES.values()) // STEP  # of a cell to the edge of its thing, in steps

Labels = Int[np.ndarray, "kinds y x"]


def kinds(sheet: Sheet) -> dict[str, int]:
    """Returns how many values each kind of label has; the last look is that of the background."""
    looks = len(sheet.things) * len(STYLES) + 1
    return {"look": looks, "facing": len(FACINGS), "size": len(SIZES)} | dict.fromkeys(
        ("row", "column"), OFFSETS
    )


def labels_of(scene: ArtScene, sheet: Sheet, cells: int) -> Labels:
    """Returns the labels of the cells of a scene, by kind."""
    found = np.zeros((len(kinds(sheet)), cells, cells), np.int32)
    found[0] = kinds(sheet)["look"] - 1
    styles, sizes = list(STYLES), list(SIZES)
    for thing in scene.things:
        rows, columns = np.mgrid[thing.cells]
        look = sheet.numbers[thing.name] * len(styles) + styles.index(thing.style)
        facing, size = FACINGS.index(thing.facing), sizes.index(thing.size)
        at = CELL_STEPS * rows - thing.y, CELL_STEPS * columns - thing.x
        plain = (np.full_like(rows, one) for one in (look, facing, size))
        found[:, *thing.cells] = np.stack([*plain, *(one + CELL_STEPS - 1 for one in at)])
    return found


def examples(
    sheet: Sheet, cells: int, stream: str, begin: int, count: int, *, held_out: bool = False
) -> tuple[UInt8[np.ndarray, "b h w 3"], Int[np.ndarray, "b kinds y x"]]:
    """Returns scenes number `begin` and on of a stream, as images, and their labels."""
    how = {"held_out": held_out, "side": CELL * cells, "sheet": sheet}
    scenes = [ArtDice(0, stream, begin + i, **how).scene() for i in range(count)]
    images = np.stack([render(scene, CELL * cells, sheet) for scene in scenes])
    return images, np.stack([labels_of(scene, sheet, cells) for scene in scenes])
