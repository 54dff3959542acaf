# SPDX-License-Identifier: Apache-2.0
"""Draws only a window around one thing of an image: an operation teaches more than in `draw`."""

from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.tasks import draw
from sparse_lavida_jax.art.world import CELL, STEP
from sparse_lavida_jax.scenes.task import Sample, Task

WINDOW = 6  # cells per side: the largest thing fills them


def make(dice: ArtDice) -> Sample | None:
    drawn = draw.make(dice)
    if drawn is None:
        return None
    sides, (rows, columns) = dice.steps * STEP // CELL, dice.pick(drawn.target.things).cells
    top, left = (
        dice.between(max(0, one.stop - WINDOW), min(one.start, sides - WINDOW))
        for one in (rows, columns)
    )
    return drawn._replace(window=(slice(top, top + WINDOW), slice(left, left + WINDOW)))


TASK = Task(make, None, "part")
