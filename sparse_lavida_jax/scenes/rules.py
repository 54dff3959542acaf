# SPDX-License-Identifier: Apache-2.0
"""The meaning of words: when a scene satisfies a request, and a change an instruction."""

import functools

from sparse_lavida_jax.scenes.grammar import (
    CORNERS,
    DIRECTIONS,
    Edit,
    GrammarError,
    Phrase,
    SceneRequest,
)
from sparse_lavida_jax.scenes.world import EMPTY, GRID, OBJECTS, Object, Scene

CORRECT = "is correct"


def count(scene: Scene, phrase: Phrase) -> int:
    """Returns how many objects a phrase describes."""
    appearances = _appearances(phrase)
    return sum([index in appearances for index in scene.cells if index])


@functools.cache
def _appearances(phrase: Phrase) -> frozenset[int]:
    return frozenset(thing.index for thing in OBJECTS if phrase.matches(thing))


def describe(scene: Scene) -> SceneRequest:
    """Returns the canonical description: all attributes named, sorted, equal objects counted."""
    present = [index for index in scene.cells if index != EMPTY]
    return SceneRequest(
        tuple((present.count(index), _whole(Object.of(index))) for index in sorted({*present}))
    )


def reference(scene: Scene, cell: int) -> Phrase | None:
    """Describes one object unambiguously, with its size only if needed."""
    thing = scene[cell]
    for phrase in (Phrase(*thing.pair), _whole(thing)) if thing else ():
        if count(scene, phrase) == 1:
            return phrase
    return None


def related(relation: str, first: int, second: int) -> bool:
    """Whether one raster index is in a relation to another: strictly, on one axis."""
    (row, column), (other_row, other_column) = divmod(first, GRID), divmod(second, GRID)
    return {
        "left of": column < other_column,
        "right of": column > other_column,
        "above": row < other_row,
        "below": row > other_row,
    }[relation]


def neighbour(cell: int, direction: str) -> int | None:
    """Returns the next cell in a direction, `None` outside the image."""
    row, column = cell // GRID + DIRECTIONS[direction][0], cell % GRID + DIRECTIONS[direction][1]
    return row * GRID + column if 0 <= row < GRID and 0 <= column < GRID else None


def verdict(request: SceneRequest, scene: Scene) -> str:
    """Returns "is correct", or everything that is wrong with a scene for a request."""
    missing, extra, found = _compare(request, scene)
    faults = [
        f"a {_as(wrong, phrase)} should be a {phrase}"
        for phrase, wrong in zip(missing, extra, strict=False)
    ]
    faults += [f"a {phrase} is missing" for phrase in missing[len(extra) :]]
    faults += [f"a {Phrase(*thing.pair)} is too many" for thing in extra[len(missing) :]]
    if request.relation and not faults and not related(request.relation, *found):
        first, second = request.phrases
        faults = [f"the {first} is not {request.relation} the {second}"]
    return ", ".join(faults) or CORRECT


def outcomes(edit: Edit, source: Scene) -> list[dict[int, Phrase | None]]:
    """Lists what the cells affected by an instruction may contain after it.

    Raises:
        GrammarError: the scene has no object as named in the instruction, or several.
    """
    cell, old = find(source, edit.anchor) if edit.anchor else (0, None)
    free = [place for place, appearance in enumerate(source.cells) if appearance == EMPTY]
    place = CORNERS[edit.corner] if edit.corner else None
    if edit.kind == "add":
        return [
            {other: edit.thing}
            for other in free
            if place in (None, other)
            and (edit.relation is None or related(edit.relation, other, cell))
        ]
    assert old is not None  # all other wordings name an object
    match edit.kind:
        case "remove":
            return [{cell: None}]
        case "replace":
            return [{cell: edit.thing}]
        case "recolour":
            return [{cell: Phrase(old.shape, edit.colour, old.size)}]
    place = neighbour(cell, edit.direction) if edit.direction else place
    return [{cell: None, place: _whole(old)}] if place in free else []


def find(scene: Scene, phrase: Phrase) -> tuple[int, Object]:
    """Returns the one object that a phrase describes, and its cell."""
    found = [(cell, thing) for cell, thing in scene.objects() if phrase.matches(thing)]
    if len(found) != 1:
        raise GrammarError(f"the scene has {len(found)} of '{phrase}', it must have one")
    return found[0]


def _compare(request: SceneRequest, scene: Scene) -> tuple[list[Phrase], list[Object], list[int]]:
    """Returns missing phrases, surplus objects, and the matched cells in order of mention.

    The most specific phrases are matched first: "a small red circle" before "a red circle".
    """
    left = dict(scene.objects())
    found: dict[int, int] = {}
    phrases = list(enumerate(request.phrases))
    for number, phrase in sorted(phrases, key=lambda entry: -str(entry[1]).count(" ")):
        cell = next((cell for cell, thing in left.items() if phrase.matches(thing)), None)
        if cell is not None:
            found[number] = cell
            del left[cell]
    missing = [phrase for number, phrase in phrases if number not in found]
    return missing, list(left.values()), [found[number] for number in sorted(found)]


def _whole(thing: Object) -> Phrase:
    return Phrase(thing.shape, thing.colour, thing.size)


def _as(thing: Object, phrase: Phrase) -> Phrase:
    """Describes an object, with its size if the phrase names one."""
    return Phrase(thing.shape, thing.colour, thing.size if phrase.size else None)
