# SPDX-License-Identifier: Apache-2.0
"""Examples whose response is text; makers as in `scenes/image_tasks.py`."""

import dataclasses
import functools
import itertools
import re

from sparse_lavida_jax.scenes.dice import MOST_OBJECTS, PAIRS, Dice
from sparse_lavida_jax.scenes.grammar import (
    RELATIONS,
    Converse,
    Phrase,
    Plan,
    SceneRequest,
    box_text,
    join_spans,
    object_box,
    words,
)
from sparse_lavida_jax.scenes.image_tasks import Sample, draw, make_request
from sparse_lavida_jax.scenes.rules import count, describe, reference, verdict
from sparse_lavida_jax.scenes.world import COLOURS, EMPTY, NUM_CELLS, SHAPES, SIZES, Object, Scene

MOST_COUNTED = 9  # no sum is larger
QUESTIONS, MOST_ASKED = 4, 36  # of a quiz, and its words, so that no plan is shorter
MOST_DETECTED = 4  # objects, so that the answer is no longer than the longest plan


def answer(dice: Dice) -> Sample | None:
    return dice.pick((_how_many, _what_colour, _is_there, _are_there_more))(dice)


def _how_many(dice: Dice) -> Sample:
    asked = _kind(dice)
    right = dice.between(0, 4)
    wrong = dice.between(right == 0, min(3, MOST_OBJECTS - right))
    scene = _scene_with(dice, asked, right, wrong)
    return Sample("", f"how many {asked.plural} are there?", scene, f" {right}")


def _what_colour(dice: Dice) -> Sample:
    others = dice.between(0, MOST_OBJECTS - 1)
    shape, colour = dice.pair(alone=others == 0)
    unlike = pairs_like(Phrase(shape), False)
    things = [Object(shape, colour, dice.pick(SIZES))]
    things += [dice.thing(among=unlike) for _ in range(others)]
    return Sample("", f"what colour is the {shape}?", dice.scatter(things), f" {colour}")


def _is_there(dice: Dice) -> Sample:
    asked = _kind(dice)
    right = dice.below(2)
    wrong = dice.between(1 - right, MOST_OBJECTS - 1)
    scene = _scene_with(dice, asked, right, wrong)
    return Sample("", f"is there a {asked}?", scene, " yes" if right else " no")


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
    return Sample("", prompt, dice.scatter(things), " yes" if yes else " no")


def quiz(dice: Dice) -> Sample | None:
    """Asks several questions about one image, every answer behind its question.

    As `locate` to `point`, so this to `answer`: of one word in eight of an answer something is
    learned, and here there are as many such words as questions.
    """
    scene = dice.scene(low=2)
    asked = [_ask_about(dice, scene) for _ in range(QUESTIONS)]
    if len({question for question, _ in asked}) < len(asked):
        return None
    # No space before a question: its words are then the tokens that they are in a prompt.
    text = ",".join(f"{question} {said}" for question, said in asked)
    if len(re.findall(r"[a-z]+|[0-9?,]", text)) > MOST_ASKED:
        return None
    given = [place.span() for place in re.finditer(r",?[a-z ]+\?", text)]
    return Sample("", "what is there?", scene, text, given=join_spans(given))


def _ask_about(dice: Dice, scene: Scene) -> tuple[str, str]:
    """Returns a question of a kind of `answer` about a scene, and what is right."""
    things = [thing for _, thing in scene.objects()]
    asked = dice.pick(_kinds(dice.pick(things))) if dice.chance(60) else _kind(dice)
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


def _kind(dice: Dice) -> Phrase:
    """Describes a kind of thing: by shape and colour (every other time), shape, or colour."""
    shape, colour = dice.pair()
    whole = Phrase(shape, colour)
    return dice.pick((whole, whole, Phrase(shape), Phrase(None, colour)))


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


def arithmetic(dice: Dice) -> Sample | None:
    scene = dice.scene(low=2)
    kinds = [dice.pick(_kinds(thing)) for _, thing in dice.several(list(scene.objects()), 2)]
    kinds += [_kind(dice)] if dice.chance(33) else []
    if len({*kinds}) < len(kinds):
        return None
    signs = [dice.pick(("plus", "minus")) for _ in kinds[1:]]
    totals = list(
        itertools.accumulate(
            zip(signs, (count(scene, kind) for kind in kinds[1:]), strict=True),
            lambda total, term: total + term[1] * (1 if term[0] == "plus" else -1),
            initial=count(scene, kinds[0]),
        )
    )
    if min(totals) < 0 or max(totals) > MOST_COUNTED:
        return None
    asked = [f"how many {kind.plural}" for kind in kinds]
    prompt = asked[0] + "".join(f" {s} {a}" for s, a in zip(signs, asked[1:], strict=True)) + "?"
    steps = [
        f" {sign} {count(scene, kind)} is {total}"
        for sign, kind, total in zip(signs, kinds[1:], totals[1:], strict=True)
    ]
    return Sample("", prompt, scene, f" {totals[0]}" + ",".join(steps))


