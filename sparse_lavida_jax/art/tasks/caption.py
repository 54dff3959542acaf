# SPDX-License-Identifier: Apache-2.0
"""Describes a scene: every thing with its size, style and facing, and the background.

A facing or style that is not clear from the pixels is left out.
"""

from collections import Counter

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import Art, ArtRequest
from sparse_lavida_jax.art.sheet import Sheet
from sparse_lavida_jax.art.world import ArtScene
from sparse_lavida_jax.scenes.task import Sample, Task

PROMPT = "describe the picture"


def describe(scene: ArtScene, sheet: Sheet) -> ArtRequest:
    """Returns the canonical description: sorted, equal things counted."""
    counts = Counter(rules.clear(Art.of(thing), sheet) for thing in scene.things)
    items = sorted(counts.items(), key=lambda item: str(item[0]))
    return ArtRequest(tuple((n, phrase) for phrase, n in items), background=scene.background)


def make(dice: ArtDice) -> Sample:
    scene = dice.scene()
    return Sample(PROMPT, scene, f" {describe(scene, dice.sheet)}")


TASK = Task(make, rules.described, "tell", command="caption")
