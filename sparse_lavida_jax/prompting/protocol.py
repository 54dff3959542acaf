# SPDX-License-Identifier: Apache-2.0
"""The protocol of prompt formats, and which there are."""

import importlib
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.image_files import Box, Pixels
from sparse_lavida_jax.prompting.gaps import Template
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.prompting.vocabulary import Reading, Vocabulary

Grid = Bool[np.ndarray, "y x"]

_LOCATIONS = re.compile(r"\s*(?:<LOC_\w+>)+")
_EDGE = re.compile(r"<LOC_(\d{1,9})>")
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")  # thirds of an image


@runtime_checkable
class PromptFormat(Protocol):
    """The prompts of every task: `ScenePrompts` in `scenes`, or `ChatPrompts` in `lavida_o`.

    Attributes:
        tokenizer_type, tokenizer: of the text (`prompting.tokenizer.TextTokenizer`).
        encoder: makes training examples of a small world; None for other models.
        world: the small world whose sentences are read, a `config.Data.source`; "" for others.
        example: a prompt that an image is drawn of.
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
    world: ClassVar[str] = ""
    example: ClassVar[str]
    describe: ClassVar[str]
    describe_in: ClassVar[str]
    fill_in: ClassVar[str]
    answer_tokens: ClassVar[int]
    usual_words: int = 96
    locates_in_one_step: ClassVar[bool]

    @classmethod
    def of(cls, tokenizer: Any, settings: config.Config, codec: Any) -> "PromptFormat":
        """Returns the prompts of a model, given its tokenizers.

        Args:
            codec: of images; None for a model without images.

        Raises:
            ValueError: tokenizer and model do not belong together.
        """
        ...

    @classmethod
    def taught(cls, data: config.Data) -> Vocabulary | None:
        """Returns the words of training data that this package makes; None for other data."""
        return None

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
            task: a key of `requests.TASK_SPECS`.
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

    def codec_image(self, image: Pixels, side: int) -> UInt8[np.ndarray, "side side 3"]:
        """Returns an image as input to the image tokenizer: at the size that it draws."""
        ...

    def codec_mask(self, mask: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, "_h _w"]:
        """Converts a mask over an image to one over its `codec_image`."""
        ...

    def erased(self, image: Pixels, mask: Grid) -> Pixels:
        """Returns an image without the part to be drawn, as it is shown to the model."""
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
        mask: Grid | None,
        layout: str | None = None,
    ) -> Example:
        """Returns an example that edits an image, or redraws a part of it.

        Args:
            mask: the cells to redraw; None for an edit, which may change all of them.
        """
        ...

    # Text.

    def layout(
        self, prompt: str, image: Pixels | None = None, template: Template | None = None
    ) -> Example:
        """Returns an example that states the layout of an image, or an edit of one.

        Args:
            template: the parts of the layout that are given, with gaps; None: nothing is.

        Raises:
            RequestError: the model was not taught to fill gaps of layouts, or it is too long.
        """
        ...

    def layout_question(self, template: Template) -> str:
        """Returns the question about an image that a layout with gaps answers.

        Raises:
            RequestError: the model was not taught to fill these gaps.
        """
        raise RequestError(
            "this model was not taught to fill layouts of images: `ground` finds boxes in an image."
        )

    def cell_codes(self, name: str) -> Int[np.ndarray, " g"] | None:
        """Returns the codes of a cell that shows a thing of a layout; None: they are not known."""
        return None

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


# By `config.Config.prompts`: the module of a format, loaded when it is first used, and its class.
FORMATS = {
    "scenes": ("sparse_lavida_jax.scenes.prompts", "ScenePrompts"),
    "art": ("sparse_lavida_jax.art.prompts", "ArtPrompts"),
    "chat": ("sparse_lavida_jax.lavida_o.prompts", "ChatPrompts"),
}


def prompt_format(name: str) -> Any:
    """Returns the class of a model's prompts, a `PromptFormat`, by its name in `FORMATS`."""
    module, kind = FORMATS[name]
    return getattr(importlib.import_module(module), kind)
