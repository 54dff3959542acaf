# SPDX-License-Identifier: Apache-2.0
"""Finds one thing of a scene."""

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import FARTHEST, Art
from sparse_lavida_jax.data import images
from sparse_lavida_jax.scenes.grammar import box_text, parse_box
from sparse_lavida_jax.scenes.task import Sample, Task

LEAST_OVERLAP = 0.5  # intersection over union of a box that points at a thing


def make(dice: ArtDice) -> Sample | None:
    scene = dice.scene()
    thing = dice.pick(scene.things)
    phrase = rules.reference(scene, thing)
    return phrase and Sample(f"where is the {phrase}?", scene, box_text(thing.box))


def judge(sample: Sample, output: str) -> str:
    asked = sample.prompt.removeprefix("where is the ").removesuffix("?")
    phrase = Art.parse(asked, sample.sheet)
    thing = rules.find(sample.image, phrase)
    overlap = images.overlap(parse_box(output, FARTHEST), thing.box)
    return "" if overlap >= LEAST_OVERLAP else f"the box overlaps {phrase} by {overlap:.2f} only"


TASK = Task(make, judge, "answer", command="ground", label="Pointed")
