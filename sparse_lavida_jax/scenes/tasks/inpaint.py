# SPDX-License-Identifier: Apache-2.0
"""Draws what is missing of an image in a rectangle."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Box, Plan, box_text, cell_box
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import draw
from sparse_lavida_jax.scenes.world import EMPTY, GRID, NUM_CELLS


def make(dice: Dice) -> Sample | None:
    hole = rectangle(dice)
    return complete(dice, f"fill{box_text(box(hole))}", {*range(NUM_CELLS)} - {*hole})


def rectangle(dice: Dice) -> list[int]:
    """Returns the raster indices of a rectangle of 2..4 cells a side."""
    (top, height), (left, width) = (
        (dice.below(GRID - side + 1), side) for side in (dice.between(2, 4), dice.between(2, 4))
    )
    return [y * GRID + x for y in range(top, top + height) for x in range(left, left + width)]


def box(rectangle: list[int]) -> Box:
    return (*cell_box(rectangle[0])[:2], *cell_box(rectangle[-1])[2:])


def complete(dice: Dice, instruction: str, known: set[int]) -> Sample | None:
    """Makes the task of finishing a requested image of which some cells are known."""
    drawn = draw.make(dice)
    whole = drawn.target
    assert whole is not None and drawn.plan is not None
    missing = tuple(entry for entry in Plan.parse(drawn.plan).entries if entry[0] not in known)
    if not missing:
        return None
    return Sample(
        f"{drawn.prompt}, {instruction}",
        whole.changed({cell: EMPTY for cell in range(NUM_CELLS) if cell not in known}),
        target=whole,
        plan=str(Plan(missing)),
        known=tuple(cell in known for cell in range(NUM_CELLS)),
        column=drawn.column,
    )


TASK = Task(make, judges.drawn, "edit", command="inpaint", counts_attributes=True)
