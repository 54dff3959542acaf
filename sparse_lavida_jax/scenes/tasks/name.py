# SPDX-License-Identifier: Apache-2.0
"""Says what is in each box of a scene: `locate` the other way round."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.detect import listing


def make(dice: Dice) -> Sample:
    """Gives the box of every object and asks what is there: `locate` the other way round."""
    return listing(dice, "what is there?", r"(<LOC_\d+>)+,?")


TASK = Task(make, judges.cells, "tell")
