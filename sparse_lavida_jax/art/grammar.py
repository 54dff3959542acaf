# SPDX-License-Identifier: Apache-2.0
"""The language of the art world: phrases, requests, layouts; names in English, German, Japanese.

Every class here is a meaning; `str` returns its words and `parse` reads them back. What a request
leaves unsaid, such as a style, is open. A layout says what is drawn in which box, and so how large;
never a style or a facing.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

from sparse_lavida_jax.art.sheet import LANGUAGES, SIZES, STYLES, Sheet, load
from sparse_lavida_jax.art.world import BACKGROUNDS, STEP, ArtScene, Placed
from sparse_lavida_jax.scenes.grammar import (
    RELATIONS,
    Box,
    GrammarError,
    box_text,
    parse_box,
)

NUMBERS = ("a", "two", "three", "four", "five")
SIDES = ("left", "right")
NOTHING = "nothing"
FARTHEST = 512  # place in an image of any size, in steps
# The plurals that do not follow `plural`.
_PLURALS = {"mouse": "mice", "shrimp": "shrimp", "tropical fish": "tropical fish"}
# By language: what joins two names, what names the style of all things, and the two questions.
JOINED = {"en": " and ", "de": " und ", "ja": "と"}
IN_STYLE = {"en": " in {0} style", "de": " im Stil {0}", "ja": "、{0}スタイル"}
HOW_MANY = {
    "en": "how many {0} are there?",
    "de": "wie oft ist {0} zu sehen?",
    "ja": "{0}はいくつありますか？",  # noqa: RUF001  a Japanese question mark
}
IS_THERE = {
    "en": "is there {0}?",
    "de": "ist {0} zu sehen?",
    "ja": "{0}はありますか？",  # noqa: RUF001
}
YES_NO = {"en": ("yes", "no"), "de": ("ja", "nein"), "ja": ("はい", "いいえ")}


class Art(NamedTuple):
    """A description of a thing; `None` is left unsaid."""

    name: str | None = None
    size: str | None = None
    style: str | None = None
    facing: str | None = None

    @staticmethod
    def of(thing: Placed) -> "Art":
        """Returns the description that leaves nothing unsaid."""
        return Art(thing.name, thing.size, thing.style, thing.facing or None)

    def matches(self, thing: Placed) -> bool:
        said = (self.name, self.size, self.style, self.facing)
        shown = (thing.name, thing.size, thing.style, thing.facing)
        return all(one in (None, other) for one, other in zip(said, shown, strict=True))

    def __str__(self) -> str:
        return self._worded(self.name or "thing")

    @property
    def plural(self) -> str:
        return self._worded(plural(self.name or "thing"))

    def times(self, count: int) -> str:
        """Returns "a small bear", "an owl", "two noto bears facing left", ..."""
        return (
            f"{article(str(self))} {self}" if count == 1 else f"{NUMBERS[count - 1]} {self.plural}"
        )

    def _worded(self, noun: str) -> str:
        words = " ".join(filter(None, (self.size, self.style, noun)))
        return f"{words} facing {self.facing}" if self.facing else words

    @staticmethod
    def parse(text: str, sheet: Sheet | None = None) -> "Art":
        """Reads a singular description."""
        if (match := _patterns(sheet or load())[0].fullmatch(text)) is None:
            raise GrammarError(f"'{text}' does not describe a thing, like 'small noto bear'")
        size, style, noun, facing = match.groups()
        return Art(None if noun == "thing" else noun, size, style, facing)


def plural(name: str) -> str:
    if name in _PLURALS:
        return _PLURALS[name]
    if re.search(r"(s|x|ch|sh|to)$", name):
        return f"{name}es"
    return f"{name[:-1]}ies" if re.search(r"[^aeiou]y$", name) else f"{name}s"


def article(name: str) -> str:
    return "an" if name[0] in "aeio" or name.startswith("umb") else "a"


@functools.cache
def _patterns(sheet: Sheet) -> tuple[re.Pattern[str], dict[str, str]]:
    """Returns the pattern of a singular description, and the singular of every plural."""
    names = sorted((thing.name for thing in sheet.things), key=len, reverse=True)
    sizes, styles, sides = ("|".join(words) for words in (SIZES, STYLES, SIDES))
    nouns = "|".join(map(re.escape, (*names, "thing")))
    pattern = rf"(?:({sizes}) )?(?:({styles}) )?({nouns})(?: facing ({sides}))?"
    return re.compile(pattern), {plural(name): name for name in (*names, "thing")}


@dataclasses.dataclass(frozen=True)
class ArtRequest:
    """The exact contents of an image.

    Attributes:
        items: how many things of each description.
        relation: of the first thing to the second.
        style: of all things.
        background: a key of `world.BACKGROUNDS`.
    """

    items: tuple[tuple[int, Art], ...]
    relation: str | None = None
    style: str | None = None
    background: str | None = None

    def __str__(self) -> str:
        join = f" {self.relation} " if self.relation else JOINED["en"]
        words = join.join(phrase.times(count) for count, phrase in self.items)
        words += IN_STYLE["en"].format(self.style) if self.style else ""
        return f"{words} on a {self.background} background" if self.background else words

    def said(self, language: str, sheet: Sheet) -> str:
        """Returns the words in a language of `sheet.LANGUAGES`; English ones say all there is.

        Raises:
            GrammarError: a request that only English has words for.
        """
        if language == "en":
            return str(self)
        plain = all(one == (1, Art(one[1].name)) for one in self.items)
        if not plain or self.relation or self.background:
            raise GrammarError(f"'{self}' can only be said in English")
        names = [sheet.spoken(phrase.name or "", language) for _, phrase in self.items]
        style = IN_STYLE[language].format(self.style) if self.style else ""
        return JOINED[language].join(names) + style

    @property
    def phrases(self) -> tuple[Art, ...]:
        """One description of each thing, in the order of mention, with the style of all."""
        return tuple(
            phrase._replace(style=phrase.style or self.style)
            for count, phrase in self.items
            for _ in range(count)
        )

    @staticmethod
    def parse(text: str, sheet: Sheet | None = None) -> "ArtRequest":
        """Reads a request in any of the languages; the rectangle to fill or extend is left out.

        Raises:
            GrammarError: it is none.
        """
        text, sheet = _REGION.sub("", text), sheet or load()
        for language in LANGUAGES[1:]:
            if request := _parse_plain(text, language, sheet):
                return request
        match = re.fullmatch(_ENDED, text)
        assert match is not None  # both ends may be missing
        words, style, background = match.groups()
        related = re.fullmatch(rf"(.+) ({'|'.join(RELATIONS)}) (.+)", words)
        parts = (related[1], related[3]) if related else words.split(JOINED["en"])
        items = tuple(_parse_item(part, sheet) for part in parts)
        relation = related[2] if related else None
        if relation and any(count > 1 for count, _ in items):
            raise GrammarError(f"'{text}' relates more than two things")
        return ArtRequest(items, relation, style, background)


_REGION = re.compile(r", (fill|extend)(<LOC_\d+>){4}$")
_ENDED = rf"(.*?)(?: in ({'|'.join(STYLES)}) style)?(?: on a ({'|'.join(BACKGROUNDS)}) background)?"


def _parse_item(text: str, sheet: Sheet) -> tuple[int, Art]:
    number, _, rest = text.partition(" ")
    if number in ("a", "an"):
        return 1, Art.parse(rest, sheet)
    if number not in NUMBERS:
        raise GrammarError(f"'{text}' does not start with one of {', '.join(NUMBERS)}")
    pattern, singulars = _patterns(sheet)
    for many, one in singulars.items():
        singular = re.sub(rf"\b{re.escape(many)}(?= facing|$)", one, rest)
        if pattern.fullmatch(singular) and Art.parse(singular, sheet).plural == rest:
            return NUMBERS.index(number) + 1, Art.parse(singular, sheet)
    raise GrammarError(f"'{text}' needs the plural of a thing")


def _parse_plain(text: str, language: str, sheet: Sheet) -> ArtRequest | None:
    """Reads names, and perhaps a style, in a language other than English."""
    named = {sheet.spoken(thing.name, language): thing.name for thing in sheet.things}
    for style in (None, *STYLES):
        ending = IN_STYLE[language].format(style) if style else ""
        parts = text.removesuffix(ending).split(JOINED[language])
        if text.endswith(ending) and all(part in named for part in parts):
            return ArtRequest(tuple((1, Art(named[part])) for part in parts), style=style)
    return None


class ArtEdit(NamedTuple):
    """An instruction that changes a scene, in one of the wordings of its kind (`EDITS`)."""

    kind: str
    anchor: Art | None = None  # a thing of the scene
    thing: Art | None = None  # a new thing
    relation: str | None = None  # of the new thing to the anchor
    direction: str | None = None  # a key of `MOVES`
    style: str | None = None  # new style of the anchor

    def __str__(self) -> str:
        said = {name: value for name, value in self._asdict().items() if value and name != "kind"}
        if self.thing:
            said["thing"] = self.thing.times(1)
        wordings = (words for words in EDITS[self.kind] if {*_BLANK.findall(words)} == {*said})
        return next(wordings).format(**said)

    @staticmethod
    def parse(text: str, sheet: Sheet | None = None) -> "ArtEdit":
        for kind, wordings in EDITS.items():
            for words in wordings:
                pattern = _BLANK.sub(lambda blank: f"(?P<{blank[1]}>{_SAID[blank[1]]})", words)
                if match := re.fullmatch(pattern, text):
                    found: dict[str, Any] = match.groupdict()
                    if "anchor" in found:
                        found["anchor"] = Art.parse(found["anchor"], sheet)
                    if "thing" in found:
                        found["thing"] = Art.parse(found["thing"].partition(" ")[2], sheet)
                    return ArtEdit(kind, **found)
        raise GrammarError(f"'{text}' is not an instruction: {', '.join(EDITS)}")


MOVES = {"left": (0, -4), "right": (0, 4), "up": (-4, 0), "down": (4, 0)}  # rows, columns, in steps
EDITS = {
    "add": ("add {thing} {relation} the {anchor}", "add {thing}"),
    "remove": ("remove the {anchor}",),
    "replace": ("replace the {anchor} with {thing}",),
    "move": ("move the {anchor} {direction}",),
    "restyle": ("draw the {anchor} in {style} style",),
    "mirror": ("mirror the {anchor}",),
}
_BLANK = re.compile(r"{(\w+)}")
_SAID = {
    "anchor": ".+?", "thing": "an? .+?", "relation": "|".join(RELATIONS),
    "direction": "|".join(MOVES), "style": "|".join(STYLES),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ArtLayout:
    """A layout in words: names and the boxes of what is drawn; `NOTHING` is erased."""

    entries: tuple[tuple[str, Box], ...]

    @staticmethod
    def of(scene: ArtScene, request: ArtRequest | None = None) -> "ArtLayout":
        """Lays out a scene, with its things in the order in which a request for it names them.

        A model then copies names one after another. In any other order it has to know which ones
        it has not written yet.
        """
        names = [phrase.name for phrase in request.phrases] if request else []
        things = sorted(scene.things, key=lambda thing: names.index(thing.name) if names else 0)
        return ArtLayout(tuple((thing.name, thing.box) for thing in things))

    def __str__(self) -> str:
        return ",".join(f" {name}{box_text(box)}" for name, box in self.entries)

    @property
    def things(self) -> tuple[Placed, ...]:
        """The things with their places and sizes, and no style."""
        sides = {side // STEP: size for size, side in SIZES.items()}
        return tuple(
            Placed(box[1], box[0], name, "", sides[box[2] - box[0]])
            for name, box in self.entries
            if name != NOTHING
        )

    @staticmethod
    def parse(text: str, sheet: Sheet | None = None) -> "ArtLayout":
        """Reads a layout of an image of any size.

        Raises:
            GrammarError: it is none, or a box that no thing fills.
        """
        entries = []
        for entry in text.split(","):
            name, bracket, rest = entry.strip().partition("<")
            box = parse_box(bracket + rest, FARTHEST)
            if name != NOTHING and name not in (sheet or load()).numbers:
                raise GrammarError(f"the layout has a '{name}', which is not a thing")
            width, height = box[2] - box[0], box[3] - box[1]
            fits = width == height and STEP * width in SIZES.values()
            if not fits:
                raise GrammarError(f"the layout's box {bracket}{rest} is not the box of a thing")
            entries.append((name, box))
        return ArtLayout(tuple(entries))
