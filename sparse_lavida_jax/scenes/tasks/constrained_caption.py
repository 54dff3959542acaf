# SPDX-License-Identifier: Apache-2.0
"""Describes a scene in a text of which words are given."""

from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import join_spans, words
from sparse_lavida_jax.scenes.rules import describe
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import caption
from sparse_lavida_jax.scenes.tasks.infill import judge

PROMPT = f"{caption.PROMPT} in these words"


def make(dice: Dice) -> Sample:
    """Gives every "and", and one word of every phrase other than its number."""
    scene = dice.scene(low=2)
    text = f" {describe(scene)}"
    given: list[tuple[int, int]] = []
    phrase: list[tuple[int, int]] = []
    for span in [*words(text), None]:
        if span is None or text[slice(*span)] == " and":
            given += [dice.pick(phrase[1:]), *([span] if span else [])]
            phrase = []
        else:
            phrase.append(span)
    return Sample(PROMPT, scene, text, given=join_spans(given))


TASK = Task(make, judge, "tell", command="constrained_caption")
