# SPDX-License-Identifier: Apache-2.0
"""Checks a scene against a request: says whether it is what was asked for, else what is wrong."""

import dataclasses

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import SceneRequest
from sparse_lavida_jax.scenes.rules import verdict
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import draw
from sparse_lavida_jax.scenes.world import COLOURS, EMPTY, SHAPES, Scene


def make(dice: Dice) -> Sample | None:
    drawn, request, _ = draw.make_with_request(dice)
    assert drawn.target is not None
    scene = drawn.target if dice.chance(50) else _spoil(dice, request, drawn.target)
    if len(scene) == 0:
        return None
    prompt = f"check: {request}"
    return Sample(prompt, scene, f" {verdict(request, scene)}", column=drawn.column)


def _spoil(dice: Dice, request: SceneRequest, scene: Scene) -> Scene:
    """Makes one mistake: a thing left out, one too many, one wrong, or a relation broken."""
    cell, thing = dice.pick(list(scene.objects()))
    free = dice.pick([place for place, look in enumerate(scene.cells) if look == EMPTY])
    match dice.below(4 if request.relation else 3):
        case 0:
            return scene.changed({cell: EMPTY})
        case 1:
            return scene.changed({free: dice.thing().index})
        case 2:
            wrong = dataclasses.replace(
                thing, **dice.pick(({"shape": dice.pick(SHAPES)}, {"colour": dice.pick(COLOURS)}))
            )
            return scene.changed({cell: wrong.index})
        case _:
            return scene.changed({cell: EMPTY, free: thing.index})


TASK = Task(make, judges.exact, "answer", command="reflect")
