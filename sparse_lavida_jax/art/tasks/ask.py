# SPDX-License-Identifier: Apache-2.0
"""Answers a question about a scene: how many, whether, and the style, facing or size of a thing."""

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import (
    HOW_MANY,
    IS_THERE,
    YES_NO,
    Art,
    article,
    plural,
)
from sparse_lavida_jax.art.judge import unclear
from sparse_lavida_jax.art.sheet import LANGUAGES
from sparse_lavida_jax.art.world import ArtScene
from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.task import Sample, Task

COLUMNS = ("count", "presence", "style", "facing", "size")
QUESTIONS = {
    "style": "what style is the {0}?",
    "facing": "where does the {0} face?",
    "size": "how large is the {0}?",
}


def make(dice: ArtDice) -> Sample | None:
    """Asks about a scene; yes and no are equally frequent, and so are the languages of counts."""
    column, scene = dice.pick(COLUMNS), dice.scene()
    if column in ("count", "presence"):
        question, answer = counted(dice, scene, column)
        return Sample(question, scene, f" {answer}", column=column)
    thing = dice.pick(scene.things)
    phrase = rules.reference(scene, thing)
    answer = {"style": thing.style, "facing": thing.facing, "size": thing.size}[column]
    if phrase is None or not answer or (thing.name, column) in unclear(dice.sheet):
        return None
    if column == "size" and phrase.size:
        return None
    return Sample(QUESTIONS[column].format(phrase), scene, f" {answer}", column=column)


def counted(dice: ArtDice, scene: ArtScene, column: str) -> tuple[str, str]:
    """Asks for the number of a thing, or for whether it is there."""
    shown = {thing.name for thing in scene.things}
    others = [thing.name for thing in dice.sheet.things if thing.name not in shown]
    absent = dice.chance(50 if column == "presence" else 20)
    name = dice.pick(others) if absent else dice.pick(scene.things).name
    count = sum(Art(name).matches(thing) for thing in scene.things)
    language = dice.pick(LANGUAGES)
    spoken = dice.sheet.spoken(name, language)
    if column == "count":
        return HOW_MANY[language].format(plural(name) if language == "en" else spoken), str(count)
    asked = f"{article(name)} {name}" if language == "en" else spoken
    return IS_THERE[language].format(asked), YES_NO[language][count == 0]


TASK = Task(make, judges.exact, "answer", command="ask", label="Answered")
