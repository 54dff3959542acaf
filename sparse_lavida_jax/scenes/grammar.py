# SPDX-License-Identifier: Apache-2.0
"""The language of the small world: phrases, requests, edits, layouts, questions.

Every class here is a meaning; `str` returns its words and `parse` reads them back. The language is
small and regular: a noun phrase is always [size] [colour] shape, a place is always a box of four
LOC tokens.
"""

import dataclasses
import re
from typing import Any, NamedTuple

from sparse_lavida_jax.scenes.world import COLOURS, EXTENT, GRID, NAMED, SHAPES, SIZES, Object

NUMBERS = ("a", "two", "three", "four", "five", "six")
RELATIONS = ("left of", "right of", "above", "below")
CONVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
CORNERS = {
    "top left": 0,
    "top right": GRID - 1,
    "bottom left": GRID * (GRID - 1),
    "bottom right": GRID**2 - 1,
}
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # rows, columns
LOCATIONS = 25  # LOC tokens: the edges of 24 strips in each direction
STRIPS = (LOCATIONS - 1) // GRID  # LOC steps per cell

Box = tuple[int, int, int, int]  # x1, y1, x2, y2 in LOC steps


class GrammarError(ValueError):
    """Words without a meaning in the small world."""


class Phrase(NamedTuple):
    """A description of an object; `None` is left unsaid. Without a shape it is a "thing"."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None

    def matches(self, thing: Object) -> bool:
        return (
            self.shape in (None, thing.shape)
            and self.colour in (None, thing.colour)
            and self.size in (None, thing.size)
        )

    def __str__(self) -> str:
        noun = self.shape or "thing"
        noun = f"{self.colour} {noun}" if self.colour else noun
        return f"{self.size} {noun}" if self.size else noun

    @property
    def plural(self) -> str:
        return f"{self}es" if self.shape == "cross" else f"{self}s"

    def times(self, count: int) -> str:
        """Returns "a red circle", "two red circles", ..."""
        return f"a {self}" if count == 1 else f"{NUMBERS[count - 1]} {self.plural}"

    def thing(self, size: str | None = None) -> Object:
        """Returns the object with these attributes, of `size` if the phrase names none."""
        size = self.size or size
        if self.shape is None or self.colour is None or size is None:
            raise GrammarError(f"'{self}' lacks a size, colour or shape")
        return NAMED[self.shape, self.colour, size]

    @staticmethod
    def parse(text: str) -> "Phrase":
        """Reads a singular phrase."""
        match = re.fullmatch(_PHRASE, text)
        if match is None:
            raise GrammarError(f"'{text}' does not describe an object, like 'small red circle'")
        size, colour, noun = match.groups()
        return Phrase(None if noun == "thing" else noun, colour, size)


_PHRASE = rf"(?:({'|'.join(SIZES)}) )?(?:({'|'.join(COLOURS)}) )?({'|'.join(SHAPES)}|thing)"


@dataclasses.dataclass(frozen=True)
class SceneRequest:
    """The exact contents of an image: a count of each phrase, perhaps with a relation."""

    items: tuple[tuple[int, Phrase], ...]
    relation: str | None = None  # of the first item to the second

    def __str__(self) -> str:
        join = f" {self.relation or 'and'} "
        return join.join(phrase.times(count) for count, phrase in self.items)

    @property
    def phrases(self) -> tuple[Phrase, ...]:
        """One phrase per object, in the order of mention."""
        return tuple(phrase for count, phrase in self.items for _ in range(count))

    @staticmethod
    def parse(text: str) -> "SceneRequest":
        related = re.fullmatch(rf"(.+) ({'|'.join(RELATIONS)}) (.+)", text)
        if related:
            first, relation, second = related.groups()
            request = SceneRequest((_parse_item(first), _parse_item(second)), relation)
            if any(count > 1 for count, _ in request.items):
                raise GrammarError(f"'{text}' relates more than two objects")
            return request
        return SceneRequest(tuple(_parse_item(item) for item in text.split(" and ")))


def _parse_item(text: str) -> tuple[int, Phrase]:
    number, _, rest = text.partition(" ")
    if number not in NUMBERS:
        raise GrammarError(f"'{text}' does not start with one of {', '.join(NUMBERS)}")
    count = NUMBERS.index(number) + 1
    ending = "" if count == 1 else "es" if rest.endswith("crosses") else "s"
    if not rest.endswith(ending):
        raise GrammarError(f"'{text}' needs a plural")
    phrase = Phrase.parse(rest.removesuffix(ending))
    return count, phrase


class Edit(NamedTuple):
    """An instruction that changes a scene, in one of the wordings of its kind (`EDITS`)."""

    kind: str
    anchor: Phrase | None = None  # an object of the scene
    thing: Phrase | None = None  # a new object
    relation: str | None = None  # of the new object to the anchor
    corner: str | None = None  # the destination
    direction: str | None = None  # by one cell
    colour: str | None = None  # new colour of the anchor

    def __str__(self) -> str:
        said = {name: value for name, value in self._asdict().items() if value and name != "kind"}
        wordings = (words for words in EDITS[self.kind] if {*_BLANK.findall(words)} == {*said})
        return next(wordings).format(**said)

    @staticmethod
    def parse(text: str) -> "Edit":
        for kind, pattern in _PATTERNS:
            if match := pattern.fullmatch(text):
                found: dict[str, Any] = match.groupdict()
                for name in found.keys() & {"anchor", "thing"}:
                    found[name] = Phrase.parse(found[name])
                return Edit(kind, **found)
        raise GrammarError(f"'{text}' is no instruction: add, remove, replace, make or move")


EDITS = {
    "add": (
        "add a {thing} {relation} the {anchor}",
        "add a {thing} in the {corner} corner",
        "add a {thing}",
    ),
    "remove": ("remove the {anchor}",),
    "replace": ("replace the {anchor} with a {thing}",),
    "recolour": ("make the {anchor} {colour}",),
    "move": ("move the {anchor} {direction}", "move the {anchor} to the {corner} corner"),
}
_BLANK = re.compile(r"{(\w+)}")
_SAID = {"relation": RELATIONS, "corner": CORNERS, "direction": DIRECTIONS, "colour": COLOURS}


def _pattern(wording: str) -> re.Pattern[str]:
    """Returns a pattern that matches a wording; its blanks are groups."""
    return re.compile(
        _BLANK.sub(
            lambda blank: f"(?P<{blank[1]}>{'|'.join(_SAID.get(blank[1], ('[a-z ]+?',)))})", wording
        )
    )


_PATTERNS = [(kind, _pattern(words)) for kind, wordings in EDITS.items() for words in wordings]


def cell_box(cell: int) -> Box:
    """Returns the box of a cell, given as a raster index."""
    row, column = divmod(cell, GRID)
    return column * STRIPS, row * STRIPS, (column + 1) * STRIPS, (row + 1) * STRIPS


def cells_box(first: int, last: int) -> Box:
    """Returns the box of a rectangle of cells, from its top left to its bottom right cell."""
    return (*cell_box(first)[:2], *cell_box(last)[2:])


def box_text(box: Box) -> str:
    return "".join(f"<LOC_{edge}>" for edge in box)


_CELL_TEXTS = tuple(box_text(cell_box(cell)) for cell in range(GRID**2))


def parse_box(text: str, most: int = LOCATIONS - 1) -> Box:
    """Reads four LOC tokens that form a box, at places from 0 to `most`."""
    match = re.fullmatch(r"<LOC_(\d{1,9})>" * 4, text)
    if match is None:
        raise GrammarError(f"'{text}' is not a box of four LOC tokens")
    x1, y1, x2, y2 = map(int, match.groups())
    if not (x1 < x2 <= most and y1 < y2 <= most):
        raise GrammarError(f"'{text}' is a box without an area inside the image")
    return x1, y1, x2, y2


def object_box(cell: int, thing: Object) -> Box:
    """Returns the box of an object in a cell, rounded to LOC steps."""
    x1, y1, x2, y2 = cell_box(cell)
    margin = round(STRIPS * (1 - EXTENT[thing.size] / 16) / 2)
    return x1 + margin, y1 + margin, x2 - margin, y2 - margin


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout in words: what each listed cell will contain; `None` is nothing."""

    entries: tuple[tuple[int, Object | None], ...]

    def __str__(self) -> str:
        return ",".join(
            [f" {thing or 'nothing'}{_CELL_TEXTS[cell]}" for cell, thing in self.entries]
        )

    @property
    def appearances(self) -> dict[int, int]:
        """Returns what the listed cells will contain, for `Scene.changed`."""
        return {cell: thing.index if thing else 0 for cell, thing in self.entries}

    @staticmethod
    def parse(text: str) -> "Layout":
        entries = tuple(_parse_entry(entry.strip()) for entry in text.split(","))
        if len({cell for cell, _ in entries}) < len(entries):
            raise GrammarError("the layout gives a cell twice")
        return Layout(entries)


def _parse_entry(text: str) -> tuple[int, Object | None]:
    name, bracket, rest = text.partition("<")
    box = parse_box(bracket + rest)
    cell = box[1] // STRIPS * GRID + box[0] // STRIPS
    if box != cell_box(cell):
        raise GrammarError(f"the layout's box {bracket}{rest} is not one cell")
    if name == "nothing":
        return cell, None
    return cell, Phrase.parse(name).thing()


Span = tuple[int, int]  # of characters


def words(text: str) -> list[Span]:
    """Returns the spans of words, each with the space before it; punctuation counts as words."""
    return [match.span() for match in re.finditer(r" ?\w+|[^\w\s]", text)]


def spans_of(pattern: str, text: str) -> tuple[Span, ...]:
    """Returns the spans where a pattern matches, joined."""
    return join_spans([match.span() for match in re.finditer(pattern, text)])


def join_spans(spans: list[Span]) -> tuple[Span, ...]:
    """Returns sorted spans, with adjacent ones merged."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return tuple(joined)