def _kinds(thing: Object) -> tuple[Phrase, ...]:
    return Phrase(*thing.pair), Phrase(thing.shape), Phrase(None, thing.colour)


def point(dice: Dice) -> Sample | None:
    scene = dice.scene()
    cell, thing = dice.pick(list(scene.objects()))
    phrase = reference(scene, cell)
    box = box_text(object_box(cell, thing))
    return phrase and Sample("", f"where is the {phrase}?", scene, box)


def detect(dice: Dice) -> Sample:
    """Asks for every object with its cell, in raster order, in the words of a plan.

    Few bits of an answer or a box depend on the image; here all do, which is what teaches the
    vision tower to see.
    """
    scene = dice.scene(high=MOST_DETECTED)
    return Sample("", "list the objects", scene, str(Plan(tuple(scene.objects()))))


def locate(dice: Dice) -> Sample:
    """Names every object, in any order, and asks where each is: many boxes in parallel.

    A box stands right behind what it is of, so that looking things up is learned from all of them.
    """
    scene = dice.scene(high=MOST_DETECTED)
    listed = _listed(dice, scene)
    given = [place.span() for place in re.finditer(r",? [a-z ]+", listed)]
    return Sample("", "where are these?", scene, listed, given=join_spans(given))


def name(dice: Dice) -> Sample:
    """Gives the box of every object and asks what is there: `locate` the other way round."""
    scene = dice.scene(high=MOST_DETECTED)
    listed = _listed(dice, scene)
    given = [place.span() for place in re.finditer(r"(<LOC_\d+>)+,?", listed)]
    return Sample("", "what is there?", scene, listed, given=join_spans(given))


def _listed(dice: Dice, scene: Scene) -> str:
    """Lists the objects with their cells in any order; those that look alike in raster order."""
    objects = list(scene.objects())
    looks = sorted({thing.index for _, thing in objects})
    order = {look: place for place, look in enumerate(dice.several(looks, len(looks)))}
    objects.sort(key=lambda one: (order[one[1].index], one[0]))
    return str(Plan(tuple(objects)))


def caption(dice: Dice) -> Sample:
    scene = dice.scene()
    return Sample("", "describe the picture", scene, f" {describe(scene)}")


def constrained_caption(dice: Dice) -> Sample:
    """Gives every "and", and one word of every phrase other than its number."""
    scene = dice.scene(low=2)
    text = f" {describe(scene)}"
    spans = words(text)
    given: list[tuple[int, int]] = []
    phrase: list[tuple[int, int]] = []
    for span in [*spans, None]:
        if span is None or text[slice(*span)] == " and":
            given += [dice.pick(phrase[1:]), *([span] if span else [])]
            phrase = []
        else:
            phrase.append(span)
    prompt = "describe the picture in these words"
    return Sample("", prompt, scene, text, given=join_spans(given))


def infill(dice: Dice) -> Sample:
    """Cuts one or two holes of 1..3 words into a caption, a sum, or a relation and its converse."""
    scene = None
    match dice.below(4):
        case 0:
            text = _sum(dice)
        case 1:
            first, second = make_request(dice, "two").phrases
            relation = dice.pick(RELATIONS)
            text = f" {Converse(first, relation, second)}"
        case _:
            scene = dice.scene()
            text = f" {describe(scene)}"
    spans = words(text)
    hidden: set[int] = set()
    for _ in range(dice.between(1, 2)):
        start = dice.below(len(spans))
        hidden |= {*range(start, start + dice.between(1, 3))}
    given = [span for number, span in enumerate(spans) if number not in hidden]
    return Sample("", "fill in the text", scene, text, given=join_spans(given))


def _sum(dice: Dice) -> str:
    first, second = dice.between(0, 5), dice.between(0, MOST_COUNTED - 5)
    if dice.chance(50):
        return f" {first} plus {second} is {first + second}"
    return f" {first + second} minus {second} is {first}"


def reflect(dice: Dice) -> Sample | None:
    drawn = draw(dice)
    request = SceneRequest.parse(drawn.prompt)
    assert drawn.target is not None
    scene = drawn.target if dice.chance(50) else _spoil(dice, request, drawn.target)
    if len(scene) == 0:
        return None
    prompt = f"check: {request}"
    return Sample("", prompt, scene, f" {verdict(request, scene)}", column=drawn.column)


def _spoil(dice: Dice, request: SceneRequest, scene: Scene) -> Scene:
    """Makes one mistake: a thing left out, one too many, one wrong, or a relation broken."""
    cell, thing = dice.pick(list(scene.objects()))
    free = dice.pick([place for place in range(NUM_CELLS) if scene[place] is None])
    match dice.below(4 if request.relation else 3):
        case 0:
            return scene.changed({cell: EMPTY})
        case 1:
            return scene.changed({free: dice.thing().index})
        case 2:
            wrong = dataclasses.replace(
                thing, **dice.pick(({"shape": dice.pick(SHAPES)}, {"colour": dice.pick(COLOURS)}))
            )
            return scene.changed({cell: wrong.index})
        case _:
            return scene.changed({cell: EMPTY, free: thing.index})
