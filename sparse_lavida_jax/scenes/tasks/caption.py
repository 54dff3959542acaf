# SPDX-License-Identifier: Apache-2.0
"""Describes a scene."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.rules import describe
from sparse_lavida_jax.scenes.task import Sample, Task


def make(dice: Dice) -> Sample:
    scene = dice.scene()
    return Sample("describe the picture", scene, f" {describe(scene)}")


TASK = Task(make, judges.described, "tell", command="caption")
