# SPDX-License-Identifier: Apache-2.0
"""Draws what is missing inside a rectangle of an image."""

import functools

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Layout, box_text, cells_box
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import draw
from sparse_lavida_jax.scenes.world import EMPTY, GRID, NUM_CELLS


def make_hole(dice: Dice, *, word: str) -> Sample | None:
    """Makes the task of finishing a requested image of which some cells are known.

    Args:
        word: "fill" a rectangle, or "extend" it.
    """
    (top, height), (left, width) = (
        (dice.below(GRID - side + 1), side) for side in (dice.between(2, 4), dice.between(2, 4))
    )
    inside = [y * GRID + x for y in range(top, top + height) for x in range(left, left + width)]
    known = tuple((cell in inside) == (word == "extend") for cell in range(NUM_CELLS))
    drawn, _, layout = draw.make_with_request(dice)
    whole = drawn.target
    assert whole is not None
    missing = tuple(entry for entry in layout.entries if not known[entry[0]])
    if not missing:
        return None
    return Sample(
        f"{drawn.prompt}, {word}{box_text(cells_box(inside[0], inside[-1]))}",
        whole.changed({cell: EMPTY for cell in range(NUM_CELLS) if not known[cell]}),
        target=whole,
        layout=str(Layout(missing)),
        known=known,
        column=drawn.column,
    )


make = functools.partial(make_hole, word="fill")
TASK = Task(make, judges.drawn, "edit", command="inpaint")
