# SPDX-License-Identifier: Apache-2.0
"""Says what is in each box of a scene: `locate` the other way round."""

import re

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import join_spans
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.detect import MOST_DETECTED, listed


def make(dice: Dice) -> Sample:
    """Gives the box of every object and asks what is there: `locate` the other way round."""
    scene = dice.scene(high=MOST_DETECTED)
    text = listed(dice, scene)
    given = [place.span() for place in re.finditer(r"(<LOC_\d+>)+,?", text)]
    return Sample("what is there?", scene, text, given=join_spans(given))


TASK = Task(make, judges.cells, "tell")
