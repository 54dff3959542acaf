# SPDX-License-Identifier: Apache-2.0
"""Reads what a user writes as words that models of the art world were taught.

Other words for the same become taught ones, in English; taught ones in other languages stay. Words
that mean anything else give the nearest taught sentence, and a list of what was not understood.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import (
    HOW_MANY,
    IS_THERE,
    MOVES,
    NUMBERS,
    Art,
    ArtEdit,
    ArtRequest,
    article,
    plural,
)
from sparse_lavida_jax.art.judge import unclear
from sparse_lavida_jax.art.sheet import LANGUAGES, SIZES, STYLES, Sheet
from sparse_lavida_jax.art.tasks import ask, caption, detect, reason
from sparse_lavida_jax.art.world import BACKGROUNDS, MOST_THINGS
from sparse_lavida_jax.prompting.vocabulary import Reading
from sparse_lavida_jax.scenes.grammar import RELATIONS, GrammarError
from sparse_lavida_jax.scenes.sentences import (
    LONGEST_NAMED,
    misspelt,
    read_by,
    readers_of,
    same_words,
    with_taught_verb,
)

MOST_KINDS = 4  # in one request
_EMPTY = {
    *"the some is are that which there draw paint show me of a picture image style".split(),
    *"ein eine einem einen einer und im stil".split(),
}
_COUNTS = {word: number for number, word in enumerate(NUMBERS, start=1)} | {"an": 1, "one": 1}
Read = tuple[str, list[str]]  # a taught sentence, and what was not understood


@functools.cache
def _names(sheet: Sheet) -> dict[str, tuple[str, bool]]:
    """Returns each thing and whether the name is a plural, by names as `same_words` writes them."""
    names = {}
    for thing in sheet.things:
        names |= {
            same_words(sheet.spoken(thing.name, one)): (thing.name, False)
            for one in "de en".split()
        }
        names[same_words(plural(thing.name))] = (thing.name, True)
    return names


@functools.cache
def _words(sheet: Sheet) -> re.Pattern[str]:
    """Returns the pattern of a word with a meaning, in a group of its kind, or of any other."""
    kinds = {
        "relation": RELATIONS, "size": SIZES, "name": _names(sheet), "count": (*_COUNTS, r"\d+"),
        "joined": ("and",),
    }  # fmt: skip
    plain = [f"(?P<{kind}>{_any(words)})" for kind, words in kinds.items()]
    return re.compile(
        rf"(?:(?:on )?(?:an? |the )?(?P<background>{_any(BACKGROUNDS)}) background"
        rf"|(?:in (?:the )?)?(?P<style>{_any(STYLES)})(?: style)?"
        rf"|(?:facing|looking)(?: to)?(?: the)? (?P<facing>left|right)"
        rf"|{'|'.join(plain)})(?!\S)|(?P<other>\S+)"
    )


def _any(words: object) -> str:
    return "|".join(sorted(words, key=len, reverse=True))  # type: ignore[call-overload]


@dataclasses.dataclass
class _ReadRequest:
    """What a text says of things; 0 of a kind: any number of several."""

    items: list[tuple[int, Art]]
    relation: str | None = None
    style: str | None = None
    background: str | None = None

    @classmethod
    def read(cls, text: str, faults: list[str], sheet: Sheet) -> "_ReadRequest":
        """Reads a text in any order of words; adds to the faults what it does not understand."""
        read, count, art = cls([]), None, Art()
        for kind, word in _meanings(text, faults, sheet):
            match kind:
                case "name":
                    name, several = _names(sheet)[word]
                    read.items.append((count or (0 if several else 1), art._replace(name=name)))
                    count, art = None, Art()
                case "count":
                    count = _COUNTS.get(word) or int(word[:9])
                case "size":
                    art = art._replace(size=word)
                case "style":
                    ends = not text.endswith(tuple(_names(sheet))) and bool(read.items)
                    read.style, art = (
                        (word, art) if ends else (read.style, art._replace(style=word))
                    )
                case "facing" if read.items:
                    last, thing = read.items[-1]
                    read.items[-1] = last, thing._replace(facing=word)
                case "relation":
                    if read.relation or len(read.items) != 1:
                        faults.append(f"'{word}' in this place")
                    else:
                        read.relation = word
                case "background":
                    read.background = word
        return read


def _meanings(text: str, faults: list[str], sheet: Sheet) -> Iterator[tuple[str, str]]:
    """Yields the words of a text that mean something, with their kinds."""
    for match in _words(sheet).finditer(same_words(text)):
        kind, word = match.lastgroup or "", match[match.lastgroup or 0]
        if kind != "other":
            yield kind, word
        elif word not in _EMPTY:
            faults.append(f"'{word[:LONGEST_NAMED]}'")
            if near := misspelt(word, _names(sheet)):
                yield "name", near


def _drawn(text: str, dice: ArtDice) -> Read:
    """Reads what an image should show."""
    faults: list[str] = []
    try:
        asked = ArtRequest.parse(text, dice.sheet)
        if not {one.name for one in asked.phrases} <= {*dice.sheet.numbers}:
            raise GrammarError("things of another sheet")
        read = _ReadRequest([*asked.items], asked.relation, asked.style, asked.background)
    except GrammarError:
        asked, read = None, _ReadRequest.read(text, faults, dice.sheet)
    fitted = _fitted(read, faults, dice)
    return text if asked == fitted else str(fitted), faults


def _fitted(read: _ReadRequest, faults: list[str], dice: ArtDice) -> ArtRequest:
    """Returns the nearest request of a kind that is taught."""
    sheet, items = dice.sheet, [(count or dice.between(2, 3), one) for count, one in read.items]
    if not items:
        faults.append(f"what to draw (such as '{sheet.things[0].name}')")
        items = [(1, Art(dice.pick(sheet.things).name))]
    if len(items) > 1 and any(count > 1 for count, _ in items):
        faults.append("several of one kind with another kind (only one of each)")
        items = [(1, one) for _, one in items]
    if len(items) > MOST_KINDS:
        faults.append(f"more than {NUMBERS[MOST_KINDS - 1]} kinds of things")
    if items[0][0] > MOST_THINGS:
        faults.append(f"'{items[0][0]}' (one to {NUMBERS[MOST_THINGS - 1]} of a kind)")
    items = [(min(count, MOST_THINGS), one) for count, one in items[:MOST_KINDS]]
    for i, (count, one) in enumerate(items):
        faces = sheet.things[sheet.numbers[one.name or ""]].drawn
        if one.facing and (not faces or (one.name, "facing") in unclear(sheet)):
            faults.append(f"'{one.name} facing {one.facing}' (it looks alike from both sides)")
            items[i] = count, one._replace(facing=None)
    relation = read.relation
    if relation and len(items) != 2:
        faults.append(f"'{relation}' of {len(items)} things (of two)")
        relation = None
    return ArtRequest(tuple(items), relation, read.style, read.background)


def _one(text: str, dice: ArtDice, faults: list[str], more: tuple[str, ...] = ("size",)) -> Art:
    """Reads one thing; adds to the faults what else the text says.

    Args:
        more: the attributes that a taught sentence may state besides the name.
    """
    before = len(faults)
    read = _ReadRequest.read(text, faults, dice.sheet)
    if not read.items:
        if len(faults) == before:
            faults.append(f"'{text[:LONGEST_NAMED]}'")
        return Art(dice.pick(dice.sheet.things).name)
    count, one = read.items[0]
    if len(read.items) > 1 or count > 1 or read.relation:
        faults.append("more than one thing at once")
    said = one._replace(name=None, style=one.style or read.style)._asdict()
    said = {key: value for key, value in {**said, "background": read.background}.items() if value}
    faults += [f"'{value}' here" for key, value in said.items() if key not in more]
    return Art(one.name, **{key: value for key, value in said.items() if key in more})


# ---------------------------------------------------------------------------------------------
# Changes of an image.

_STYLE, _WAY, _RELATION = map("|".join, (STYLES, MOVES, RELATIONS))
# The taught forms, with a user's verb or the taught one; the first match counts.
_CHANGES = (
    ("restyle", rf"(?:draw|paint|make|turn|change|convert) (?P<anchor>.+?)(?: in| into| to)?"
     rf"(?: the)? (?P<style>{_STYLE})(?: style)?"),
    ("mirror", r"(?:mirror|flip) (?P<anchor>.+?)(?: around)?|replace (?P<turned>.+?) around"),
    ("replace", r"replace (?P<anchor>.+?) (?:with|and|by|for|into|to) (?P<thing>.+)"),
    ("move", rf"move (?P<anchor>.+?)(?: to the)? (?P<direction>{_WAY})(?:wards?)?"),
    ("add", rf"add (?P<thing>.+?) (?P<relation>{_RELATION}) (?P<anchor>.+)"),
    ("add", r"add (?P<thing>.+)"),
    ("remove", r"remove (?P<anchor>.+)"),
)  # fmt: skip


def _changed(text: str, dice: ArtDice) -> Read:
    """Reads how an image should be changed."""
    said, faults = same_words(text), list[str]()
    for kind, pattern in _CHANGES:
        if match := re.fullmatch(pattern, said) or re.fullmatch(pattern, with_taught_verb(said)):
            found = {name: value for name, value in match.groupdict().items() if value}
            things = {"anchor": found.pop("turned", None) or found.pop("anchor", None)}
            things["thing"] = found.pop("thing", None)
            said_of = {"anchor": ("size",), "thing": ()}
            arts = {
                name: _one(words, dice, faults, said_of[name]) if words else None
                for name, words in things.items()
            }
            change = ArtEdit(kind, arts["anchor"], arts["thing"])
            return str(change._replace(**found)), faults
    anchor = _one(said, dice, faults)
    return str(ArtEdit("mirror", anchor)), faults or [f"'{text[:LONGEST_NAMED]}'"]


# ---------------------------------------------------------------------------------------------
# Questions about an image.


def _looks(kind: str) -> Callable[..., str]:
    return lambda one: ask.QUESTIONS[kind].format(one)


def _is_there(one: Art) -> str:
    return IS_THERE["en"].format(f"{article(one.name or '')} {one.name}")


_QUESTIONS: tuple[tuple[str, Callable[..., str]], ...] = (
    (r"how many things(?: are there)?", lambda: reason.QUESTIONS["sum"]),
    (r"(?:how many|the number of|count(?: the)?|wie viele) (.+?)"
     r"(?: are there| do you see| gibt es| sind da)?",
     lambda one: HOW_MANY["en"].format(plural(one.name))),
    (r"(?:is|are) there more (.+?) than (.+?)",
     lambda one, other: reason.QUESTIONS["more"].format(plural(one.name), plural(other.name))),
    (r"(?:(?:is|are) there(?: any)?|do you see|gibt es|(?:ist|sind) da) (.+?)", _is_there),
    (r"(?:what|which) style (?:is|has) (.+?)", _looks("style")),
    (r"(?:where|which way|what way) (?:does|is) (.+?) (?:fac|look)(?:e|ing)?", _looks("facing")),
    (r"(?:how (?:large|small)|what size) is (.+?)", _looks("size")),
    (r"(?:where is|find|locate) (.+)", lambda one: f"where is the {one}?"),
)  # fmt: skip
_FURTHER = re.compile(rf"which is further ({'|'.join(reason.FURTHER)}),? (.+?) or (.+?)")


def _asked(text: str, dice: ArtDice) -> Read:
    """Reads a question about an image."""
    said, faults = same_words(text), list[str]()
    if said in (caption.PROMPT, detect.PROMPT) or _is_taught(text, dice.sheet):
        return text, faults
    if said.startswith("check "):
        request, faults = _drawn(text.partition(" ")[2], dice)
        return f"check: {request}", faults
    if match := _FURTHER.fullmatch(said):
        pair = [_one(part, dice, faults) for part in match.groups()[1:]]
        return reason.QUESTIONS["further"].format(match[1], *pair), faults
    for pattern, words in _QUESTIONS:
        if match := re.fullmatch(pattern, said):
            unknown: list[str] = []
            if all(_ReadRequest.read(one, unknown, dice.sheet).items for one in match.groups()):
                return words(*(_one(part, dice, faults) for part in match.groups())), faults
            faults += unknown
    faults = faults or [f"'{text[:LONGEST_NAMED]}'"]
    named = (match["name"] for match in _words(dice.sheet).finditer(said) if match["name"])
    if name := next(named, ""):
        return _is_there(Art(_names(dice.sheet)[name][0])), faults
    return reason.QUESTIONS["sum"], faults


def _is_taught(text: str, sheet: Sheet) -> bool:
    """Whether a question is one of another language."""
    spoken = [
        (sheet.spoken(thing.name, one), one) for thing in sheet.things for one in LANGUAGES[1:]
    ]
    return any(
        text == form[language].format(name)
        for name, language in spoken
        if name in text
        for form in (HOW_MANY, IS_THERE)
    )


def _pointed_at(text: str, dice: ArtDice) -> Read:
    """Reads the name of a thing to point at."""
    faults: list[str] = []
    return str(_one(text, dice, faults)), faults


_READERS = readers_of(_drawn, _asked, _changed, _pointed_at)


def read(task: str, text: str, seed: int, sheet: Sheet | None = None) -> Reading | None:
    """Returns what `scenes.sentences.read` does, for the art world."""
    dice = functools.partial(ArtDice, stream="unsaid", index=0, sheet=sheet)
    return read_by(_READERS.get(task), text, dice, seed)
