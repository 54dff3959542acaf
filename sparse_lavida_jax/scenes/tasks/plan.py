# SPDX-License-Identifier: Apache-2.0
"""Lays an image of what a request names out in text."""

from sparse_lavida_jax.scenes import judges, world
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import Plan, SceneRequest
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks import draw


def make(dice: Dice) -> Sample:
    drawn = draw.make(dice)
    return Sample(drawn.prompt, answer=drawn.plan, column=drawn.column)


def judge(sample: Sample, output: str) -> str:
    plan = Plan.parse(output)
    if any(thing is None for _, thing in plan.entries):
        return "the plan gives a cell to nothing"
    layout = world.EMPTY_SCENE.changed(plan.appearances)
    return judges.request_fault(SceneRequest.parse(sample.prompt), layout)


TASK = Task(make, judge, "write")
