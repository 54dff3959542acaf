# SPDX-License-Identifier: Apache-2.0
"""Answers several questions about one scene, each right after its question."""

import re
from collections.abc import Sequence

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Phrase, spans_of
from sparse_lavida_jax.scenes.rules import count
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import answer
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES, Scene

QUESTIONS = 4
MOST_ASKED = 36  # words, so that no layout is shorter


def make(dice: Dice) -> Sample | None:
    """Asks several questions about one image, each answer after its question.

    As `locate` to `point`, so this to `answer`: only one word in eight of an answer teaches
    something, and here there are as many such words as questions.
    """
    scene = dice.scene(low=2)
    return asked_together(scene, [_ask_about(dice, scene) for _ in range(QUESTIONS)])


def asked_together(scene: Scene, asked: Sequence[answer.Asked]) -> Sample | None:
    """Returns an example of several questions; None where two are alike, or they are too long."""
    if len({question for question, _ in asked}) < len(asked):
        return None
    # No space before a question: its words are then the tokens that they are in a prompt.
    text = ",".join(f"{question} {said}" for question, said in asked)
    if len(re.findall(r"[a-z]+|[0-9?,]", text)) > MOST_ASKED:
        return None
    return Sample("what is there?", scene, text, given=spans_of(r",?[a-z ]+\?", text))


def _ask_about(dice: Dice, scene: Scene) -> answer.Asked:
    things = [thing for _, thing in scene.objects()]
    asked = dice.pick(answer.kinds(dice.pick(things))) if dice.chance(60) else answer.kind(dice)
    match dice.below(4):
        case 1:
            return answer.is_there(scene, asked)
        case 2:
            first, second = (Phrase(shape) for shape in dice.several(SHAPES, 2))
            if dice.chance(50):
                first, second = (Phrase(None, colour) for colour in dice.several(COLOURS, 2))
            return answer.are_there_more(scene, first, second)
        case 3:
            if single := [one for one in things if count(scene, Phrase(one.shape)) == 1]:
                return answer.what_colour(dice.pick(single))
    return answer.how_many(scene, asked)


TASK = Task(make, judges.exact, "tell")
