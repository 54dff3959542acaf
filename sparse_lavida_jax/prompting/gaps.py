# SPDX-License-Identifier: Apache-2.0
"""Texts with gaps, which the model fills."""

import re
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from sparse_lavida_jax.prompting.request_errors import RequestError, check_characters

Template = tuple[str | int, ...]  # pieces of text, and numbers: gaps of so many tokens

_GAP = re.compile(r"_{2,}|\{(\d+)\}")
MOST_GAP = 512  # tokens
MOST_GAPS = 8192  # tokens in all gaps of a text
WORD_GAP = 3  # tokens before, between and after required words: "a small red" circle


def has_gaps(text: str) -> bool:
    """Whether `parse_template` finds a gap in a text."""
    return bool(_GAP.search(text))


def template_text(template: Template) -> str:
    """Returns the text that `parse_template` reads as this template."""
    return "".join(piece if isinstance(piece, str) else f"{{{piece}}}" for piece in template)


def parse_template(text: str) -> Template:
    """Reads a text with gaps: `___` is a gap of one token, `{4}` one of four.

    Raises:
        RequestError: there is no gap, a gap is not 1 to `MOST_GAP` tokens long, or all gaps
            together are longer than `MOST_GAPS`.
    """
    check_characters(text, "text")
    pieces: list[str | int] = []
    end = 0
    for match in _GAP.finditer(text):
        if len(digits := match.group(1) or "1") > 9:
            raise RequestError(f"a gap of {digits:.9}... tokens is out of range: 1..{MOST_GAP}.")
        pieces += [text[end : match.start()].rstrip(), int(digits)]
        end = match.end()
    pieces.append(text[end:].rstrip())
    if end == 0:
        raise RequestError(
            f"the text {text!r} has no gap to fill: write ___ for one word, {{4}} for four tokens."
        )
    if wrong := [n for n in pieces if isinstance(n, int) and not 1 <= n <= MOST_GAP]:
        raise RequestError(f"a gap of {wrong[0]} tokens is out of range: 1..{MOST_GAP}.")
    if (total := sum(n for n in pieces if isinstance(n, int))) > MOST_GAPS:
        raise RequestError(f"the gaps are {total} tokens in all: at most {MOST_GAPS} are filled.")
    # The filling of a gap brings its own leading space.
    spaced = (p if isinstance(p, int) or p[:1] in ("", " ") or i else f" {p}"
              for i, p in enumerate(pieces))  # fmt: skip
    return tuple(piece for piece in spaced if piece)


def words_template(words: Sequence[str], gap: int = WORD_GAP) -> Template:
    """Returns a template with the words in their order and a gap around each.

    Raises:
        RequestError: there are no words.
    """
    if not words or not all(word.strip() for word in words):
        raise RequestError("a constrained caption needs a template or at least one word.")
    check_characters(" ".join(words), "caption")
    return (gap, *(piece for word in words for piece in (f" {word.strip()}", gap)))


def template_ids(
    template: Template, encode: Callable[[str], list[int]], open_id: int
) -> tuple[Int[np.ndarray, " l"], Bool[np.ndarray, " l"]]:
    """Returns the ids of a template, `open_id` in its gaps, and which of them are known."""
    ids: list[int] = []
    given: list[bool] = []
    for piece in template:
        part = [open_id] * piece if isinstance(piece, int) else encode(piece)
        ids += part
        given += [not isinstance(piece, int)] * len(part)
    return np.array(ids, np.int32), np.array(given, bool)
