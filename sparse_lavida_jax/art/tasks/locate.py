# SPDX-License-Identifier: Apache-2.0
"""Finds several things at once: a box comes right after its name."""

from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import ArtLayout
from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.grammar import spans_of
from sparse_lavida_jax.scenes.task import Sample, Task

PROMPT = "where are these?"
MOST_FOUND = 4  # things


def make(dice: ArtDice) -> Sample:
    """Lists things in any order; equal names in the order of a scene."""
    scene = dice.scene(high=MOST_FOUND)
    names = sorted({thing.name for thing in scene.things})
    order = {name: place for place, name in enumerate(dice.several(names, len(names)))}
    things = sorted(scene.things, key=lambda thing: (order[thing.name], thing))
    text = str(ArtLayout(tuple((thing.name, thing.box) for thing in things)))
    return Sample(PROMPT, scene, text, given=spans_of(r",? [^<,]+", text))


TASK = Task(make, judges.exact, "tell")
