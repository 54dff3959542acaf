# SPDX-License-Identifier: Apache-2.0
"""Lists the objects of a scene with their cells, in the words of a plan: all, or what is not given.

Few bits of an answer or a box depend on the image; here all do, which is what teaches the vision
tower to see.
"""

import functools

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Plan, spans_of
from sparse_lavida_jax.scenes.task import Sample, Task

MOST_DETECTED = 4  # objects, so that the answer is no longer than the longest plan


def make_detect(dice: Dice) -> Sample:
    """Asks for every object, in raster order."""
    scene = dice.scene(high=MOST_DETECTED)
    return Sample("list the objects", scene, str(Plan(tuple(scene.objects()))))


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
    text = str(Plan(tuple(objects)))
    return Sample(prompt, scene, text, given=spans_of(known, text))


# Many boxes in parallel. A box comes right after its object, so that looking things up is learned
# from all of them. `name` is `locate` the other way round.
make_locate = functools.partial(make_listing, prompt="where are these?", known=r",? [a-z ]+")
make_name = functools.partial(make_listing, prompt="what is there?", known=r"(<LOC_\d+>)+,?")

TASKS = {
    "detect": Task(make_detect, judges.cells, "tell"),
    "locate": Task(make_locate, judges.cells, "tell"),
    "name": Task(make_name, judges.cells, "tell"),
}
