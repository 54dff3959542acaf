# SPDX-License-Identifier: Apache-2.0
"""Says where each object of a scene is: many boxes in parallel."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.detect import listing


def make(dice: Dice) -> Sample:
    """Names every object, in any order, and asks where each is: many boxes in parallel.

    A box comes right after its object, so that looking things up is learned from all of them.
    """
    return listing(dice, "where are these?", r",? [a-z ]+")


TASK = Task(make, judges.cells, "tell")
