# SPDX-License-Identifier: Apache-2.0
"""Draws an image of what a request names; style and facing are often left open."""

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice, held_out_looks
from sparse_lavida_jax.art.grammar import Art, ArtLayout, ArtRequest
from sparse_lavida_jax.art.judge import unclear
from sparse_lavida_jax.art.sheet import LANGUAGES
from sparse_lavida_jax.art.world import ArtScene, Placed
from sparse_lavida_jax.scenes.grammar import RELATIONS
from sparse_lavida_jax.scenes.task import Sample, Task

COLUMNS = ("open", "style", "facing", "size", "counting", "position", "language")


def make(dice: ArtDice) -> Sample | None:
    column = dice.pick(COLUMNS)
    scene = dice.scene(low=1 + (column in ("counting", "position")), high=_MOST.get(column, 4))
    request = worded(dice, scene, column)
    if request is None:
        return None
    language = dice.pick(LANGUAGES[1:]) if column == "language" else "en"
    layout = str(ArtLayout.of(scene, request))
    words = request.said(language, dice.sheet)
    return Sample(words, target=scene, layout=layout, column=column)


_MOST = {"counting": 5, "position": 2, "language": 3}


def worded(dice: ArtDice, scene: ArtScene, column: str) -> ArtRequest | None:
    """Returns a request for a scene that says something of a kind; None if the scene has it not."""
    things = dice.several(scene.things, len(scene))
    names, styles = {thing.name for thing in things}, {thing.style for thing in things}
    if (column == "counting") != (len(names) < len(things)):
        return None
    if column == "counting":
        if len(names) > 1:
            return None
        style = styles.pop() if len(styles) == 1 and dice.chance(50) else None
        return ArtRequest(((len(things), Art(things[0].name)),), style=style)
    common = styles.pop() if len(styles) == 1 else None
    style = common if column == "style" or dice.chance(25) else None
    phrases = [_phrase(dice, thing, column) for thing in things]
    said = {"style": style, "facing": any(p.facing for p in phrases)}
    if not said.get(column, True):
        return None
    looks = held_out_looks(dice.sheet)
    if style is None and any((thing.name, thing.style) in looks for thing in things):
        if column == "language":
            return None
        # Else what is held out would not be asked for.
        phrases = [
            phrase._replace(style=thing.style if (thing.name, thing.style) in looks else None)
            for phrase, thing in zip(phrases, things, strict=True)
        ]
    relation = None
    if column == "position":
        ways = [way for way in RELATIONS if rules.related(way, things[0], things[1])]
        if not ways:
            return None
        relation = dice.pick(ways)
    background = scene.background if column != "language" and dice.chance(25) else None
    return ArtRequest(tuple((1, phrase) for phrase in phrases), relation, style, background)


def _phrase(dice: ArtDice, thing: Placed, column: str) -> Art:
    clear = thing.facing and (thing.name, "facing") not in unclear(dice.sheet)
    return Art(
        thing.name,
        thing.size if column == "size" and dice.chance(70) else None,
        None,
        thing.facing if column == "facing" and clear and dice.chance(70) else None,
    )


TASK = Task(make, rules.drawn, "draw", command="generate", label="Drawn")
