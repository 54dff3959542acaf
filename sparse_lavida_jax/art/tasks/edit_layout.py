# SPDX-License-Identifier: Apache-2.0
"""Lays the change of an image out in text."""

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import ArtEdit, ArtLayout
from sparse_lavida_jax.art.tasks import detect, edit
from sparse_lavida_jax.art.world import overlap
from sparse_lavida_jax.scenes.task import Sample, Task, layout_sample


def make(dice: ArtDice) -> Sample | None:
    edited = edit.make(dice)
    return edited and layout_sample(edited)


def judge(sample: Sample, output: str) -> str:
    """Compares what is erased and drawn; a new thing may stand wherever there is room."""
    change = ArtEdit.parse(sample.prompt, sample.sheet)
    if change.kind != "add":
        return detect.judge(sample, output)
    layout = ArtLayout.parse(output, sample.sheet)
    if len(layout.entries) != 1 or len(layout.things) != 1:
        return f"the layout has {len(layout.entries)} entries, it must have one thing"
    (new,) = layout.things
    assert change.thing is not None
    if not change.thing.matches(new):
        return f"the new thing is a {new.name}, not {change.thing.times(1)}"
    if any(overlap(new, other) for other in sample.image.things):
        return f"the {new.name} stands on another thing"
    anchor = rules.find(sample.image, change.anchor) if change.anchor else None
    if anchor and change.relation and not rules.related(change.relation, new, anchor):
        return f"the {new.name} is not {change.relation} the {anchor.name}"
    return ""


TASK = Task(make, judge, "tell")
