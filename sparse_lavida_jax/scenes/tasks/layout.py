# SPDX-License-Identifier: Apache-2.0
"""Lays an image out in text."""

from sparse_lavida_jax.scenes import judges, world
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Layout, SceneRequest
from sparse_lavida_jax.scenes.task import Sample, Task, layout_sample
from sparse_lavida_jax.scenes.tasks import draw


def make(dice: Dice) -> Sample:
    return layout_sample(draw.make(dice))


def judge(sample: Sample, output: str) -> str:
    layout = Layout.parse(output)
    if any(thing is None for _, thing in layout.entries):
        return "the layout gives a cell to nothing"
    layout = world.EMPTY_SCENE.changed(layout.appearances)
    return judges.request_fault(SceneRequest.parse(sample.prompt), layout)


TASK = Task(make, judge, "write")
