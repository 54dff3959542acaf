# SPDX-License-Identifier: Apache-2.0
"""Reads what a user writes as a sentence that models of the small world were taught.

Training has few forms of sentences, and a model does something else with any other. Other words
for the same become a taught sentence. What they leave open is chosen by the seed: "circles" may
become "three green circles". Words that mean anything else give the nearest taught sentence, and a
list of what was not understood.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from sparse_lavida_jax.prompting.vocabulary import Reading, listed
from sparse_lavida_jax.scenes.dice import TRAINED, Dice
from sparse_lavida_jax.scenes.grammar import (
    CONVERSE,
    CORNERS,
    DIRECTIONS,
    NUMBERS,
    RELATIONS,
    Edit,
    Phrase,
    SceneRequest,
)
from sparse_lavida_jax.scenes.tasks import caption
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES, SIZES

MOST_OF_A_KIND = 4
LONGEST = 1000  # characters of words that are read
MOST_TOKENS = 16  # of a sentence
MOST_NAMED = 6  # faults in a message
LONGEST_NAMED = 40  # letters of a word in a message
ALIKE = 0.75  # `difflib`'s ratio from which on a word counts as misspelt

# The forms of what is drawn, with an example each; and sentences that have none of them.
FORMS = {
    "one to four of a kind": "three large green triangles",
    "one of each of two kinds": "a red circle and a small blue square",
    "one above, below, left of or right of another": "a red circle above a blue square",
}
NO_FORMS = ("five red circles", "a red circle and two blue squares")


Read = tuple[str, list[str]]  # a taught sentence, and what was not understood

# ---------------------------------------------------------------------------------------------
# Things.

# Other words for the same.
_SAME = (
    (r"[^\w\s&+<>]|_", " "),
    (r"&|\+", " and "),
    (r"\b(?:please|exactly|just|only|colou?red|of them)\b", " "),
    (rf"\bin (?={'|'.join(COLOURS)})", " "),
    (r"\bcolor\b", "colour"),
    (r"\b(?:big|huge)\b", "large"),
    (r"\b(?:little|tiny)\b", "small"),
    (r"\bupper\b", "top"),
    (r"\blower\b", "bottom"),
    (r"\b(?:(?:on|to|at) the )?(left|right)(?: hand)?(?: side)? of\b", r"\1 of"),
    (r"\b(?:over|atop|on top of)\b", "above"),
    (r"\b(?:under|underneath|beneath)\b", "below"),
    (r"\b(?:as well as|together with|along with|with)\b", "and"),
    (r"\ba (?:couple|pair) of\b", "two"),
)
# Words without a meaning of their own between things.
_EMPTY = {*"the some is are that which there draw paint show me".split()}
_NOUNS = {
    **{noun: (None, noun[-1] == "s") for noun in ("thing", "things", "object", "objects")},
    **{noun: (one, noun != one) for one in SHAPES for noun in (one, Phrase(one).plural)},
}
_COUNTS = {
    **{word: number for number, word in enumerate(NUMBERS, start=1)},
    **{"an": 1, "one": 1, "single": 1},
    **{word: number for number, word in enumerate("seven eight nine ten eleven twelve".split(), 7)},
}
# What may be meant by words that are not taught.
_NEAR = {
    **dict.fromkeys(("ball", "dot", "disc", "disk", "ring", "oval", "sphere"), "circle"),
    **dict.fromkeys(("box", "cube", "rectangle"), "square"),
    **dict.fromkeys(("star", "plus", "x"), "cross"),
    **dict.fromkeys(("pink", "violet", "magenta"), "purple"),
    **dict.fromkeys(("orange", "gold", "brown"), "yellow"),
    **dict.fromkeys(("turquoise", "teal"), "cyan"),
    **dict.fromkeys(("several", "few"), "three"),
    **{"medium": "large", "many": "four", "dozen": "twelve"},
    **dict.fromkeys(("beside", "near", "inside", "between", "or", "around", "behind"), "and"),
}
# Words that stand between things. They are spelt right, so none of them is a misspelt name.
_BETWEEN = {
    *"about across after against along among as at before by down during for from in into like next"
    " of off on onto opposite out outside past per since than through till to toward towards until"
    " up upon via within without do does has have was were this these those they them".split(),
    *"ab am an auf aus bei bis dem den der des die das durch für gegen hinter im mit nach neben"
    " ohne seit über um unter von vor wegen zu zum zur zwischen".split(),
}
_CLASSES = {"s": SIZES, "c": COLOURS, "o": _NOUNS, "r": RELATIONS, "&": ("and",), "n": _COUNTS}
_KNOWN = [word for words in _CLASSES.values() for word in words if len(word) > 3]
# A thing, in the letters of `_CLASSES`: adjectives may follow the noun, or lack one.
_THING = re.compile(r"n?[sc]*o(?:[sc]+(?![sc]*o))?|n?[sc]+|n")


@dataclasses.dataclass(frozen=True)
class _Thing:
    """A thing as far as words name it; None is left unsaid.

    Attributes:
        count: 0: any number of several.
        counted, named: whether it has a number, and a noun.
    """

    count: int
    counted: bool
    phrase: Phrase
    named: bool


@dataclasses.dataclass(frozen=True)
class _Things:
    """What a text says about things.

    Attributes:
        things, relations: in order.
        order: T for each thing, r for a relation, & for "and".
        faults: what was not understood.
    """

    things: list[_Thing]
    relations: list[str]
    order: str
    faults: list[str]


def same_words(text: str) -> str:
    """Returns a text in small letters, without punctuation, with taught words where it can."""
    text = text.casefold()
    for pattern, word in _SAME:
        text = re.sub(pattern, word, text)
    return " ".join(text.split())


def misspelt(word: str, known: Iterable[str]) -> str:
    """Returns the known word that a misspelt one is close to; "" if it is another word.

    Its first letter is right, so "über" is no "bear"; and it is no word of `_BETWEEN`, so "from" is
    no "frog".
    """
    alike = () if word in _BETWEEN else [one for one in known if one[0] == word[0]]
    return next(iter(difflib.get_close_matches(word, alike, 1, ALIKE)), "")


def _letter(word: str) -> str:
    return next((one for one, words in _CLASSES.items() if word in words), "n" * word.isdecimal())


def _things(text: str) -> _Things:
    faults: list[str] = []
    said: list[str] = []
    for word in re.findall(r"(?:left|right) of\b|\S+", same_words(text)):
        if not _letter(word) and word not in _EMPTY:
            faults.append(f"'{word[:LONGEST_NAMED]}'")
            near = _NEAR.get(word, _NEAR.get(word.removesuffix("s"), ""))
            if not near and len(faults) <= MOST_NAMED:
                near = misspelt(word, _KNOWN)
            word = near
        said += [word] * bool(_letter(word))
    letters = "".join(map(_letter, said))
    things = []
    for match in _THING.finditer(letters):
        words = said[slice(*match.span())]
        of = {one: [word for word in words if word in _CLASSES[one]] for one in "sco"}
        for one in "sc":
            if len({*of[one]}) > 1:
                faults.append(" and ".join(f"'{word}'" for word in of[one]) + " of one thing")
        shape, plural = _NOUNS[of["o"][0]] if of["o"] else (None, False)
        phrase = Phrase(shape, *(next(iter(of[one]), None) for one in "cs"))
        counted = match[0][0] == "n"
        count = int(_COUNTS.get(words[0], words[0][:9])) if counted else 1 - plural
        if counted and not 0 < count <= MOST_OF_A_KIND:
            faults.append(
                f"'{words[0][:LONGEST_NAMED]}' (one to {NUMBERS[MOST_OF_A_KIND - 1]} of a kind)"
            )
        things.append(_Thing(count, counted, phrase, bool(of["o"])))
    order = _THING.sub("T", letters)
    relations = [word for word in said if word in RELATIONS]
    return _Things(_with_nouns(things, faults), relations, order, faults)


def _with_nouns(things: list[_Thing], faults: list[str]) -> list[_Thing]:
    """Completes "a red and a blue circle", and drops "a", which an unknown word may follow."""
    found: list[_Thing] = []
    for i, thing in enumerate(things):
        if not thing.named and thing.phrase != Phrase():
            later = things[i + 1 :]
            if not faults and not (later and later[0].named and later[0].counted):
                faults.append(f"'{str(thing.phrase).removesuffix(' thing')}' without a shape")
            shape = next((one.phrase.shape for one in later if one.named), None)
            thing = dataclasses.replace(thing, phrase=thing.phrase._replace(shape=shape))
        elif not thing.named:
            continue
        found.append(thing)
    return found


def _whole(dice: Dice, phrase: Phrase, other: Phrase | None = None) -> Phrase:
    """Returns a phrase with a shape and a colour, not those of another one."""
    pairs = [
        Phrase(*pair, phrase.size)
        for pair in TRAINED
        if phrase.shape in (None, pair[0]) and phrase.colour in (None, pair[1])
    ]
    pairs = [one for one in pairs if other is None or not _alike(one, other)]
    is_whole = phrase.shape is not None and phrase.colour is not None
    return phrase if is_whole or not pairs else dice.pick(pairs)


def _alike(one: Phrase, other: Phrase) -> bool:
    return (one.shape, one.colour) == (other.shape, other.colour)


def _one(text: str, dice: Dice, faults: list[str]) -> Phrase:
    """Reads one thing; adds to the faults what else the text says."""
    read = _things(text)
    faults += read.faults
    phrase = read.things[0].phrase if read.things else Phrase()
    if not read.faults and phrase == Phrase(size=phrase.size):
        faults.append(f"'{text[:LONGEST_NAMED]}' without a shape or a colour")
    elif read.things and (read.order != "T" or read.things[0].count != 1):
        faults.append("more than one thing at once")
    return _whole(dice, phrase) if phrase == Phrase(size=phrase.size) else phrase


# ---------------------------------------------------------------------------------------------
# Images.


def _drawn(text: str, dice: Dice) -> Read:
    """Reads what an image should show."""
    read = _things(re.sub(r"(?i)\b(?:an?|the) (?:picture|image|drawing|painting) of\b", " ", text))
    things, relation, faults = read.things, None, read.faults
    if not things:
        faults = faults or ["what to draw"]
        faults[-1] += f" (it draws {listed([Phrase(one).plural for one in SHAPES], 'and')})"
        things = [_Thing(1, True, Phrase(), True)]
    if read.relations:
        relation = read.relations[0] if len(things) > 1 else None
        is_converse = re.fullmatch("r&*T&*T", read.order)  # "above a square, a circle"
        if is_converse:
            things.reverse()
        if len(read.relations) > 1 and len(things) == 2:
            faults.append(" and ".join(f"'{word}'" for word in read.relations) + " at once")
        elif len(things) > 2 or any(one.count != 1 for one in things):
            faults.append(f"'{read.relations[0]}' of more than two objects")
        elif not (is_converse or read.order == "TrT"):
            faults.append(f"'{read.relations[0]}' in this place")
    else:
        things = _merged(things)
        if len(things) > 2:
            faults.append("more than two kinds of things")
        if len(things) > 1 and any(one.count != 1 for one in things):
            faults.append("several of one kind with another kind (only one of each)")
        elif max(one.count for one in things) > MOST_OF_A_KIND and not faults:
            faults.append(f"more than {NUMBERS[MOST_OF_A_KIND - 1]} of a kind")
    if len(things) == 1:
        count = min(things[0].count, MOST_OF_A_KIND) or dice.between(2, MOST_OF_A_KIND)
        request = SceneRequest(((count, _whole(dice, things[0].phrase)),))
        return str(request), faults
    first = _whole(dice, things[0].phrase)
    second = _whole(dice, things[1].phrase, first)
    if _alike(first, second) and first.size == second.size:
        if first.size and relation:
            faults.append(f"two things that look the same with '{relation}'")
        size = first.size or dice.pick(SIZES)
        other = second.size or next(one for one in SIZES if one != size)
        first = first._replace(size=size)
        second = second._replace(size=other)
    if relation in ("right of", "below"):  # the converse is drawn right more often: .99, not .95
        first, second, relation = second, first, CONVERSE[relation]
    return str(SceneRequest(((1, first), (1, second)), relation)), faults


def _merged(things: list[_Thing]) -> list[_Thing]:
    """Counts things of the same phrase together: "a circle and a circle" are two."""
    merged: dict[Phrase, _Thing] = {}
    for thing in things:
        before = merged.get(thing.phrase)
        count = before.count + thing.count if before else thing.count
        if before and not before.count * thing.count:
            count = 0
        merged[thing.phrase] = dataclasses.replace(thing, count=count)
    return [*merged.values()]


# ---------------------------------------------------------------------------------------------
# Changes of an image.

# What instructions start with, for each verb that is taught.
_VERBS = {
    "add": "put|place|insert|draw|create|include",
    "remove": "delete|erase|take away|take out|get rid of|clear",
    "replace": "swap|exchange|substitute|change|turn|convert|transform",
    "make": "colour|paint|recolour",
    "move": "shift|push|slide|bring",
}
_COLOUR, _RELATION, _CORNER, _WAY = map("|".join, (COLOURS, RELATIONS, CORNERS, DIRECTIONS))
_IN_CORNER = rf"(?:to|into|in|at) (?:the )?(?P<corner>{_CORNER})(?: corner)?"
# The taught forms in other words. X is a thing in the image, Y a new one; the first match counts.
_CHANGES = (
    ("recolour", rf"(?:replace|make) (?P<x>.+?) (?:(?:to|into|and|by) )?(?P<colour>{_COLOUR})"),
    ("replace", r"replace (?P<x>.+?) (?:to|into|and|by|for) (?P<y>.+)"),
    ("move", rf"move (?P<x>.+?) {_IN_CORNER}"),
    ("move", rf"move (?P<x>.+?) (?:one cell )?(?:to the )?(?P<direction>{_WAY})(?:wards?)?"),
    ("add", rf"add (?P<y>.+?) (?P<relation>{_RELATION}) (?P<x>.+)"),
    ("add", rf"add (?P<y>.+?) {_IN_CORNER}"),
    ("add", r"add (?P<y>.+)"),
    ("remove", r"remove (?P<x>.+)"),
)


def with_taught_verb(said: str) -> str:
    """Returns an instruction that starts with a verb that is taught, if it starts with another."""
    for verb, others in _VERBS.items():
        said = re.sub(rf"^(?:{others})\b", verb, said)
    return said


def _changed(text: str, dice: Dice) -> Read:
    """Reads how an image should be changed."""
    said, faults = with_taught_verb(same_words(text)), list[str]()
    for kind, pattern in _CHANGES:
        if match := re.fullmatch(pattern, said):
            found = {name: value for name, value in match.groupdict().items() if value}
            anchor, thing = (
                _one(found.pop(name), dice, faults) if name in found else None for name in "xy"
            )
            if kind == "move" and anchor and None in (anchor.shape, anchor.colour):
                faults.append(f"'{anchor}' without a shape and a colour")  # .8 are moved right
                anchor = _whole(dice, anchor)
            thing = thing and _whole(dice, thing)
            return str(Edit(kind, anchor, thing, **found)), faults
    read = _things(text)
    faults = read.faults or [f"'{text[:LONGEST_NAMED]}'"]
    anchor = _whole(dice, read.things[0].phrase if read.things else Phrase())
    return str(Edit("recolour", anchor, colour=dice.pick(COLOURS))), faults


# ---------------------------------------------------------------------------------------------
# Questions about an image.

# Questions that are taught as they stand.
_WHOLE = (caption.PROMPT, "list the objects", "what is there", "where are these")
_SUM = re.compile(r" (plus|minus|and) (?=how many )")
# The other taught forms in other words; the first match counts.
_QUESTIONS: tuple[tuple[str, Callable[..., str]], ...] = (
    (
        r"(?:how many|(?:the |what is the )?number of|count(?: the| all)?) (.+?)",
        lambda one: f"how many {one.plural} are there?",
    ),
    (
        r"(?:is|are) there more (.+?) than (.+?)",
        lambda one, other: f"are there more {one.plural} than {other.plural}?",
    ),
    (
        r"(?:is|are) there (?:fewer|less) (.+?) than (.+?)",
        lambda one, other: f"are there more {other.plural} than {one.plural}?",
    ),
    (
        r"(?:(?:is|are) there(?: any)?|(?:can|do) you see|does it (?:have|show|contain)) (.+?)",
        lambda one: f"is there a {one}?",
    ),
    (
        r"(?:what|which) (?:colour (?:is|has|does)|is the colour of) (.+?)(?: have)?",
        lambda one: f"what colour is the {Phrase(one.shape)}?",
    ),
)
_ENDS = (
    r"(?: (?:are|is) (?:there|here)| (?:can|do) you see)?(?: in (?:the|this) (?:picture|image))?$"
)


def _asked(text: str, dice: Dice) -> Read:
    """Reads a question about an image."""
    said, faults = same_words(text), list[str]()
    if said in _WHOLE:
        return f"{said}?" if text.rstrip().endswith("?") else said, faults
    if said.startswith("check "):
        request, faults = _drawn(said.removeprefix("check "), dice)
        return f"check: {request}", faults
    if match := re.fullmatch(r"(?:where is|find|locate) (.+)", said):
        phrase, faults = _pointed_at(match[1], dice)
        return f"where is the {phrase}?", faults
    said = re.sub(_ENDS, "", said)
    first, *others = _SUM.split(said)
    if others and first.startswith("how many "):
        words = [
            _kind(part.removeprefix("how many "), faults).plural for part in (first, *others[1::2])
        ]
        signs = ["plus" if sign == "and" else sign for sign in others[::2]]
        rest = "".join(
            f" {sign} how many {one}" for sign, one in zip(signs, words[1:], strict=True)
        )
        return f"how many {words[0]}{rest}?", faults
    for pattern, words in _QUESTIONS:
        if match := re.fullmatch(pattern, said):
            kinds = [_kind(part, faults) for part in match.groups()]
            return words(*kinds), faults
    read = _things(said)
    faults = read.faults or [f"'{text[:LONGEST_NAMED]}'"]
    kind = read.things[0].phrase if read.things else Phrase()
    kind = _whole(dice, kind._replace(size=None))
    return f"how many {kind.plural} are there?", faults


def _kind(text: str, faults: list[str]) -> Phrase:
    """Reads a kind of thing, without a size; adds to the faults what else the text says."""
    read = _things(text)
    faults += read.faults
    phrase = read.things[0].phrase if read.things else Phrase()
    if not read.faults:
        if read.order != "T" or read.things[0].count > 1:
            faults.append(f"'{text[:LONGEST_NAMED]}' (one kind of thing)")
        elif phrase == Phrase(size=phrase.size):
            faults.append("things without a shape or a colour")
        elif phrase.size:
            faults.append(f"'{phrase.size}' (a question is about shapes and colours)")
    return Phrase(phrase.shape or (None if phrase.colour else SHAPES[0]), phrase.colour)


def _pointed_at(text: str, dice: Dice) -> Read:
    """Reads the name of a thing to point at."""
    faults: list[str] = []
    return str(_one(text, dice, faults)), faults


Reader = Callable[[str, Any], Read]  # takes a text, and dice for what it leaves open


def readers_of(
    drawn: Reader, asked: Reader, changed: Reader, pointed_at: Reader
) -> dict[str, Reader]:
    """Returns the reader of each task that is taught some sentences only."""
    return {
        **dict.fromkeys(("generate", "inpaint", "outpaint", "reflect"), drawn),
        **dict.fromkeys(("ask", "reason"), asked),
        "edit": changed,
        "ground": pointed_at,
    }


_READERS = readers_of(_drawn, _asked, _changed, _pointed_at)


def read(task: str, text: str, seed: int) -> Reading | None:
    """Returns a taught sentence for the words of a task; None for tasks that take any words.

    Args:
        task: a key of `requests.TASK_SPECS`.
        text: of at most `LONGEST` characters.
        seed: chooses what the words leave open.
    """
    return read_by(_READERS.get(task), text, lambda number: Dice(number, "unsaid", 0), seed)


def read_by(
    reader: Reader | None, text: str, dice_of: Callable[[int], Any], seed: int
) -> Reading | None:
    """Returns the sentence of a reader, with a warning about what it did not understand.

    Args:
        dice_of: returns the dice of a seed.
    """
    if reader is None:
        return None
    sentence, faults = reader(text, dice_of(seed))
    if not faults:
        return Reading(sentence)
    sentence, faults = reader(text, dice_of(0))  # one warning for images of many seeds
    named = [*dict.fromkeys(faults)]
    if len(named) > MOST_NAMED + 1:
        named[MOST_NAMED:] = [f"{len(named) - MOST_NAMED} more"]
    return Reading(
        sentence,
        f"not understood: {listed(named, 'and')}. Instead, the nearest sentence that this model was"
        f" taught is used: '{sentence}'.",
    )
