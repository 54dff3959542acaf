# SPDX-License-Identifier: Apache-2.0
"""Lays an image out in text."""

from sparse_lavida_jax.scenes import judges, world
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Plan, SceneRequest
from sparse_lavida_jax.scenes.task import Sample, Task, planned
from sparse_lavida_jax.scenes.tasks import draw


def make(dice: Dice) -> Sample:
    return planned(draw.make(dice))


def judge(sample: Sample, output: str) -> str:
    plan = Plan.parse(output)
    if any(thing is None for _, thing in plan.entries):
        return "the plan gives a cell to nothing"
    layout = world.EMPTY_SCENE.changed(plan.appearances)
    return judges.request_fault(SceneRequest.parse(sample.prompt), layout)


TASK = Task(make, judge, "write")
