# SPDX-License-Identifier: Apache-2.0
"""Questions about what is in a scene: one, several at once, and sums of what is counted."""

import functools
import re

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import MOST_OBJECTS, PAIRS, Dice
from sparse_lavida_jax.scenes.grammar import Phrase, spans_of
from sparse_lavida_jax.scenes.rules import count
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES, SIZES, Object, Scene

MOST_COUNTED = 9  # no sum is larger
QUESTIONS, MOST_ASKED = 4, 36  # of a quiz, and its words, so that no plan is shorter
Asked = tuple[str, str]  # a question, and what is right


# ---------------------------------------------------------------------------------------------
# Questions.


def _how_many(scene: Scene, asked: Phrase) -> Asked:
    return f"how many {asked.plural} are there?", str(count(scene, asked))


def _is_there(scene: Scene, asked: Phrase) -> Asked:
    return f"is there a {asked}?", "yes" if count(scene, asked) else "no"


def _are_there_more(scene: Scene, first: Phrase, second: Phrase) -> Asked:
    more = count(scene, first) > count(scene, second)
    return f"are there more {first.plural} than {second.plural}?", "yes" if more else "no"


def _what_colour(thing: Object) -> Asked:
    return f"what colour is the {thing.shape}?", thing.colour


def _kind(dice: Dice) -> Phrase:
    """Describes a kind of thing: by shape and colour (every other time), shape, or colour."""
    shape, colour = dice.pair()
    whole = Phrase(shape, colour)
    return dice.pick((whole, whole, Phrase(shape), Phrase(None, colour)))


def _kinds(thing: Object) -> tuple[Phrase, ...]:
    return Phrase(*thing.pair), Phrase(thing.shape), Phrase(None, thing.colour)


# ---------------------------------------------------------------------------------------------
# One question, about a scene that is made for it: all answers are about equally frequent.


def make_answer(dice: Dice) -> Sample:
    """Asks how many there are, for a colour, whether there is one, or of which there are more."""
    make = dice.pick((_count_made, _colour_made, _presence_made, _comparison_made))
    scene, (question, said) = make(dice)
    return Sample(question, scene, f" {said}")


def _count_made(dice: Dice) -> tuple[Scene, Asked]:
    asked = _kind(dice)
    right = dice.between(0, 4)
    wrong = dice.between(right == 0, min(3, MOST_OBJECTS - right))
    scene = _scene_with(dice, asked, right, wrong)
    return scene, _how_many(scene, asked)


def _colour_made(dice: Dice) -> tuple[Scene, Asked]:
    others = dice.between(0, MOST_OBJECTS - 1)
    shape, colour = dice.pair(alone=others == 0)
    unlike = _pairs_like(Phrase(shape), False)
    thing = Object(shape, colour, dice.pick(SIZES))
    scene = dice.scatter([thing, *(dice.thing(among=unlike) for _ in range(others))])
    return scene, _what_colour(thing)


def _presence_made(dice: Dice) -> tuple[Scene, Asked]:
    asked = _kind(dice)
    right = dice.below(2)
    wrong = dice.between(1 - right, MOST_OBJECTS - 1)
    scene = _scene_with(dice, asked, right, wrong)
    return scene, _is_there(scene, asked)


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
    return scene, _are_there_more(scene, first, second)


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


# ---------------------------------------------------------------------------------------------
# Several questions about one scene.


def make_quiz(dice: Dice) -> Sample | None:
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


def _ask_about(dice: Dice, scene: Scene) -> Asked:
    things = [thing for _, thing in scene.objects()]
    asked = dice.pick(_kinds(dice.pick(things))) if dice.chance(60) else _kind(dice)
    match dice.below(4):
        case 1:
            return _is_there(scene, asked)
        case 2:
            first, second = (Phrase(shape) for shape in dice.several(SHAPES, 2))
            if dice.chance(50):
                first, second = (Phrase(None, colour) for colour in dice.several(COLOURS, 2))
            return _are_there_more(scene, first, second)
        case 3:
            if single := [one for one in things if count(scene, Phrase(one.shape)) == 1]:
                return _what_colour(dice.pick(single))
    return _how_many(scene, asked)


# ---------------------------------------------------------------------------------------------
# Sums.


def make_arithmetic(dice: Dice) -> Sample | None:
    """Adds and subtracts what is counted in a scene, step by step."""
    scene = dice.scene(low=2)
    kinds = [dice.pick(_kinds(thing)) for _, thing in dice.several(list(scene.objects()), 2)]
    kinds += [_kind(dice)] if dice.chance(33) else []
    if len({*kinds}) < len(kinds):
        return None
    total = count(scene, kinds[0])
    asked, said = f"how many {kinds[0].plural}", f" {total}"
    steps = [(dice.pick(("plus", "minus")), kind) for kind in kinds[1:]]
    for number, (sign, kind) in enumerate(steps):
        term = count(scene, kind)
        total += term if sign == "plus" else -term
        if not 0 <= total <= MOST_COUNTED:
            return None
        asked += f" {sign} how many {kind.plural}"
        said += f"{',' if number else ''} {sign} {term} is {total}"
    return Sample(f"{asked}?", scene, said)


def judge_steps(sample: Sample, output: str) -> str:
    right = (sample.answer or "").strip()
    if output != right and output.split(" ")[-1] == right.split(" ")[-1]:
        return f"the number is right, the steps are '{right}', not '{output}'"
    return judges.exact(sample, output)


TASKS = {
    "answer": Task(make_answer, judges.exact, "answer", command="ask", label="Answered"),
    "arithmetic": Task(make_arithmetic, judge_steps, "answer", command="reason"),
    "quiz": Task(make_quiz, judges.exact, "tell"),
}
