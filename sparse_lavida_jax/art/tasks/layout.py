# SPDX-License-Identifier: Apache-2.0
"""Lays an image out in words: what is drawn in which box."""

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import Art, ArtLayout, ArtRequest
from sparse_lavida_jax.art.tasks import draw
from sparse_lavida_jax.scenes.task import Sample, Task


def make(dice: ArtDice) -> Sample | None:
    drawn = draw.make(dice)
    return drawn and drawn._replace(answer=drawn.layout, layout=None)


def judge(sample: Sample, output: str) -> str:
    """Judges names, sizes and places; a layout says nothing of styles, facings and backgrounds."""
    request = ArtRequest.parse(sample.prompt, sample.sheet)
    items = tuple((count, Art(phrase.name, phrase.size)) for count, phrase in request.items)
    plain = ArtRequest(items, request.relation)
    laid = ArtLayout.parse(output, sample.sheet)
    return ", ".join(rules.faults(plain, laid.things))


TASK = Task(make, judge, "write")
