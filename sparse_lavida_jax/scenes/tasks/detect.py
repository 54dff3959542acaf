# SPDX-License-Identifier: Apache-2.0
"""Lists the objects of a scene with their cells, in the words of a layout.

Few bits of an answer or a box depend on the image; here all do, which is what teaches the vision
tower to see.
"""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Layout
from sparse_lavida_jax.scenes.task import Sample, Task

PROMPT = "list the objects"
MOST_DETECTED = 4  # objects, so that the answer is no longer than the longest layout


def make(dice: Dice) -> Sample:
    """Asks for every object, in raster order."""
    scene = dice.scene(high=MOST_DETECTED)
    return Sample(PROMPT, scene, str(Layout(tuple(scene.objects()))))


TASK = Task(make, judges.cells, "tell")
