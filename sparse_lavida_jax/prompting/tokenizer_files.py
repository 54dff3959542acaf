# SPDX-License-Identifier: Apache-2.0
"""What a `tokenizer.json` may contain: byte-level BPE, as in our models and in the release.

The library that runs it can do much more, some of which takes hours or gigabytes, or ends in a
panic of its own. So a file from elsewhere is compared with what is known before it is run.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from sparse_lavida_jax.data import files
from sparse_lavida_jax.schema import shown

MOST_BYTES = 2**24  # of the file; one of 126,000 tokens has about 10 million
MOST_TOKENS = 2**20
MOST_PARTS = 16  # of a sequence
LONGEST = 300  # characters of a pattern, or of a token outside the vocabulary

# Pieces of a pattern such as that of GPT-4: a character or a class with a quantifier, a group of
# characters, "not before". Nothing in a group is repeated, nor is a group itself.
_ATOM = r"\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|\\[^\w\s]|\[(?:\\.|[^\[\]\\])+\]|[^\\()\[\]{}?*+|]"
_PIECE = re.compile(
    rf"(?:{_ATOM})(?P<times>[?*+]\+?|\{{\d(?:,\d?)?\}})?"
    rf"|(?P<group>\((?:\?i?:)?(?:{_ATOM}|\|)*\)\??)|\(\?!(?:{_ATOM})\)|(?P<end>\|)"
)

Holds = Callable[[Any], bool]


def check(contents: str) -> None:
    """Checks a `tokenizer.json`, except for padding and truncation: switch these off.

    Raises:
        ValueError: it is not JSON, or has something unknown; the message says what.
    """
    given = files.parse_json(contents, unique=True)
    unread = dict.fromkeys(("version", "truncation", "padding"), lambda value: True)
    parts = {name: lambda value, name=name: _is_known(name, value) for name in _KNOWN}
    model = {"model": lambda value: value["type"] == "BPE" and "vocab" in value}
    _check("it", given, {**unread, **parts, **model, "added_tokens": _is_list(_is_added, 2**16)})
    _check("its model", given.get("model"), _MODEL)
    vocabulary = given["model"]["vocab"]
    ids = {*vocabulary.values(), *(one["id"] for one in given.get("added_tokens") or ())}
    for part in _parts("post_processor", given.get("post_processor")):
        added = [i for one in part.get("special_tokens", {}).values() for i in one["ids"]]
        if not ids.issuperset(added):
            raise ValueError(f"its post_processor adds {added[:9]}, of which one is not an id")
    unknown = given["model"].get("unk_token")
    if unknown is not None and unknown not in vocabulary:
        raise ValueError(f"its unk_token {shown(unknown)} is not in its vocabulary")


def _check(what: str, given: Any, allowed: Mapping[str, Holds]) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{what} is {shown(given)}, which has no settings")
    for name, value in given.items():
        try:
            holds = allowed[name](value)
        except (LookupError, TypeError, AttributeError):
            holds = False
        if not holds:
            raise ValueError(
                f"{what} has {shown(name)} {shown(value)}; only byte-level BPE as in LLaDA and"
                " LaViDa-O is taken, without what changes the text"
            )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_TOKENS


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST


def _is_list(holds: Holds, most: int) -> Holds:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(holds, value))


def _is_merge(value: Any) -> bool:
    return isinstance(value, str) or [type(one) for one in value] == [str, str]


def _has(given: Mapping[str, Any], fields: Mapping[str, Holds]) -> bool:
    return given.keys() <= fields.keys() and all(fields[name](given[name]) for name in given)


def _is_added(value: Any) -> bool:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), _is_flag)
    return "id" in value and _has(value, {"id": _is_id, "content": _is_text, **flags})


def _is_pattern(value: Any) -> bool:
    [(kind, text)] = [*value.items()] or [("", "")]
    return _is_text(text) and (kind == "String" or (kind == "Regex" and _is_quick(text)))


def _is_quick(pattern: str) -> bool:
    """Whether a search takes at most about the square of the text, by the form of the pattern.

    In each alternative, at most one piece before the last repeats without an end, and at most one
    more can match in several ways: these multiply, and the last one never has to match less.
    """
    pieces = [*_PIECE.finditer(pattern)]
    choices: list[list[re.Match[str]]] = [[]]
    for piece in pieces:
        choices += [[]] if piece["end"] else []
        choices[-1] += [] if piece["end"] else [piece]
    is_whole = "".join(piece[0] for piece in pieces) == pattern and all(choices)
    for choice in choices:
        times = [piece["times"] or "" for piece in choice[:-1]]
        endless = [one for one in times if one[:1] in ("*", "+") or one.endswith(",}")]
        several = [one for one in times if one and not re.fullmatch(r"\{\d\}", one)]
        groups = [piece for piece in choice[:-1] if piece["group"]]
        is_whole = is_whole and len(endless) <= 1 and len(several) + len(groups) <= 2
    return is_whole


def _is_template(part: Mapping[str, Any]) -> bool:
    """Whether a TemplateProcessing puts known tokens around one text."""
    tokens = part["special_tokens"]
    of_token = {"id": _is_text, "ids": _is_list(_is_id, 16), "tokens": _is_list(_is_text, 16)}
    single, pair = part["single"], part["pair"]
    texts = [one["Sequence"]["id"] for one in single if "Sequence" in one]
    kinds = [kind for one in (*single, *pair) for kind in one]
    named = [one["SpecialToken"]["id"] for one in (*single, *pair) if "SpecialToken" in one]
    return (
        max(len(single), len(pair), len(tokens)) <= MOST_PARTS
        and all(one.keys() == of_token.keys() and _has(one, of_token) for one in tokens.values())
        and {*kinds} <= {"Sequence", "SpecialToken"}
        and texts == ["A"]
        and {*named} <= tokens.keys()
    )


_BYTE_LEVEL: dict[str, Holds] = {
    "add_prefix_space": _is_flag, "trim_offsets": _is_flag, "use_regex": _is_flag
}  # fmt: skip
_BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_SPLIT: dict[str, Holds] = {
    "pattern": _is_pattern, "behavior": _BEHAVIORS.__contains__, "invert": _is_flag
}  # fmt: skip
_MODEL: dict[str, Holds] = {
    "type": _is_text,
    "dropout": lambda value: value in (None, 0),
    "unk_token": lambda value: value is None or _is_text(value),
    **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), (None, "").__contains__),
    **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), _is_flag),
    "vocab": lambda value: len(value) <= MOST_TOKENS and all(map(_is_id, value.values())),
    "merges": _is_list(_is_merge, MOST_TOKENS),
}
# By field: the name of the list in a Sequence, and the settings of each known type.
_KNOWN: dict[str, tuple[str, dict[str, dict[str, Holds]]]] = {
    "normalizer": ("normalizers", {"NFC": {}}),
    "pre_tokenizer": (
        "pretokenizers",
        {"ByteLevel": _BYTE_LEVEL, "Split": _SPLIT, "Digits": {"individual_digits": _is_flag}},
    ),
    "post_processor": ("processors", {"ByteLevel": _BYTE_LEVEL, "TemplateProcessing": {}}),
    "decoder": ("decoders", {"ByteLevel": _BYTE_LEVEL}),
}


def _parts(field: str, value: Any) -> list[Any]:
    if value is None:
        return []
    return value[_KNOWN[field][0]] if value["type"] == "Sequence" else [value]


def _is_known(field: str, value: Any) -> bool:
    parts = _parts(field, value)
    kinds = [one["type"] for one in parts if one["type"] != "Split"]
    once = len({*kinds}) == len(kinds)  # each ByteLevel doubles a text; a second template panics
    return once and len(parts) <= MOST_PARTS and all(_is_known_part(field, one) for one in parts)


def _is_known_part(field: str, part: Mapping[str, Any]) -> bool:
    if part["type"] == "TemplateProcessing":
        return field == "post_processor" and _is_template(part)
    return _has({**part}, {"type": _is_text, **_KNOWN[field][1][part["type"]]})
