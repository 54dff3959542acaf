# SPDX-License-Identifier: Apache-2.0
"""Describes a scene in a text of which some words are given."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import join_spans, words
from sparse_lavida_jax.scenes.rules import describe
from sparse_lavida_jax.scenes.task import Sample, Task


def make(dice: Dice) -> Sample:
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
    return Sample(prompt, scene, text, given=join_spans(given))


def judge(sample: Sample, output: str) -> str:
    return judges.given_words(sample, output) or judges.described(sample, output)


TASK = Task(make, judge, "tell", command="constrained_caption")
