# SPDX-License-Identifier: Apache-2.0
"""Says whether a scene is what was asked for, and if not, what is wrong."""

import dataclasses

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import ArtRequest
from sparse_lavida_jax.art.judge import unclear
from sparse_lavida_jax.art.sheet import STYLES
from sparse_lavida_jax.art.tasks import draw
from sparse_lavida_jax.art.world import MIRRORED, ArtScene
from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.rules import CORRECT
from sparse_lavida_jax.scenes.task import Sample, Task

ATTEMPTS = 12  # to make a mistake that shows


def make(dice: ArtDice) -> Sample | None:
    drawn = draw.make(dice)
    if drawn is None:
        return None
    request, scene = ArtRequest.parse(drawn.prompt, dice.sheet), drawn.target
    if dice.chance(50):
        scene = next(filter(None, (_spoiled(dice, request, scene) for _ in range(ATTEMPTS))), None)
    if scene is None:
        return None
    answer = f" {rules.verdict(request, scene)}"
    return Sample(f"check: {drawn.prompt}", scene, answer, column=drawn.column)


def _spoiled(dice: ArtDice, request: ArtRequest, scene: ArtScene) -> ArtScene | None:
    """Makes one mistake: in the number of things, or in what one looks like or where it stands.

    Returns:
        None: it is nothing that the request said, or there is no room for it.
    """
    old, background = dice.pick(scene.things), scene.background
    things = [one for one in scene.things if one != old]
    mistakes = ["lost", "added", "renamed", "restyled", "mirrored"]
    if request.relation:
        mistakes += ["moved"] * 4
    if request.background:
        mistakes.append("background")
    match dice.pick(mistakes):
        case "added":
            name, style = dice.looks(1)[0]
            things = dice.placed([(name, style, dice.size(len(scene) + 1))], scene.things) or []
        case "renamed":
            name = dice.pick(dice.sheet.things).name
            things.append(dataclasses.replace(old, name=name, facing=dice.facing(name)))
        case "restyled":
            if (old.name, "style") in unclear(dice.sheet):
                return None
            style = dice.pick([one for one in STYLES if one != old.style])
            things.append(dataclasses.replace(old, style=style))
        case "mirrored":
            if (old.name, "facing") in unclear(dice.sheet):
                return None
            things.append(dataclasses.replace(old, facing=MIRRORED[old.facing]))
        case "moved":
            *things, moved = dice.placed([(old.name, old.style, old.size)], things) or [old]
            things = [*things, dataclasses.replace(moved, facing=old.facing)]
        case "background":
            things, background = list(scene.things), dice.background()
    spoiled = ArtScene.of(background, things)
    return spoiled if things and rules.verdict(request, spoiled) != CORRECT else None


TASK = Task(make, judges.exact, "answer", command="reflect")
