# SPDX-License-Identifier: Apache-2.0
"""Names what stands in some boxes of a scene: one skill, from a place to its contents."""

from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import ArtLayout
from sparse_lavida_jax.art.tasks import detect
from sparse_lavida_jax.scenes.grammar import spans_of
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.name import PROMPT


def make(dice: ArtDice) -> Sample:
    scene = dice.scene()
    asked = dice.several(scene.things, dice.between(1, len(scene)))
    text = str(ArtLayout(tuple((thing.name, thing.box) for thing in asked)))
    return Sample(PROMPT, scene, text, given=spans_of(r"(<LOC_\d+>)+,?", text))


TASK = Task(make, detect.judge, "tell")
