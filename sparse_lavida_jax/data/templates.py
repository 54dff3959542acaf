# SPDX-License-Identifier: Apache-2.0
"""Shared by both prompt languages: request errors, texts with gaps, and their interface."""

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.image_files import Box, Pixels
from sparse_lavida_jax.data.vocabulary import Reading, Vocabulary
from sparse_lavida_jax.schema import InputError

Grid = Bool[np.ndarray, "y x"]
Template = tuple[str | int, ...]  # pieces of text, and numbers: gaps of so many tokens

_GAP = re.compile(r"_{2,}|\{(\d+)\}")
MOST_GAP = 512  # tokens
MOST_GAPS = 8192  # tokens in all gaps of a text
_LOCATIONS = re.compile(r"\s*(?:<LOC_\w+>)+")
_EDGE = re.compile(r"<LOC_(\d{1,9})>")
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")  # thirds of an image
WORD_GAP = 3  # tokens before, between and after required words: "a small red" circle


class RequestError(InputError):
    """A request for something that a model cannot do; the message says what it can."""


def parse_template(text: str) -> Template:
    """Reads a text with gaps: `___` is a gap of one token, `{4}` one of four.

    Raises:
        RequestError: there is no gap, or one that is too long.
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


def check_words(text: str) -> str:
    """Checks a text that a user wrote, and returns it.

    Raises:
        RequestError: it is empty, or `check_characters` refuses it.
    """
    if not text.strip():
        raise RequestError("the prompt is empty: say in words what you want.", setting="prompt")
    check_characters(text, "prompt")
    return text


def check_characters(text: str, what: str) -> None:
    """Checks that a text can be encoded.

    Raises:
        RequestError: it holds half a character (a surrogate), which JSON and command-line
            arguments may contain.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start + 1} of the {what} is half a character: leave it out.",
            setting=what,
        ) from error


def too_long(text: str, tokens: int, most: int, what: str = "prompt") -> RequestError:
    """Returns the error for a prompt that is longer than the model allows."""
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return RequestError(
        f"the {what} {shown!r} is {tokens} tokens long, images included: at most {most} fit.",
        setting=what,
    )


