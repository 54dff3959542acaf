# SPDX-License-Identifier: Apache-2.0
"""Finds one object of a scene."""

import numpy as np

from sparse_lavida_jax.data import images
from sparse_lavida_jax.scenes import rules
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import STRIPS, Phrase, box_text, object_box, parse_box
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.world import EXTENT, GRID

LEAST_OVERLAP = 0.5  # intersection over union of a box that points at an object


def make(dice: Dice) -> Sample | None:
    scene = dice.scene()
    cell, thing = dice.pick(list(scene.objects()))
    phrase = rules.reference(scene, cell)
    box = box_text(object_box(cell, thing))
    return phrase and Sample(f"where is the {phrase}?", scene, box)


def judge(sample: Sample, output: str) -> str:
    assert sample.image is not None
    box = [edge / STRIPS for edge in parse_box(output)]  # in cells
    phrase = Phrase.parse(sample.prompt.removeprefix("where is the ").removesuffix("?"))
    cell, thing = rules.find(sample.image, phrase)
    row, column = divmod(cell, GRID)
    half = EXTENT[thing.size] / 32
    true = np.array([column, row, column, row]) + 0.5 + half * np.array([-1, -1, 1, 1])
    overlap = images.overlap(box, true.tolist())
    return "" if overlap >= LEAST_OVERLAP else f"the box overlaps {phrase} by {overlap:.2f} only"


TASK = Task(make, judge, "answer", command="ground", label="Pointed")
