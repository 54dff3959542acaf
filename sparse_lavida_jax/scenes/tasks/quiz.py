# SPDX-License-Identifier: Apache-2.0
"""Answers several questions about one scene."""

import re

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Phrase, spans_of
from sparse_lavida_jax.scenes.rules import count
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.answer import kind, kinds
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES, Scene

QUESTIONS, MOST_ASKED = 4, 36  # of a quiz, and its words, so that no plan is shorter


def make(dice: Dice) -> Sample | None:
    """Asks several questions about one image, each answer after its question.

    As `locate` to `point`, so this to `answer`: only one word in eight of an answer teaches
    something, and here there are as many such words as questions.
    """
    scene = dice.scene(low=2)
    asked = [_ask_about(dice, scene) for _ in range(QUESTIONS)]
    if len({question for question, _ in asked}) < len(asked):
        return None
    # No space before a question: its words are then the tokens that they are in a prompt.
    text = ",".join(f"{question} {said}" for question, said in asked)
    if len(re.findall(r"[a-z]+|[0-9?,]", text)) > MOST_ASKED:
        return None
    return Sample("what is there?", scene, text, given=spans_of(r",?[a-z ]+\?", text))


def _ask_about(dice: Dice, scene: Scene) -> tuple[str, str]:
    """Returns a question of a kind of `answer` about a scene, and what is right."""
    things = [thing for _, thing in scene.objects()]
    asked = dice.pick(kinds(dice.pick(things))) if dice.chance(60) else kind(dice)
    match dice.below(4):
        case 0:
            return f"how many {asked.plural} are there?", str(count(scene, asked))
        case 1:
            return f"is there a {asked}?", "yes" if count(scene, asked) else "no"
        case 2:
            first, second = (Phrase(shape) for shape in dice.several(SHAPES, 2))
            if dice.chance(50):
                first, second = (Phrase(None, colour) for colour in dice.several(COLOURS, 2))
            more = count(scene, first) > count(scene, second)
            prompt = f"are there more {first.plural} than {second.plural}?"
            return prompt, "yes" if more else "no"
        case _:
            single = [one for one in things if count(scene, Phrase(one.shape)) == 1]
            if not single:
                return f"how many {asked.plural} are there?", str(count(scene, asked))
            thing = dice.pick(single)
            return f"what colour is the {thing.shape}?", thing.colour


TASK = Task(make, judges.exact, "tell")
