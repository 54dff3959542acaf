# SPDX-License-Identifier: Apache-2.0
"""Lays the change of an image out in text."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Layout
from sparse_lavida_jax.scenes.task import Sample, Task, layout_sample
from sparse_lavida_jax.scenes.tasks import edit


def make(dice: Dice) -> Sample | None:
    edited = edit.make(dice)
    return edited and layout_sample(edited)


def judge(sample: Sample, output: str) -> str:
    assert sample.image is not None
    return judges.edit_fault(sample, sample.image.changed(Layout.parse(output).appearances))


TASK = Task(make, judge, "tell")
