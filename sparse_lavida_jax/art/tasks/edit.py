# SPDX-License-Identifier: Apache-2.0
"""Changes a scene as an instruction says: adds, removes, replaces, moves, restyles or mirrors."""

import dataclasses

from sparse_lavida_jax.art import rules
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import EDITS, MOVES, NOTHING, Art, ArtEdit, ArtLayout
from sparse_lavida_jax.art.judge import SceneReading, unclear
from sparse_lavida_jax.art.sheet import STYLES
from sparse_lavida_jax.art.world import MIRRORED, MOST_THINGS, ArtScene, Placed, overlap
from sparse_lavida_jax.scenes.grammar import RELATIONS
from sparse_lavida_jax.scenes.task import Sample, Task


def make(dice: ArtDice) -> Sample | None:
    kind = dice.pick(tuple(EDITS))
    source = dice.scene(high=MOST_THINGS - (kind == "add"))
    old = dice.pick(source.things)
    anchor = rules.reference(source, old)
    if anchor is None or (kind == "mirror" and not old.facing):
        return None
    if kind in ("restyle", "mirror") and (old.name, _SEEN[kind]) in unclear(dice.sheet):
        return None
    edit, kept = _worded(dice, kind, anchor, old), [one for one in source.things if one != old]
    if kind == "add":
        assert edit.thing is not None
        look = (edit.thing.name or "", old.style, edit.thing.size or dice.size(len(source)))
        placed = dice.placed([look], source.things)
        new, kept = placed[-1] if placed else None, list(source.things)
        if new is None or (edit.relation and not rules.related(edit.relation, new, old)):
            return None
    else:
        new = changed(edit, old, dice)
        if new == old:
            return None
    inside = new is None or all(0 <= at <= dice.steps - new.side for at in (new.y, new.x))
    if not inside or (new and any(overlap(new, other) for other in kept)):
        return None
    target = ArtScene.of(source.background, [*kept, *([new] if new else [])])
    erased = kind != "add" and (new is None or new.box != old.box)
    entries = [(NOTHING, old.box)] * erased + ([(new.name, new.box)] if new else [])
    return Sample(str(edit), source, target=target, layout=str(ArtLayout(tuple(entries))))


_SEEN = {"restyle": "style", "mirror": "facing"}


def _worded(dice: ArtDice, kind: str, anchor: Art, old: Placed) -> ArtEdit:
    new = Art(dice.pick(dice.sheet.things).name)
    match kind:
        case "add":
            near = ArtEdit(kind, anchor, new, dice.pick(RELATIONS))
            return dice.pick((ArtEdit(kind, thing=new), near))
        case "replace":
            return ArtEdit(kind, anchor, new)
        case "move":
            return ArtEdit(kind, anchor, direction=dice.pick(tuple(MOVES)))
        case "restyle":
            styles = [style for style in STYLES if style != old.style]
            return ArtEdit(kind, anchor, style=dice.pick(styles))
    return ArtEdit(kind, anchor)


def changed(edit: ArtEdit, old: Placed, dice: ArtDice | None = None) -> Placed | None:
    """Returns what becomes of the thing that an instruction names; None: nothing.

    Args:
        dice: chooses the facing of a new thing, which instructions leave open.
    """
    match edit.kind:
        case "replace":
            assert edit.thing is not None
            name = edit.thing.name or ""
            facing = dice.facing(name) if dice else ""
            return dataclasses.replace(old, name=name, facing=facing)
        case "move":
            down, right = MOVES[edit.direction or ""]
            return dataclasses.replace(old, y=old.y + down, x=old.x + right)
        case "restyle":
            return dataclasses.replace(old, style=edit.style or "")
        case "mirror":
            return dataclasses.replace(old, facing=MIRRORED[old.facing])
    return None


def judge(sample: Sample, reading: SceneReading) -> str:
    """Judges an edited image: nothing else may have changed."""
    source, edit = sample.image, ArtEdit.parse(sample.prompt, sample.sheet)
    things = list(reading.scene.things)
    if reading.fault:
        return reading.fault
    if reading.background != source.background:
        return f"the background was {source.background}, it is {reading.background}"
    old = rules.find(source, edit.anchor) if edit.anchor else None
    for one in source.things:
        if one in things and (one != old or edit.kind == "add"):
            things.remove(one)
        elif one != old or edit.kind == "add":
            return f"the {one} at step {one.x}, {one.y} should have stayed as it was"
    wanted = edit.thing if edit.kind == "add" else None
    place = None
    if old is not None and edit.kind not in ("add", "remove"):
        new = changed(edit, old)
        assert new is not None
        wanted, place = Art.of(new), new.box
        if edit.kind == "replace":  # style and facing are open
            wanted = Art(new.name, new.size)
    if len(things) != (wanted is not None):
        return f"{len(things)} things are new, not {int(wanted is not None)}"
    if wanted is None:
        return ""
    (new,) = things
    if not wanted.matches(new) or place not in (None, new.box):
        where = f" at step {place[0]}, {place[1]}" if place else ""
        return f"there should be {wanted.times(1)}{where}, not {Art.of(new).times(1)}"
    if edit.relation and old and not rules.related(edit.relation, new, old):
        return f"the {new.name} is not {edit.relation} the {old.name}"
    return ""


TASK = Task(make, judge, "edit", command="edit", label="Edited")
