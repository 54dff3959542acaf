# SPDX-License-Identifier: Apache-2.0
"""Lists the things of a scene with their boxes, in the words of a layout."""

from collections import Counter

from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import ArtLayout
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.tasks.detect import PROMPT


def make(dice: ArtDice) -> Sample:
    scene = dice.scene()
    return Sample(PROMPT, scene, str(ArtLayout.of(scene)))


def judge(sample: Sample, output: str) -> str:
    """Compares names and boxes, in any order."""
    assert sample.answer is not None
    texts = sample.answer, output
    right, listed = (Counter(ArtLayout.parse(one, sample.sheet).entries) for one in texts)
    faults = [
        f"the {name} at step {box[0]}, {box[1]} is not listed" for name, box in right - listed
    ]
    faults += [f"there is no {name} at step {box[0]}, {box[1]}" for name, box in listed - right]
    return ", ".join(faults)


TASK = Task(make, judge, "tell")
