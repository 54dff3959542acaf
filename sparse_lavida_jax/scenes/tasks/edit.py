# SPDX-License-Identifier: Apache-2.0
"""Changes a scene as an instruction says."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import MOST_OBJECTS, Dice
from sparse_lavida_jax.scenes.grammar import (
    CORNERS,
    DIRECTIONS,
    EDITS,
    RELATIONS,
    Edit,
    Layout,
    Phrase,
)
from sparse_lavida_jax.scenes.rules import outcomes, reference
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.world import Object


def make(dice: Dice) -> Sample | None:
    kind = dice.pick(tuple(EDITS))
    source = dice.scene(high=MOST_OBJECTS - (kind == "add"))
    cell, old = dice.pick(list(source.objects()))
    anchor = reference(source, cell)
    if anchor is None:
        return None
    new = dice.thing(alone=len(source) == 1)
    edit = _worded(dice, kind, anchor, new)
    allowed = outcomes(edit, source)
    changes_nothing = edit.colour == old.colour or (kind == "replace" and new.pair == old.pair)
    if not allowed or changes_nothing:
        return None
    outcome = dice.pick(allowed) if kind == "add" else allowed[0]
    size = old.size if kind == "replace" else new.size  # where the words say none
    entries = ((cell, phrase and phrase.thing(size)) for cell, phrase in outcome.items())
    layout = Layout(tuple(entries))
    return Sample(str(edit), source, target=source.changed(layout.appearances), layout=str(layout))


def _worded(dice: Dice, kind: str, anchor: Phrase, new: Object) -> Edit:
    """Puts an edit of one kind into words, about the object `anchor` and perhaps a new one."""
    wanted = Phrase(*new.pair, new.size if dice.chance(30) else None)
    corner = dice.pick(tuple(CORNERS))
    match kind:
        case "add":
            relation = dice.pick(RELATIONS)
            anywhere, in_corner = Edit(kind, thing=wanted), Edit(kind, thing=wanted, corner=corner)
            return dice.pick((anywhere, in_corner, Edit(kind, anchor, wanted, relation)))
        case "remove":
            return Edit(kind, anchor)
        case "replace":
            return Edit(kind, anchor, wanted)
        case "recolour":
            return Edit(kind, anchor, colour=new.colour)
        case _:
            direction = dice.pick(tuple(DIRECTIONS))
            step = Edit(kind, anchor, direction=direction)
            return dice.pick((step, Edit(kind, anchor, corner=corner)))


TASK = Task(make, judges.edit_fault, "edit", command="edit", label="Edited")
