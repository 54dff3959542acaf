# SPDX-License-Identifier: Apache-2.0
"""Answers a question about what is in a scene: how many, which colour, whether, and which more."""

import functools

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import MOST_OBJECTS, PAIRS, Dice
from sparse_lavida_jax.scenes.grammar import Phrase
from sparse_lavida_jax.scenes.rules import count
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES, SIZES, Object, Scene

Asked = tuple[str, str]  # a question, and what is right


# ---------------------------------------------------------------------------------------------
# Questions.


def how_many(scene: Scene, asked: Phrase) -> Asked:
    return f"how many {asked.plural} are there?", str(count(scene, asked))


def is_there(scene: Scene, asked: Phrase) -> Asked:
    return f"is there a {asked}?", "yes" if count(scene, asked) else "no"


def are_there_more(scene: Scene, first: Phrase, second: Phrase) -> Asked:
    more = count(scene, first) > count(scene, second)
    return f"are there more {first.plural} than {second.plural}?", "yes" if more else "no"


def what_colour(thing: Object) -> Asked:
    return f"what colour is the {thing.shape}?", thing.colour


def kind(dice: Dice) -> Phrase:
    """Describes a kind of thing: by shape and colour (every other time), shape, or colour."""
    shape, colour = dice.pair()
    whole = Phrase(shape, colour)
    return dice.pick((whole, whole, Phrase(shape), Phrase(None, colour)))


def kinds(thing: Object) -> tuple[Phrase, ...]:
    return Phrase(*thing.pair), Phrase(thing.shape), Phrase(None, thing.colour)


# ---------------------------------------------------------------------------------------------
# One question, about a scene that is made for it: all answers are about equally frequent.


def make(dice: Dice) -> Sample:
    """Asks how many there are, for a colour, whether there is one, or of which there are more."""
    column = dice.pick(COLUMNS)
    scene, (question, said) = MADE[column](dice)
    return Sample(question, scene, f" {said}", column=column)


def _count_made(dice: Dice) -> tuple[Scene, Asked]:
    asked = kind(dice)
    right = dice.between(0, 4)
    wrong = dice.between(right == 0, min(3, MOST_OBJECTS - right))
    scene = _scene_with(dice, asked, right, wrong)
    return scene, how_many(scene, asked)


def _colour_made(dice: Dice) -> tuple[Scene, Asked]:
    others = dice.between(0, MOST_OBJECTS - 1)
    shape, colour = dice.pair(alone=others == 0)
    unlike = _pairs_like(Phrase(shape), False)
    thing = Object(shape, colour, dice.pick(SIZES))
    scene = dice.scatter([thing, *(dice.thing(among=unlike) for _ in range(others))])
    return scene, what_colour(thing)


def _presence_made(dice: Dice) -> tuple[Scene, Asked]:
    asked = kind(dice)
    right = dice.below(2)
    wrong = dice.between(1 - right, MOST_OBJECTS - 1)
    scene = _scene_with(dice, asked, right, wrong)
    return scene, is_there(scene, asked)


def _comparison_made(dice: Dice) -> tuple[Scene, Asked]:
    if dice.chance(50):
        first, second = (Phrase(shape) for shape in dice.several(SHAPES, 2))
    else:
        first, second = (Phrase(None, colour) for colour in dice.several(COLOURS, 2))
    yes = dice.chance(50)
    many = dice.between(1, 3)
    few = dice.below(many + (not yes))
    counts = (many, few) if yes else (few, many)
    likes = _pairs_like(first), _pairs_like(second)
    neither = tuple(pair for pair in PAIRS if pair not in likes[0] + likes[1])
    rest = dice.between(0, MOST_OBJECTS - many - few)
    things = [
        dice.thing(alone=many + few + rest == 1, among=among)
        for number, among in zip((*counts, rest), (*likes, neither), strict=True)
        for _ in range(number)
    ]
    scene = dice.scatter(things)
    return scene, are_there_more(scene, first, second)


def _scene_with(dice: Dice, asked: Phrase, right: int, wrong: int) -> Scene:
    """Returns a scene of `right` objects that match and `wrong` that do not, some only nearly."""
    alone = right + wrong == 1
    unlike = _pairs_like(asked, False)
    nearly = tuple(pair for pair in unlike if asked.shape in pair or asked.colour in pair) or unlike
    things = [dice.thing(alone, _pairs_like(asked)) for _ in range(right)]
    things += [dice.thing(alone, nearly if dice.chance(40) else unlike) for _ in range(wrong)]
    return dice.scatter(things)


@functools.cache
def _pairs_like(phrase: Phrase, alike: bool = True) -> tuple[tuple[str, str], ...]:
    """Lists the pairs of shape and colour that a phrase describes, or the others."""
    return tuple(pair for pair in PAIRS if phrase.matches(Object(*pair, SIZES[0])) == alike)


MADE = {
    "count": _count_made,
    "colour": _colour_made,
    "presence": _presence_made,
    "comparison": _comparison_made,
}
COLUMNS = tuple(MADE)
TASK = Task(make, judges.exact, "answer", command="ask", label="Answered")
