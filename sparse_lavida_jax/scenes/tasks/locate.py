# SPDX-License-Identifier: Apache-2.0
"""Finds several objects at once: a box comes right after its object.

Many boxes in parallel, so that looking things up is learned from all of them.
"""

import functools

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Layout, spans_of
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.detect import MOST_DETECTED


def make_listing(dice: Dice, *, prompt: str, known: str) -> Sample:
    """Lists objects with their cells in any order; those that look alike in raster order.

    Args:
        known: matches the parts of the list that are given.
    """
    scene = dice.scene(high=MOST_DETECTED)
    objects = list(scene.objects())
    looks = sorted({thing.index for _, thing in objects})
    order = {look: place for place, look in enumerate(dice.several(looks, len(looks)))}
    objects.sort(key=lambda one: (order[one[1].index], one[0]))
    text = str(Layout(tuple(objects)))
    return Sample(prompt, scene, text, given=spans_of(known, text))


PROMPT = "where are these?"
make = functools.partial(make_listing, prompt=PROMPT, known=r",? [a-z ]+")
TASK = Task(make, judges.cells, "tell")
