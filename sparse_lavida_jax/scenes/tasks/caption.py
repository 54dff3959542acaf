# SPDX-License-Identifier: Apache-2.0
"""Describes a scene."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.rules import describe
from sparse_lavida_jax.scenes.task import Sample, Task

PROMPT = "describe the picture"  # the words that the bundled models were trained with


def make(dice: Dice) -> Sample:
    scene = dice.scene()
    return Sample(PROMPT, scene, f" {describe(scene)}")


TASK = Task(make, judges.described, "tell", command="caption")
