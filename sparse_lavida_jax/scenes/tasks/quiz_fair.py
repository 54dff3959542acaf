# SPDX-License-Identifier: Apache-2.0
"""Answers several questions about a crowd of few kinds; no answer is likelier than another.

Differs from `quiz` and `answer`, where most of what is asked for is absent or there once: a model
which does not look is often right there, and learns to look late.
"""

import itertools
from collections.abc import Mapping
from typing import TypeVar

from sparse_lavida_jax.scenes.dice import TRAINED, Dice
from sparse_lavida_jax.scenes.grammar import Phrase
from sparse_lavida_jax.scenes.rules import count
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import answer
from sparse_lavida_jax.scenes.tasks.quiz import QUESTIONS, asked_together
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES, SIZES, Object, Scene

MOST_KINDS, MOST_SHOWN = 4, 8  # pairs of shape and colour in a crowd, and objects
MOST_COUNTED = 4  # as in `answer`
BY_SHAPE = tuple(Phrase(shape) for shape in SHAPES)
BY_COLOUR = tuple(Phrase(None, colour) for colour in COLOURS)
KINDS = (*BY_SHAPE, *BY_COLOUR, *(Phrase(*pair) for pair in TRAINED))

T = TypeVar("T")


def make(dice: Dice) -> Sample | None:
    scene = _crowd(dice)
    return asked_together(scene, [_ask_about(dice, scene) for _ in range(QUESTIONS)])


def _crowd(dice: Dice) -> Scene:
    pool = dice.several(TRAINED, dice.between(1, MOST_KINDS))
    number = max(dice.between(1, MOST_SHOWN), dice.between(1, MOST_SHOWN))
    return dice.scatter([Object(*dice.pick(pool), dice.pick(SIZES)) for _ in range(number)])


def _ask_about(dice: Dice, scene: Scene) -> answer.Asked:
    numbers = {kind: count(scene, kind) for kind in KINDS}
    only_ones = [thing for _, thing in scene.objects() if numbers[Phrase(thing.shape)] == 1]
    match dice.below(4 if only_ones else 3):
        case 0:
            few = {kind: number for kind, number in numbers.items() if 0 < number <= MOST_COUNTED}
            if not few or dice.chance(10):
                few = {kind: 0 for kind, number in numbers.items() if not number}
            return answer.how_many(scene, _of_an_answer(dice, few))
        case 1:
            there = {kind: number > 0 for kind, number in numbers.items()}
            return answer.is_there(scene, _of_an_answer(dice, there))
        case 2:
            among = dice.pick((BY_SHAPE, BY_COLOUR))
            more = {
                (first, second): numbers[first] > numbers[second]
                for first, second in itertools.permutations(among, 2)
                if numbers[first] or numbers[second]
            }
            return answer.are_there_more(scene, *_of_an_answer(dice, more))
    return answer.what_colour(dice.pick(only_ones))


def _of_an_answer(dice: Dice, answers: Mapping[T, int]) -> T:
    """Picks an answer that something has, and then what has it."""
    said = dice.pick(sorted({*answers.values()}))
    return dice.pick([asked for asked, right in answers.items() if right == said])


TASK = Task(make, None, "tell")
