# SPDX-License-Identifier: Apache-2.0
"""Names what stands in some boxes, with its style and facing: few words follow from the others."""

from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import Art
from sparse_lavida_jax.art.judge import unclear
from sparse_lavida_jax.art.world import Placed
from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.grammar import box_text, spans_of
from sparse_lavida_jax.scenes.task import Sample, Task

PROMPT = "what is there?"
MOST_NAMED = 3  # things, so that the answer is no longer than the longest layout


def make(dice: ArtDice) -> Sample:
    scene = dice.scene(low=2)
    things = dice.several(scene.things, min(len(scene), MOST_NAMED))
    text = ",".join(f" {_look(dice, thing)}{box_text(thing.box)}" for thing in things)
    return Sample(PROMPT, scene, text, given=spans_of(r"(<LOC_\d+>)+,?", text))


def _look(dice: ArtDice, thing: Placed) -> Art:
    hidden = unclear(dice.sheet)
    style, facing = (
        value if (thing.name, kind) not in hidden else ""
        for kind, value in (("style", thing.style), ("facing", thing.facing))
    )
    return Art(thing.name, None, style or None, facing or None)


TASK = Task(make, judges.exact, "tell")
