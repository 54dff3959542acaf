# SPDX-License-Identifier: Apache-2.0
"""Answers a question in two steps: first what the image shows, then what follows from it."""

from collections import Counter

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import Art, plural
from sparse_lavida_jax.art.world import ArtScene
from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.grammar import box_text
from sparse_lavida_jax.scenes.task import Sample, Task

QUESTIONS = {
    "sum": "how many things are there?",
    "more": "are there more {0} than {1}?",
    "further": "which is further {0}, the {1} or the {2}?",
}
FURTHER = {"left": "left of", "right": "right of", "up": "above", "down": "below"}


def make(dice: ArtDice) -> Sample | None:
    column, scene = dice.pick(tuple(QUESTIONS)), dice.scene()
    counts = Counter(thing.name for thing in scene.things)
    if column == "sum":
        listed = ", ".join(Art(name).times(count) for name, count in counts.items())
        return Sample(QUESTIONS[column], scene, f" {listed}: {len(scene)}", column=column)
    found = _more(dice, counts) if column == "more" else _further(dice, scene)
    if found is None:
        return None
    words, answer = found
    return Sample(QUESTIONS[column].format(*words), scene, answer, column=column)


def _more(dice: ArtDice, counts: Counter[str]) -> tuple[tuple[str, str], str] | None:
    absent = [thing.name for thing in dice.sheet.things if thing.name not in counts]
    names = [dice.pick(tuple(counts)), dice.pick((*counts, dice.pick(absent)))]
    if names[0] == names[1]:
        return None
    first, second = dice.several(names, 2)
    said = "yes" if counts[first] > counts[second] else "no"
    return (plural(first), plural(second)), f" {counts[first]} and {counts[second]}: {said}"


def _further(dice: ArtDice, scene: ArtScene) -> tuple[tuple[str, str, str], str] | None:
    if len(scene) < 2:
        return None
    pair, way = dice.several(scene.things, 2), dice.pick(tuple(FURTHER))
    named = [rules.reference(scene, thing) for thing in pair]
    ahead = [rules.related(FURTHER[way], *pair), rules.related(FURTHER[way], *pair[::-1])]
    if None in named or not any(ahead):
        return None
    first, second = map(str, named)
    boxes = [box_text(thing.box) for thing in pair]
    answer = f" {first}{boxes[0]}, {second}{boxes[1]}: {first if ahead[0] else second}"
    return (way, first, second), answer


TASK = Task(make, judges.exact, "answer")
