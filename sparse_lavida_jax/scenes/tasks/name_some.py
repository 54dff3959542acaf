# SPDX-License-Identifier: Apache-2.0
"""Names what is in some cells of a crowd; few names follow from the others, unlike in `name`."""

from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Layout, spans_of
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.detect import MOST_DETECTED

MOST_SHOWN = 10  # objects


def make(dice: Dice) -> Sample:
    scene = dice.scene(high=MOST_SHOWN)
    objects = list(scene.objects())
    asked = dice.several(objects, min(len(objects), MOST_DETECTED))
    text = str(Layout(tuple(asked)))
    return Sample("what is there?", scene, text, given=spans_of(r"(<LOC_\d+>)+,?", text))


TASK = Task(make, None, "tell")
