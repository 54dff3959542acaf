# SPDX-License-Identifier: Apache-2.0
"""Draws what is missing inside a rectangle of an image, and finishes the things that it cuts."""

import dataclasses
import functools

import numpy as np

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import ArtLayout
from sparse_lavida_jax.art.tasks import draw
from sparse_lavida_jax.art.world import CELL_STEPS
from sparse_lavida_jax.scenes.grammar import box_text
from sparse_lavida_jax.scenes.task import Sample, Task

SIDES = (4, 8)  # of a rectangle, in cells


def make_hole(dice: ArtDice, *, word: str) -> Sample | None:
    """Makes the task of finishing a requested image of which some cells are known.

    Args:
        word: "fill" a rectangle, or "extend" it.
    """
    sides = [dice.between(*SIDES) for _ in range(2)]
    (top, height), (left, width) = ((dice.below(dice.cells - side + 1), side) for side in sides)
    hidden = np.full((dice.cells, dice.cells), word == "extend")
    hidden[top : top + height, left : left + width] ^= True
    drawn = draw.make(dice)
    if drawn is None:
        return None
    whole = drawn.target
    assert whole is not None
    laid = ArtLayout.parse(drawn.layout or "", dice.sheet)
    pairs = zip(laid.entries, laid.things, strict=True)
    missing = tuple(entry for entry, thing in pairs if hidden[thing.cells].any())
    if not missing:
        return None
    steps = CELL_STEPS
    box = (steps * left, steps * top, steps * (left + width), steps * (top + height))
    return Sample(
        f"{drawn.prompt}, {word}{box_text(box)}",
        dataclasses.replace(whole, hidden=tuple(map(tuple, np.argwhere(hidden).tolist()))),
        target=whole,
        layout=str(ArtLayout(missing)),
        known=tuple((~hidden).reshape(-1).tolist()),
        column=drawn.column,
    )


make = functools.partial(make_hole, word="fill")
TASK = Task(make, rules.drawn, "edit", command="inpaint")
