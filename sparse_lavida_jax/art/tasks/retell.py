# SPDX-License-Identifier: Apache-2.0
"""Says in words what a layout lays out: names and sizes, and how many of each."""

from collections import Counter

from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import Art, ArtLayout, ArtRequest
from sparse_lavida_jax.scenes.task import Sample, Task

PROMPT = "describe"


def make(dice: ArtDice) -> Sample:
    scene = dice.scene()
    layout = ArtLayout.of(scene)
    counts = Counter(Art(thing.name, thing.size) for thing in layout.things)
    items = sorted(((n, one) for one, n in counts.items()), key=lambda item: str(item[1]))
    return Sample(f"{PROMPT}{layout}", target=scene, answer=f" {ArtRequest(tuple(items))}")


def judge(sample: Sample, output: str) -> str:
    """Compares what is said with the layout, in any order."""
    assert sample.answer is not None
    right, said = (
        Counter(ArtRequest.parse(one.strip(), sample.sheet).phrases)
        for one in (sample.answer, output)
    )
    faults = [f"{phrase.times(1)} is not named" for phrase in right - said]
    faults += [f"there is no {phrase}" for phrase in said - right]
    return ", ".join(faults)


TASK = Task(make, judge, "write")
