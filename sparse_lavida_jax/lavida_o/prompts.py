# SPDX-License-Identifier: Apache-2.0
"""The prompts of every task for a converted LaViDa-O.

Tasks that the release has use the released words of `lavida_o/chat.py`; the others are marked
"ours". Images are preprocessed by `data/images.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data import images
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.prompting.gaps import Template, template_ids
from sparse_lavida_jax.prompting.protocol import Grid, Pixels, PromptFormat
from sparse_lavida_jax.prompting.request_errors import RequestError, too_long
from sparse_lavida_jax.prompting.vocabulary import Vocabulary
from sparse_lavida_jax.sequence import Modality, Part, Response, num_tokens

ANSWER_TOKENS = 64
LONG_ANSWER_TOKENS = 256
VERDICT_TOKENS = 32  # as released
MOST_TOKENS = 8192  # per sequence, the limit of the released tokenizer
ACCEPTED = "is correct"
# Kinds of records by task (`mixture/recipe.py`); the model must have been trained on one of them.
_DRAWN, _ASKED = ("text_to_image", "layout"), ("understanding",)
LEARNED_FROM: dict[str, tuple[str, ...]] = {
    "generate": _DRAWN, "inpaint": _DRAWN, "outpaint": _DRAWN, "edit": ("edit", "edit_layout"),
    "ask": _ASKED, "reason": _ASKED, "caption": _ASKED, "constrained_caption": _ASKED,
    "infill": _ASKED, "ground": ("grounding", "dense_caption"), "reflect": ("reflection",),
}  # fmt: skip
LAID_OUT = {"generate": "layout", "edit": "edit_layout"}


@dataclasses.dataclass(frozen=True)
class ChatPrompts(PromptFormat):
    """The prompts of a converted LaViDa-O, or of LLaDA, which only handles text.

    Attributes:
        tokenizer: the one that comes with the model.
        model, data: its settings; of `data`, only the tokens of a text block.
        factor: pixels per side of one code.
    """

    tokenizer: chat.ChatTokenizer
    model: config.Model
    data: config.Data
    factor: int
    encoder = None
    example = "a cat on a red sofa"
    tokenizer_type = chat.ChatTokenizer
    describe = describe_in = "Describe the image in detail."  # ours, like the next one
    fill_in = "Complete the text."
    answer_tokens = ANSWER_TOKENS
    locates_in_one_step = True

    @classmethod
    def of(cls, tokenizer: chat.ChatTokenizer, settings: config.Config, codec: Any):
        tokenizer.check(settings.model)
        return cls(tokenizer, settings.model, settings.data, codec.factor if codec else 1)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary | None:
        return Vocabulary.read(self.tokenizer.path.parent)

    @property
    def longest(self) -> int:
        return MOST_TOKENS

    @property
    def long_answer_tokens(self) -> int:
        return LONG_ANSWER_TOKENS

    @property
    def text_block_len(self) -> int:
        return self.data.text_block_len

    def refusal(self, task: str) -> str:
        kinds = self.data.kinds
        if kinds and not {*kinds} & {*LEARNED_FROM[task]}:
            return (
                f"this checkpoint was not trained to {task}: it learned from {', '.join(kinds)}"
                f" alone, and {task} needs {' or '.join(LEARNED_FROM[task])} (docs/own_images.md)."
            )
        if not self.model.understanding_only or task in ("ask", "reason", "infill"):
            return ""
        return (
            f"this checkpoint knows neither images nor how to {task}: it can ask, reason and"
            " infill without an image."
        )

    def lays_out(self, task: str) -> bool:
        kinds = self.data.kinds
        return task in LAID_OUT and (not kinds or LAID_OUT[task] in kinds)

    # Images.

    def codec_image(self, image: Pixels, side: int) -> UInt8[np.ndarray, "side side 3"]:
        """Returns an image as input to the image tokenizer: padded with black to a square."""
        return images.source_view(image, side, self.factor)

    def codec_mask(self, mask: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, "s s"]:
        """Returns a mask centred on a square of False, as in `codec_image`."""
        height, width = mask.shape
        longest = max(height, width)
        top, left = (longest - height) // 2, (longest - width) // 2
        return np.pad(mask, ((top, longest - height - top), (left, longest - width - left)))

    def erased(self, image: Pixels, mask: Grid) -> Pixels:
        """Returns the image unchanged: the other cells show what is to be drawn."""
        return image

    def draw(
        self,
        prompt: str,
        codes: Int[np.ndarray, "l g"],
        *,
        layout: str | None = None,
        attempts: Sequence[tuple[Pixels, str]] = (),
        grid: tuple[int, int] | None = None,
    ) -> Example:
        seen = [images.see(image, self.model.vision, whole=True) for image, _ in attempts]
        said = [(s.part, said) for s, (_, said) in zip(seen, attempts, strict=True)]
        parts = self._words(
            chat.draw, prompt, len(codes), condition=self._condition(len(codes), grid),
            layout=chat.clean_layout(layout or ""), attempts=said,
        )  # fmt: skip
        return self._example(prompt, parts, seen, codes, modality="image")

    def change(
        self,
        instruction: str,
        codes: Int[np.ndarray, "l g"],
        image: Pixels,
        mask: Grid | None,
        layout: str | None = None,
    ) -> Example:
        """Returns an example that edits an image, or draws the cells of a mask (ours)."""
        if mask is not None:
            drawn, response = self.draw(instruction, codes, layout=layout), codes.astype(np.int32)
            return dataclasses.replace(drawn, response=response, given=~mask.reshape(-1))
        seen = images.see(image, self.model.vision)
        layout = chat.clean_layout(layout or "")
        parts = self._words(chat.edit, instruction, [seen.part], [codes], len(codes), layout=layout)
        return self._example(instruction, parts, [seen], codes, modality="image")

    def fill_words(self, task: str, prompt: str, mask: Grid) -> str:
        """Returns the caption of the whole image: the release has no words for this task."""
        return prompt

    # Text.

    def layout(
        self, prompt: str, image: Pixels | None = None, template: Template | None = None
    ) -> Example:
        if template is not None:
            raise RequestError("this model cannot fill gaps of layouts: give the layout whole.")
        if image is None:
            parts, seen = self._words(chat.layout_of_image, prompt, ANSWER_TOKENS), []
        else:
            seen = [images.see(image, self.model.vision)]
            parts = self._words(chat.layout_of_edit, prompt, seen[0].part, ANSWER_TOKENS)
        return self._example(prompt, parts, seen)

    def ask(
        self,
        question: str,
        shown: Sequence[Pixels],
        tokens: int,
        earlier: Sequence[tuple[str, str]] = (),
    ) -> Example:
        tokens = -(-tokens // self.text_block_len) * self.text_block_len
        several = len(shown) > 1
        seen = [images.see(image, self.model.vision, whole=several) for image in shown]
        parts = self._words(chat.ask, question, [s.part for s in seen], tokens, earlier)
        return self._example(question, parts, seen)

    def judge(self, prompt: str, image: Pixels) -> Example:
        seen = images.see(image, self.model.vision)
        parts = self._words(chat.judge, prompt, seen.part, VERDICT_TOKENS)
        return self._example(prompt, parts, [seen])

    def accepts(self, verdict: str) -> bool:
        return ACCEPTED in verdict

    def correction(self, verdict: str) -> str | None:
        """Returns None: this model draws a new image, given the faults of the previous one."""
        return None

    def ends(self) -> set[int]:
        return {self.model.end_of_text_id, self.tokenizer.id_of(chat.END_OF_TURN)}

    def template_ids(
        self, template: Template
    ) -> tuple[Int[np.ndarray, " l"], Bool[np.ndarray, " l"]]:
        first, *rest = template
        first = first.removeprefix(" ") if isinstance(first, str) else first
        pieces = (first, *rest) if first else tuple(rest)
        return template_ids(pieces, self.tokenizer.encode, self.model.text_mask_id)

    def complete(self, words: str, template: Template, shown: Sequence[Pixels]) -> Example:
        ids, given = self.template_ids(template)
        seen = [images.see(image, self.model.vision) for image in shown]
        parts = self._words(chat.ask, words, [s.part for s in seen], len(ids))
        return self._example(words, parts, seen, ids[:, None], given)

    # Boxes.

    @property
    def frame(self) -> int:
        return self.tokenizer.frame

    def locate(self, phrases: Sequence[str], image: Pixels) -> list[Example]:
        """Returns an example that locates things in an image: one sequence with all boxes."""
        seen = images.see(image, self.model.vision)
        parts, known = self._words(chat.locate_all, phrases, seen.part)
        given = known != self.model.text_mask_id
        example = self._example(" ".join(phrases), parts, [seen], known[:, None], given)
        return [dataclasses.replace(example, ends=False)]

    def locate_one(self, phrase: str, image: Pixels) -> Example:
        """Returns an example that locates one thing, as in the released RefCOCO evaluation."""
        seen = images.see(image, self.model.vision)
        parts = self._words(chat.locate, phrase, seen.part)
        return dataclasses.replace(self._example(phrase, parts, [seen]), ends=False)

    def boxes(
        self,
        phrases: Sequence[str],
        responses: Sequence[Int[np.ndarray, "_l 1"]],
        size: tuple[int, int],
    ) -> list[images.Box | None]:
        # The response extends from the first LOC token, after LOC_BEGIN, to the last.
        (ids,) = (response[:, 0] for response in responses)
        starts = [0]
        for begin in np.flatnonzero(ids == self.tokenizer.id_of(chat.LOC_BEGIN)).tolist():
            if begin >= starts[-1] + 4:  # otherwise the model said it in place of a coordinate
                starts.append(begin + 1)
        found = [self.tokenizer.box(ids[start : start + 4]) for start in starts]
        return [
            None if at is None else images.locations_to_box(at, size, self.frame)
            for at in found[: len(phrases)]
        ]

    # Helpers.

    def _condition(self, num_cells: int, grid: tuple[int, int] | None) -> str:
        if not self.data.micro_condition:
            return ""
        rows, columns = grid or (round(num_cells**0.5),) * 2
        cell = self.model.codes_side * self.factor
        return chat.micro_condition(columns * cell, rows * cell, score=7.11) + ";"

    def _words(self, make, words: str | Sequence[str], *more, **settings):
        """Calls a builder of `lavida_o/chat.py`; control tokens in the words are an error."""
        try:
            return make(self.tokenizer, words, *more, **settings)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _example(
        self,
        words: str,
        parts: tuple[Part, ...],
        seen: Sequence[images.Seen],
        response: Int[np.ndarray, "l g"] | None = None,
        given: Bool[np.ndarray, " l"] | None = None,
        modality: Modality = "text",
    ) -> Example:
        """Returns an example; `words` are the user's, for the message if it is too long."""
        if (used := sum(map(num_tokens, parts))) > MOST_TOKENS:
            raise too_long(words, used, MOST_TOKENS)
        (length,) = (part.num_tokens for part in parts if isinstance(part, Response))
        if response is None:
            response = np.full((length, 1), self.model.end_of_text_id)
        given = np.zeros(length, bool) if given is None else given
        views = tuple(one.pixels for one in seen)
        return Example(parts, response.astype(np.int32), given, modality, None, length, views)
