# SPDX-License-Identifier: Apache-2.0
"""Examples whose response is an image, and of the layouts that come before one.

Every maker takes dice and returns one example, or `None` when the dice fell badly: `tasks.sample`
then calls it again, and fills in `task` and `held_out`.
"""

import dataclasses
import itertools

import numpy as np
from jaxtyping import Bool

from sparse_lavida_jax.scenes.dice import MOST_OBJECTS, Dice
from sparse_lavida_jax.scenes.grammar import (
    CORNERS,
    DIRECTIONS,
    RELATIONS,
    Box,
    Edit,
    Phrase,
    Plan,
    SceneRequest,
    box_text,
    cell_box,
)
from sparse_lavida_jax.scenes.rules import neighbour, reference, related
from sparse_lavida_jax.scenes.world import EMPTY, GRID, NUM_CELLS, SIZES, Object, Scene

# GenEval's columns in miniature; the last four are the ones with several objects.
COLUMNS = ("single", "colours", "two", "counting", "position", "binding")
EDITS = ("add", "remove", "replace", "recolour", "move")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example: what the model is given and one right response."""

    task: str
    prompt: str
    image: Scene | None = None  # what the model is shown
    answer: str | None = None  # a right response of a text task
    target: Scene | None = None  # a right response of an image task
    plan: str | None = None  # the layout of `target`, of an image task
    known: tuple[bool, ...] | None = None  # cells of `target` that are given, in raster order
    given: tuple[tuple[int, int], ...] = ()  # character spans of `answer` that are given
    column: str | None = None  # which of `COLUMNS`, of a task that draws or plans a request
    held_out: bool = False

    @property
    def known_grid(self) -> Bool[np.ndarray, "y x"] | None:
        return None if self.known is None else np.array(self.known).reshape(GRID, GRID)


def draw(dice: Dice) -> Sample:
    column = dice.pick(COLUMNS[2:] if dice.held_out else COLUMNS)
    request = make_request(dice, column)
    cells = _places(dice, request)
    entries = tuple(
        (cell, phrase.thing(phrase.size or dice.pick(SIZES)))
        for cell, phrase in zip(cells, request.phrases, strict=True)
    )
    return Sample(
        "", str(request), target=Scene.of(dict(entries)), plan=str(Plan(entries)), column=column
    )


def make_request(dice: Dice, column: str) -> SceneRequest:
    """Words a request of one column of GenEval."""
    if column == "single":
        return SceneRequest(((1, Phrase(*dice.pair(alone=True))),))
    if column == "colours":
        return SceneRequest(((1, Phrase(*dice.pair(alone=True), dice.pick(SIZES))),))
    if column == "counting":
        return SceneRequest(((dice.between(2, 4), Phrase(*dice.pair(), _perhaps_size(dice))),))
    first, second = dice.pair(), dice.pair()
    # Binding: nothing is shared, so that any exchange of attributes is an error.
    while first == second or (
        column == "binding" and (first[0] == second[0] or first[1] == second[1])
    ):
        second = dice.pair()
    sizes: list[str | None] = [_perhaps_size(dice), _perhaps_size(dice)]
    if column == "binding":
        sizes = [*dice.several(SIZES, 2)] if dice.chance(25) else [None, None]
    items = ((1, Phrase(*first, sizes[0])), (1, Phrase(*second, sizes[1])))
    return SceneRequest(items, dice.pick(RELATIONS) if column == "position" else None)


def _perhaps_size(dice: Dice) -> str | None:
    return dice.pick(SIZES) if dice.chance(15) else None


def _places(dice: Dice, request: SceneRequest) -> list[int]:
    """Chooses a cell for every object of a request; objects of one phrase in raster order."""
    if request.relation is None:
        cells = iter(dice.several(range(NUM_CELLS), len(request.phrases)))
        groups = (sorted(itertools.islice(cells, count)) for count, _ in request.items)
        return [cell for group in groups for cell in group]
    low, high = sorted(dice.several(range(GRID), 2))
    if request.relation in ("right of", "below"):
        low, high = high, low
    across = dice.below(GRID), dice.below(GRID)
    if request.relation in ("left of", "right of"):
        return [across[0] * GRID + low, across[1] * GRID + high]
    return [low * GRID + across[0], high * GRID + across[1]]


def plan(dice: Dice) -> Sample:
    drawn = draw(dice)
    return Sample("", drawn.prompt, answer=drawn.plan, column=drawn.column)


def edit(dice: Dice) -> Sample | None:
    kind = dice.pick(EDITS)
    source = dice.scene(high=MOST_OBJECTS - (kind == "add"))
    cell, old = dice.pick(list(source.objects()))
    anchor = reference(source, cell)
    made = anchor and _change(dice, kind, source, cell, old, anchor)
    if not made:
        return None
    edit, entries = made
    plan = Plan(entries)
    return Sample("", str(edit), source, target=source.changed(plan.appearances), plan=str(plan))


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


def edit_plan(dice: Dice) -> Sample | None:
    edited = edit(dice)
    return edited and Sample("", edited.prompt, edited.image, answer=edited.plan)


def inpaint(dice: Dice) -> Sample | None:
    hole = _rectangle(dice)
    return _complete(dice, f"fill{box_text(_box(hole))}", {*range(NUM_CELLS)} - {*hole})


def outpaint(dice: Dice) -> Sample | None:
    inner = _rectangle(dice)
    return _complete(dice, f"extend{box_text(_box(inner))}", {*inner})


def _rectangle(dice: Dice) -> list[int]:
    """Returns the raster indices of a rectangle of 2..4 cells a side."""
    (top, height), (left, width) = (
        (dice.below(GRID - side + 1), side) for side in (dice.between(2, 4), dice.between(2, 4))
    )
    return [y * GRID + x for y in range(top, top + height) for x in range(left, left + width)]


def _box(rectangle: list[int]) -> Box:
    return (*cell_box(rectangle[0])[:2], *cell_box(rectangle[-1])[2:])


def _complete(dice: Dice, instruction: str, known: set[int]) -> Sample | None:
    """Makes the task of finishing a requested image of which some cells are known."""
    drawn = draw(dice)
    whole = drawn.target
    assert whole is not None and drawn.plan is not None
    missing = tuple(entry for entry in Plan.parse(drawn.plan).entries if entry[0] not in known)
    if not missing:
        return None
    return Sample(
        "",
        f"{drawn.prompt}, {instruction}",
        whole.changed({cell: EMPTY for cell in range(NUM_CELLS) if cell not in known}),
        target=whole,
        plan=str(Plan(missing)),
        known=tuple(cell in known for cell in range(NUM_CELLS)),
        column=drawn.column,
    )