@runtime_checkable
class PromptLanguage(Protocol):
    """The prompts of every task: `ScenePrompts` in `scenes`, or `ChatPrompts` in `lavida_o`.

    Attributes:
        tokenizer_type, tokenizer: of the text (`data.tokenizer.TextTokenizer`).
        encoder: makes training examples of the small world; None for other models.
        describe: words that ask for a caption.
        describe_in: words that ask for a caption with given words.
        fill_in: words that ask to fill the gaps of a text.
        answer_tokens, long_answer_tokens: of a short answer, and of a long one such as a caption.
        usual_words: tokens that the user's words have at most in most requests; by default some 70
            words of English.
        text_block_len: tokens of a text block.
        longest: tokens of the longest prompt, with a layout.
        locates_in_one_step: whether all boxes are decoded in one step, as released.
    """

    tokenizer_type: ClassVar[Any]
    tokenizer: Any
    encoder: Any
    describe: ClassVar[str]
    describe_in: ClassVar[str]
    fill_in: ClassVar[str]
    answer_tokens: ClassVar[int]
    usual_words: int = 96
    locates_in_one_step: ClassVar[bool]

    @classmethod
    def of(cls, tokenizer: Any, settings: config.Config, codec: Any) -> "PromptLanguage":
        """Returns the prompts of a model, given its tokenizers.

        Args:
            codec: of images; None for a model without images.

        Raises:
            ValueError: tokenizer and model do not belong together.
        """
        ...

    @property
    def longest(self) -> int: ...
    @property
    def long_answer_tokens(self) -> int: ...
    @property
    def text_block_len(self) -> int: ...

    def refusal(self, task: str) -> str:
        """Returns why the model cannot do a task; "" if it can."""
        ...

    def check_task(self, task: str) -> None:
        """Checks that the model can do a task.

        Raises:
            RequestError: it cannot.
        """
        if refusal := self.refusal(task):
            raise RequestError(refusal)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The words that training held; None if they are not recorded."""
        ...

    def read(self, task: str, text: str, seed: int) -> Reading:
        """Returns what the model is given for a user's words.

        Args:
            task: a key of `requests.TASKS`.
            seed: chooses what the words leave open, if training left nothing open.
        """
        return self.as_written(text)

    def as_written(self, text: str) -> Reading:
        """Returns a text with the case of its words as in the training texts."""
        return self.vocabulary.reading(text) if self.vocabulary else Reading(text)

    def lays_out(self, task: str) -> bool:
        """Returns whether an image of this task can be laid out in text first."""
        ...

    # Images.

    def canvas(self, image: Pixels, side: int) -> UInt8[np.ndarray, "side side 3"]:
        """Returns an image at the size that the model draws."""
        ...

    def on_canvas(self, mask: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, "_h _w"]:
        """Converts a mask over an image to one over its canvas."""
        ...

    def erased(self, canvas: Pixels, mask: Grid) -> Pixels:
        """Returns a canvas without the part to be drawn, as it is shown to the model."""
        ...

    def fill_words(self, task: str, prompt: str, mask: Grid) -> str:
        """Returns the words that ask to inpaint or outpaint the cells of a mask."""
        ...

    def draw(
        self,
        prompt: str,
        codes: Int[np.ndarray, "l g"],
        *,
        layout: str | None = None,
        attempts: Sequence[tuple[Pixels, str]] = (),
        grid: tuple[int, int] | None = None,
    ) -> Example:
        """Returns an example that draws an image, given earlier attempts and their faults.

        Args:
            grid: rows and columns of its cells; by default a square.
        """
        ...

    def change(
        self,
        instruction: str,
        codes: Int[np.ndarray, "l g"],
        image: Pixels,
        known: Grid | None,
        layout: str | None = None,
    ) -> Example:
        """Returns an example that edits an image, or draws the unknown part of it.

        Args:
            known: which cells are known; None for an edit, which may change all of them.
        """
        ...

    # Text.

    def layout(self, prompt: str, image: Pixels | None = None) -> Example:
        """Returns an example that states the layout of an image, or an edit of one."""
        ...

    def ask(
        self,
        question: str,
        shown: Sequence[Pixels],
        tokens: int,
        earlier: Sequence[tuple[str, str]] = (),
    ) -> Example:
        """Returns an example that answers a question.

        Args:
            tokens: of the answer, rounded up to whole text blocks.
            earlier: previous questions and answers; images come before all of them.

        Raises:
            RequestError: the prompt is too long, or there are too many images.
        """
        ...

    def complete(self, words: str, template: Template, shown: Sequence[Pixels]) -> Example:
        """Returns an example that fills the gaps of a template."""
        ...

    def judge(self, prompt: str, image: Pixels) -> Example:
        """Returns an example that judges whether an image shows what was requested."""
        ...

    def accepts(self, verdict: str) -> bool:
        """Returns whether a verdict says that the image is right."""
        ...

    def correction(self, verdict: str) -> str | None:
        """Returns an edit that corrects the first fault of a verdict; None if there is none."""
        ...

    def template_ids(
        self, template: Template
    ) -> tuple[Int[np.ndarray, " l"], Bool[np.ndarray, " l"]]:
        """Returns the ids of a template, with placeholders in its gaps, and which are known."""
        ...

    def ends(self) -> set[int]:
        """Returns the ids that end a text."""
        ...

    def text(self, ids: Int[np.ndarray, "_l 1"]) -> str:
        """Returns the text of a response, up to its first end."""
        said, ends = ids[:, 0].tolist(), self.ends()
        end = next((i for i, x in enumerate(said) if x in ends), len(said))
        return self.tokenizer.decode(said[:end])

    def answer(self, ids: Int[np.ndarray, "_l 1"]) -> str:
        """Returns the text of an answer: boxes as words, and no location tokens."""
        return _LOCATIONS.sub(lambda run: self._place(run[0]), self.text(ids)).strip()

    def _place(self, tokens: str) -> str:
        """Returns where the centre of a box is, such as " at the top left"; "" if it is no box."""
        edges = [int(edge) for edge in _EDGE.findall(tokens)]
        if len(edges) != 4 or not (edges[0] < edges[2] and edges[1] < edges[3]):
            return ""
        x1, y1, x2, y2 = (min(edge / self.frame, 1) for edge in edges)
        row = ROWS[min(int((y1 + y2) / 2 * 3), 2)]
        column = COLUMNS[min(int((x1 + x2) / 2 * 3), 2)]
        return f" at the {f'{row} {column}'.strip() or 'centre'}"

    def completed(self, template: Template, ids: Int[np.ndarray, "_l 1"]) -> str:
        """Returns a template with its gaps filled from a response."""
        return self.tokenizer.decode(ids[: len(self.template_ids(template)[0]), 0].tolist())

    # Boxes.

    @property
    def frame(self) -> int:
        """The largest coordinate of location tokens: an image's right and bottom edge."""
        ...

    def locate(self, phrases: Sequence[str], image: Pixels) -> list[Example]:
        """Returns examples that locate things in an image."""
        ...

    def locate_one(self, phrase: str, image: Pixels) -> Example:
        """Returns an example that locates one thing."""
        ...

    def boxes(
        self,
        phrases: Sequence[str],
        responses: Sequence[Int[np.ndarray, "_l 1"]],
        size: tuple[int, int],
    ) -> list[Box | None]:
        """Returns the boxes found, in pixels of an image of `size` (width, height)."""
        ...


# By `config.Config.prompts`: the module of a language, loaded when it is first used, and its class.
LANGUAGES = {
    "scenes": ("sparse_lavida_jax.scenes.prompts", "ScenePrompts"),
    "art": ("sparse_lavida_jax.art.prompts", "ArtPrompts"),
    "chat": ("sparse_lavida_jax.lavida_o.prompts", "ChatPrompts"),
}


def language(name: str) -> Any:
    """Returns the class of a model's prompts, a `PromptLanguage`, by its name in `LANGUAGES`."""
    module, kind = LANGUAGES[name]
    return getattr(importlib.import_module(module), kind)
