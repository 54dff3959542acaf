# SPDX-License-Identifier: Apache-2.0
"""Fills the gaps of a description."""

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.tasks.caption import describe
from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.infill import PROMPT, with_gaps


def make(dice: ArtDice) -> Sample:
    """Cuts one to three gaps of one to three words into a description."""
    scene = dice.scene()
    text = f" {describe(scene, dice.sheet)}"
    return Sample(PROMPT, scene, text, given=with_gaps(dice, text, 3))


def judge(sample: Sample, output: str) -> str:
    return judges.given_words(sample, output) or rules.described(sample, output)


TASK = Task(make, judge, "tell", command="infill")
