# SPDX-License-Identifier: Apache-2.0
"""Changes a scene as an instruction says."""

import dataclasses

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import MOST_OBJECTS, Dice
from sparse_lavida_jax.scenes.grammar import CORNERS, DIRECTIONS, RELATIONS, Edit, Phrase, Plan
from sparse_lavida_jax.scenes.rules import neighbour, reference, related
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.world import NUM_CELLS, Object, Scene

EDITS = ("add", "remove", "replace", "recolour", "move")


def make(dice: Dice) -> Sample | None:
    kind = dice.pick(EDITS)
    source = dice.scene(high=MOST_OBJECTS - (kind == "add"))
    cell, old = dice.pick(list(source.objects()))
    anchor = reference(source, cell)
    made = anchor and _change(dice, kind, source, cell, old, anchor)
    if not made:
        return None
    edit, entries = made
    plan = Plan(entries)
    return Sample(str(edit), source, target=source.changed(plan.appearances), plan=str(plan))


def _change(
    dice: Dice, kind: str, source: Scene, cell: int, old: Object, anchor: Phrase
) -> tuple[Edit, tuple[tuple[int, Object | None], ...]] | None:
    """Words an edit of one kind that concerns the object `old`, and lists what it changes."""
    free = {place for place in range(NUM_CELLS) if source[place] is None}
    new = dice.thing(alone=len(source) == 1)
    wanted = Phrase(*new.pair, new.size if dice.chance(30) else None)
    corner = dice.pick(tuple(CORNERS))
    if kind == "add":
        relation = dice.pick(RELATIONS)
        edit, places = dice.pick(
            (
                (Edit(kind, thing=wanted), free),
                (Edit(kind, thing=wanted, corner=corner), free & {CORNERS[corner]}),
                (
                    Edit(kind, anchor, wanted, relation=relation),
                    {place for place in free if related(relation, place, cell)},
                ),
            )
        )
        return (edit, ((dice.pick(sorted(places)), new),)) if places else None
    if kind == "remove":
        return Edit(kind, anchor), ((cell, None),)
    if kind == "replace":
        thing = dataclasses.replace(new, size=wanted.size or old.size)
        edit = Edit(kind, anchor, wanted)
        return (edit, ((cell, thing),)) if new.pair != old.pair else None
    if kind == "recolour":
        thing = dataclasses.replace(old, colour=new.colour)
        edit = Edit(kind, anchor, colour=new.colour)
        return (edit, ((cell, thing),)) if new.colour != old.colour else None
    direction = dice.pick(tuple(DIRECTIONS))
    edit, place = dice.pick(
        (
            (Edit(kind, anchor, direction=direction), neighbour(cell, direction)),
            (Edit(kind, anchor, corner=corner), CORNERS[corner]),
        )
    )
    return (edit, ((cell, None), (place, old))) if place in free else None


TASK = Task(make, judges.edit_fault, "edit", command="edit", label="Edited")
