# SPDX-License-Identifier: Apache-2.0
"""Says where each object of a scene is: many boxes in parallel."""

import re

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import join_spans
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.detect import MOST_DETECTED, listed


def make(dice: Dice) -> Sample:
    """Names every object, in any order, and asks where each is: many boxes in parallel.

    A box comes right after its object, so that looking things up is learned from all of them.
    """
    scene = dice.scene(high=MOST_DETECTED)
    text = listed(dice, scene)
    given = [place.span() for place in re.finditer(r",? [a-z ]+", text)]
    return Sample("where are these?", scene, text, given=join_spans(given))


TASK = Task(make, judges.cells, "tell")
