# SPDX-License-Identifier: Apache-2.0
"""Fills the holes of a caption, a sum, or a relation and its converse."""

import re

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import CONVERSE, RELATIONS, Phrase, Span, join_spans, words
from sparse_lavida_jax.scenes.rules import describe
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.arithmetic import MOST_COUNTED
from sparse_lavida_jax.scenes.tasks.draw import make_request

PROMPT = "fill in the text"


def make(dice: Dice) -> Sample:
    """Cuts one or two holes of 1..3 words into a caption, a sum, or a relation and its converse."""
    scene = None
    match dice.below(4):
        case 0:
            text = _sum(dice)
        case 1:
            first, second = make_request(dice, "two").phrases
            there = dice.pick(RELATIONS)
            text = f" a {first} is {there} a {second} so a {second} is {CONVERSE[there]} a {first}"
        case _:
            scene = dice.scene()
            text = f" {describe(scene)}"
    return Sample(PROMPT, scene, text, given=with_gaps(dice, text, 2))


def with_gaps(dice: Dice, text: str, most: int) -> tuple[Span, ...]:
    """Cuts one to `most` gaps of one to three words into a text; returns the spans that stay."""
    spans = words(text)
    hidden: set[int] = set()
    for _ in range(dice.between(1, most)):
        start = dice.below(len(spans))
        hidden |= {*range(start, start + dice.between(1, 3))}
    return join_spans([span for number, span in enumerate(spans) if number not in hidden])


def _sum(dice: Dice) -> str:
    first, second = dice.between(0, 5), dice.between(0, MOST_COUNTED - 5)
    if dice.chance(50):
        return f" {first} plus {second} is {first + second}"
    return f" {first + second} minus {second} is {first}"


def judge(sample: Sample, output: str) -> str:
    """Judges a caption, or a sentence without an image, whose given words must stay."""
    judged = _sentence_fault if sample.image is None else judges.described
    return judges.given_words(sample, output) or judged(sample, output)


def _sentence_fault(_: Sample, text: str) -> str:
    """Judges a sum, "2 plus 1 is 3", or a relation and its converse."""
    if found := re.fullmatch(r"(\d+) (plus|minus) (\d+) is (\d+)", text):
        first, sign, second, total = found.groups()
        right = int(first) + int(second) * (1 if sign == "plus" else -1)
        return "" if int(total) == right else f"{first} {sign} {second} is {right}, not {total}"
    relation = "|".join(RELATIONS)
    found = re.fullmatch(rf"a (.+) is ({relation}) a (.+) so a (.+) is ({relation}) a (.+)", text)
    if found is None:
        return f"'{text}' is neither a sum nor a relation and its converse"
    first, there, second, second_again, back, first_again = found.groups()
    for phrase in (first, second):
        Phrase.parse(phrase)
    if (first, second, CONVERSE[there]) != (first_again, second_again, back):
        return f"the converse is 'a {second} is {CONVERSE[there]} a {first}'"
    return ""


TASK = Task(make, judge, "tell", command="infill")
