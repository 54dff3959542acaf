# SPDX-License-Identifier: Apache-2.0
"""Draws what lies around a rectangle of an image."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import box_text
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.inpaint import box, complete, rectangle


def make(dice: Dice) -> Sample | None:
    inner = rectangle(dice)
    return complete(dice, f"extend{box_text(box(inner))}", {*inner})


TASK = Task(make, judges.drawn, "edit", command="outpaint", counts_attributes=True)
