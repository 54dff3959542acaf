# SPDX-License-Identifier: Apache-2.0
"""What every language of prompts shares: tasks, mistakes in a request, texts with gaps."""

import re
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

TASKS = (
    "generate", "edit", "inpaint", "outpaint", "ask", "reason", "caption", "constrained_caption",
    "infill", "ground", "reflect",
)  # fmt: skip

Template = tuple[str | int, ...]  # pieces of text, and between them gaps of so many tokens

_GAP = re.compile(r"_{2,}|\{(\d+)\}")
MOST_GAP = 512  # tokens
WORD_GAP = 3  # tokens before, between and behind required words: "a small red" circle


class RequestError(ValueError):
    """Something asked for that a model cannot do; the message says what it can."""


def parse_template(text: str) -> Template:
    """Reads a text with gaps: `___` is a gap of one token, `{4}` one of four.

    Raises:
        RequestError: there is no gap, or one that is too long.
    """
    pieces: list[str | int] = []
    end = 0
    for match in _GAP.finditer(text):
        pieces += [text[end : match.start()].rstrip(), int(match.group(1) or 1)]
        end = match.end()
    pieces.append(text[end:].rstrip())
    if end == 0:
        raise RequestError(
            f"the text {text!r} has no gap to fill: write ___ for one word, {{4}} for four tokens."
        )
    if wrong := [n for n in pieces if isinstance(n, int) and not 1 <= n <= MOST_GAP]:
        raise RequestError(f"a gap of {wrong[0]} tokens is out of range: 1..{MOST_GAP}.")
    # What a gap is filled with brings its own space along.
    spaced = (p if isinstance(p, int) or p[:1] in ("", " ") or i else f" {p}"
              for i, p in enumerate(pieces))  # fmt: skip
    return tuple(piece for piece in spaced if piece)


def words_template(words: Sequence[str], gap: int = WORD_GAP) -> Template:
    """Returns a template in which words stand in their order, with room around each.

    Raises:
        RequestError: there is no word.
    """
    if not words or not all(word.strip() for word in words):
        raise RequestError("a constrained caption needs a template or at least one word.")
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


def check_words(text: str, what: str = "prompt") -> str:
    """Returns a text of a person.

    Raises:
        RequestError: it is empty.
    """
    if not text.strip():
        raise RequestError(f"the {what} is empty: say in words what you want.")
    return text


def check_context(tokens: int, most: int, text: str) -> None:
    """Checks the length of a prompt in tokens.

    Raises:
        RequestError: it is longer than the model has seen.
    """
    if tokens > most:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise RequestError(
            f"the prompt {shown!r} is {tokens} tokens long, images included: at most {most} fit."
        )
