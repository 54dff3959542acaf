# SPDX-License-Identifier: Apache-2.0
"""What both languages of prompts share: mistakes in a request, texts with gaps, an interface."""

import abc
import re
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt8

Pixels = UInt8[np.ndarray, "_h _w 3"]
Grid = Bool[np.ndarray, "y x"]
Box = tuple[int | float, int | float, int | float, int | float]  # x1, y1, x2, y2 in pixels
Template = tuple[str | int, ...]  # pieces of text, and between them gaps of so many tokens

_GAP = re.compile(r"_{2,}|\{(\d+)\}")
MOST_GAP = 512  # tokens
WORD_GAP = 3  # tokens before, between and after required words: "a small red" circle


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


def too_long(text: str, tokens: int, most: int) -> RequestError:
    """Returns the mistake of a prompt that is longer than the model has seen."""
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return RequestError(
        f"the prompt {shown!r} is {tokens} tokens long, images included: at most {most} fit."
    )


class PromptLanguage(abc.ABC):
    """How every task is put to a model: what `ScenePrompts` and `lavida_o`'s `ChatPrompts` share.

    Both have the same methods; the pipeline calls either.
    """

    @abc.abstractmethod
    def refusal(self, task: str) -> str:
        """Returns why the model cannot do a task; "" if it can."""

    def check_task(self, task: str) -> None:
        """Checks that the model can do a task.

        Raises:
            RequestError: it cannot.
        """
        if refusal := self.refusal(task):
            raise RequestError(refusal)

    @abc.abstractmethod
    def on_canvas(self, mask: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, "_h _w"]:
        """Returns a mask over an image as a mask over its canvas."""

    @abc.abstractmethod
    def template_ids(
        self, template: Template
    ) -> tuple[Int[np.ndarray, " l"], Bool[np.ndarray, " l"]]:
        """Returns the ids of a template, something else in its gaps, and which are known."""

    @abc.abstractmethod
    def ends(self) -> set[int]:
        """Returns the ids that end a text."""

    @abc.abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids."""

    def text(self, ids: Int[np.ndarray, "_l 1"]) -> str:
        """Returns the text of a response, up to its first end."""
        said, ends = ids[:, 0].tolist(), self.ends()
        return self.decode(said[: next((i for i, x in enumerate(said) if x in ends), len(said))])

    def completed(self, template: Template, ids: Int[np.ndarray, "_l 1"]) -> str:
        """Returns a template with its gaps filled from a response."""
        return self.decode(ids[: len(self.template_ids(template)[0]), 0].tolist())
