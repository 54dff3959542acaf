# SPDX-License-Identifier: Apache-2.0
"""Answers a question about a scene in one word: how many, which colour, whether, which are more."""

import functools

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import MOST_OBJECTS, PAIRS, Dice
from sparse_lavida_jax.scenes.grammar import Phrase
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES, SIZES, Object, Scene


def make(dice: Dice) -> Sample | None:
    return dice.pick((_how_many, _what_colour, _is_there, _are_there_more))(dice)


def _how_many(dice: Dice) -> Sample:
    asked = kind(dice)
    right = dice.between(0, 4)
    wrong = dice.between(right == 0, min(3, MOST_OBJECTS - right))
    scene = _scene_with(dice, asked, right, wrong)
    return Sample(f"how many {asked.plural} are there?", scene, f" {right}")


def _what_colour(dice: Dice) -> Sample:
    others = dice.between(0, MOST_OBJECTS - 1)
    shape, colour = dice.pair(alone=others == 0)
    unlike = pairs_like(Phrase(shape), False)
    things = [Object(shape, colour, dice.pick(SIZES))]
    things += [dice.thing(among=unlike) for _ in range(others)]
    return Sample(f"what colour is the {shape}?", dice.scatter(things), f" {colour}")


def _is_there(dice: Dice) -> Sample:
    asked = kind(dice)
    right = dice.below(2)
    wrong = dice.between(1 - right, MOST_OBJECTS - 1)
    scene = _scene_with(dice, asked, right, wrong)
    return Sample(f"is there a {asked}?", scene, " yes" if right else " no")


def _are_there_more(dice: Dice) -> Sample:
    if dice.chance(50):
        first, second = (Phrase(shape) for shape in dice.several(SHAPES, 2))
    else:
        first, second = (Phrase(None, colour) for colour in dice.several(COLOURS, 2))
    yes = dice.chance(50)
    many = dice.between(1, 3)
    few = dice.below(many + (not yes))
    counts = (many, few) if yes else (few, many)
    likes = pairs_like(first), pairs_like(second)
    neither = tuple(pair for pair in PAIRS if pair not in likes[0] + likes[1])
    rest = dice.between(0, MOST_OBJECTS - many - few)
    things = [
        dice.thing(alone=many + few + rest == 1, among=among)
        for number, among in zip((*counts, rest), (*likes, neither), strict=True)
        for _ in range(number)
    ]
    prompt = f"are there more {first.plural} than {second.plural}?"
    return Sample(prompt, dice.scatter(things), " yes" if yes else " no")


def kind(dice: Dice) -> Phrase:
    """Describes a kind of thing: by shape and colour (every other time), shape, or colour."""
    shape, colour = dice.pair()
    whole = Phrase(shape, colour)
    return dice.pick((whole, whole, Phrase(shape), Phrase(None, colour)))


def kinds(thing: Object) -> tuple[Phrase, ...]:
    return Phrase(*thing.pair), Phrase(thing.shape), Phrase(None, thing.colour)


def _scene_with(dice: Dice, asked: Phrase, right: int, wrong: int) -> Scene:
    """Returns a scene of `right` objects that match and `wrong` that do not, some only nearly."""
    alone = right + wrong == 1
    unlike = pairs_like(asked, False)
    nearly = tuple(pair for pair in unlike if asked.shape in pair or asked.colour in pair) or unlike
    things = [dice.thing(alone, pairs_like(asked)) for _ in range(right)]
    things += [dice.thing(alone, nearly if dice.chance(40) else unlike) for _ in range(wrong)]
    return dice.scatter(things)


@functools.cache
def pairs_like(phrase: Phrase, alike: bool = True) -> tuple[tuple[str, str], ...]:
    """Lists the pairs of shape and colour that a phrase describes, or the others."""
    return tuple(pair for pair in PAIRS if phrase.matches(Object(*pair, SIZES[0])) == alike)


TASK = Task(make, judges.exact, "answer", command="ask", label="Answered")
