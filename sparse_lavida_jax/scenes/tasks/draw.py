# SPDX-License-Identifier: Apache-2.0
"""Draws an image of what a request names."""

from sparse_lavida_jax.scenes import judges
from sparse_lavida_jax.scenes.dice import Dice
from sparse_lavida_jax.scenes.grammar import RELATIONS, Layout, Phrase, SceneRequest
from sparse_lavida_jax.scenes.task import Sample, Task
from sparse_lavida_jax.scenes.world import GRID, NUM_CELLS, SIZES, Scene

# GenEval's columns in miniature; the last four are the ones with several objects.
COLUMNS = ("single", "colours", "two", "counting", "position", "binding")


def make(dice: Dice) -> Sample:
    return make_with_request(dice)[0]


def make_with_request(dice: Dice) -> tuple[Sample, SceneRequest, Layout]:
    """Makes an example; returns it with what its words and its layout mean."""
    column = dice.pick(COLUMNS[2:] if dice.held_out else COLUMNS)
    request = make_request(dice, column)
    placed = zip(_places(dice, request), request.phrases, strict=True)
    entries = [(cell, phrase.thing(phrase.size or dice.pick(SIZES))) for cell, phrase in placed]
    scene, layout = Scene.of(dict(entries)), Layout(tuple(entries))
    made = Sample(str(request), target=scene, layout=str(layout), column=column)
    return made, request, layout


def make_request(dice: Dice, column: str) -> SceneRequest:
    """Puts a request of one column of GenEval into words."""
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
        cells = dice.several(range(NUM_CELLS), sum(count for count, _ in request.items))
        places: list[int] = []
        for count, _ in request.items:
            places += sorted(cells[len(places) : len(places) + count])
        return places
    low, high = sorted(dice.several(range(GRID), 2))
    if request.relation in ("right of", "below"):
        low, high = high, low
    across = dice.below(GRID), dice.below(GRID)
    if request.relation in ("left of", "right of"):
        return [across[0] * GRID + low, across[1] * GRID + high]
    return [low * GRID + across[0], high * GRID + across[1]]


TASK = Task(make, judges.drawn, "draw", command="generate", label="Drawn")
