# SPDX-License-Identifier: Apache-2.0
"""How every task is put to a model of the small world, in the words it was trained on."""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt8

from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.images import resize
from sparse_lavida_jax.data.templates import (
    Box,
    Grid,
    Pixels,
    PromptLanguage,
    RequestError,
    Template,
    template_ids,
    too_long,
)
from sparse_lavida_jax.scenes import rules, tasks, world
from sparse_lavida_jax.scenes.encoder import Encoder
from sparse_lavida_jax.scenes.grammar import LOCATIONS, GrammarError, box_text, cells_box, parse_box

ASKED_ALIKE = {"generate": "digit", "ask": "point"}  # another task that is asked for like this
ANSWER_TOKENS = 16  # of a short answer
ONE_BOX_TOKENS = 8

_FAULT = re.compile(
    r"^a (?P<wrong>[a-z ]+?) should be a (?P<right>[a-z ]+)$"
    r"|^a (?P<missing>[a-z ]+) is missing$|^a (?P<extra>[a-z ]+) is too many$"
)


@dataclasses.dataclass(frozen=True)
class ScenePrompts(PromptLanguage):
    """The prompts of the small world, and of digits.

    Attributes:
        encoder: turns words, images and codes into examples.
        describe: what asks for a caption.
        describe_in: what asks for a caption of which words are given.
        fill_in: what asks to fill the gaps of a text.
        answer_tokens, long_answer_tokens: of a short answer, and of a long one such as a caption.
        text_block_len: tokens of a text block.
        locates_in_one_step: whether all boxes take one step, as released.
    """

    encoder: Encoder
    describe = "describe the picture"
    describe_in = "describe the picture in these words"
    fill_in = "fill in the text"
    answer_tokens = ANSWER_TOKENS
    locates_in_one_step = False

    def refusal(self, task: str) -> str:
        """Returns why the model cannot do a task; "" if it can."""
        trained = self.encoder.data.tasks
        if {tasks.COMMANDS.get(task, task), ASKED_ALIKE.get(task)} & {*trained}:
            return ""
        return f"this checkpoint was not trained to {task}: it was trained on {', '.join(trained)}."

    def lays_out(self, task: str) -> bool:
        """Whether an image of this task can be laid out in text first."""
        wanted = {"generate": "plan", "edit": "edit_plan"}.get(task, "fill_plan")
        return wanted in self.encoder.data.tasks

    @property
    def long_answer_tokens(self) -> int:
        return self.encoder.data.max_answer_len

    @property
    def text_block_len(self) -> int:
        return self.encoder.data.text_block_len

    # Images.

    def canvas(self, image: Pixels, side: int) -> UInt8[np.ndarray, "side side 3"]:
        """Returns an image at the size of those the model draws."""
        return resize(image, (side, side))

    def on_canvas(self, mask: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, "_h _w"]:
        """Returns a mask over an image as a mask over its canvas."""
        return mask

    def erased(self, canvas: Pixels, known: Grid) -> Pixels:
        """Returns a canvas with the cells that are not known left empty."""
        sides = canvas.shape[0] // known.shape[0], canvas.shape[1] // known.shape[1]
        keep = known.repeat(sides[0], axis=0).repeat(sides[1], axis=1)
        return np.where(keep[..., None], canvas, np.array(world.BACKGROUND, np.uint8))

    def draw(
        self,
        prompt: str,
        codes: Int[np.ndarray, "l g"],
        *,
        plan: str | None = None,
        attempts: Sequence[tuple[Pixels, str]] = (),
    ) -> Example:
        """Returns what draws an image; there are no words here for earlier `attempts`."""
        return self._fits(prompt, self.encoder.image_example(prompt, codes, plan=plan))

    def fill_words(self, task: str, prompt: str, known: Grid) -> str:
        """Returns what asks to inpaint (the hole) or outpaint (the known rectangle) an image."""
        word, cells = ("fill", ~known) if task == "inpaint" else ("extend", known)
        rows, columns = np.nonzero(cells)
        corners = ((rows.min(), columns.min()), (rows.max(), columns.max()))
        box = box_text(cells_box(*(int(y * known.shape[1] + x) for y, x in corners)))
        # The prompts of the world itself say it already.
        return prompt if prompt.endswith(f"{word}{box}") else f"{prompt}, {word}{box}"

    def change(
        self,
        instruction: str,
        codes: Int[np.ndarray, "l g"],
        image: Pixels,
        known: Grid | None,
        plan: str | None = None,
    ) -> Example:
        """Returns what edits an image of these codes as told, or draws what is not known of it.

        Args:
            known: which cells are known; None for an edit, which may change them all.
        """
        example = self.encoder.image_example(
            instruction, codes, plan=plan, image=self._seen(image), source=codes, given=known
        )
        return self._fits(instruction, example)

    # Text.

    def plan(self, prompt: str, image: Pixels | None = None) -> Example:
        """Returns what lays out an image, or the change of one."""
        return self.ask(prompt, () if image is None else (image,), self.long_answer_tokens)

    def ask(self, question: str, images: Sequence[Pixels], tokens: int) -> Example:
        """Returns what answers a question in so many tokens, rounded up to whole text blocks.

        Raises:
            RequestError: several images, or a prompt that is too long.
        """
        if len(images) > 1:
            raise RequestError(f"this checkpoint looks at one image, it was given {len(images)}.")
        block = self.text_block_len
        example = self.encoder.text_example(
            question,
            image=self._seen(images[0]) if images else None,
            length=-(-tokens // block) * block,
        )
        return self._fits(question, example)

    def judge(self, prompt: str, image: Pixels) -> Example:
        """Returns what says whether an image is what was asked for."""
        return self.ask(f"check: {prompt}", (image,), self.answer_tokens)

    def accepts(self, verdict: str) -> bool:
        """Whether a verdict says that the image is right."""
        return verdict.strip() == rules.CORRECT

    def correction(self, verdict: str) -> str | None:
        """Returns the edit that mends the first fault of a verdict; None if none does."""
        match = _FAULT.match(verdict.strip().partition(",")[0])
        if match is None or "edit" not in self.encoder.data.tasks:
            return None
        if match["wrong"]:
            return f"replace the {match['wrong']} with a {match['right']}"
        return f"add a {match['missing']}" if match["missing"] else f"remove the {match['extra']}"

    def ends(self) -> set[int]:
        return {self.encoder.tokenizer.end_of_text_id}

    def decode(self, ids: list[int]) -> str:
        return self.encoder.tokenizer.decode(ids)

    def template_ids(
        self, template: Template
    ) -> tuple[Int[np.ndarray, " l"], Bool[np.ndarray, " l"]]:
        tokenizer = self.encoder.tokenizer
        return template_ids(template, tokenizer.encode, tokenizer.end_of_text_id)

    def complete(self, words: str, template: Template, shown: Sequence[Pixels]) -> Example:
        """Returns what fills the gaps of a template."""
        ids, known = self.template_ids(template)
        most = self.long_answer_tokens
        if len(ids) > most:
            raise RequestError(f"the text with its gaps is {len(ids)} tokens long: at most {most}.")
        empty = self.ask(words, shown, len(ids) + 1)
        response, given = empty.response.copy(), np.zeros(len(empty.response), bool)
        response[: len(ids), 0], given[: len(ids)] = ids, known
        return dataclasses.replace(empty, response=response, given=given)

    # Boxes.

    def locate_one(self, phrase: str, image: Pixels) -> Example:
        """Returns what finds one thing."""
        (example,) = self.locate([phrase], image)
        return example

    def locate(self, phrases: Sequence[str], image: Pixels) -> list[Example]:
        """Returns what finds things in an image: a row a phrase, all decoded together."""
        return [
            self.ask(f"where is the {named}?", (image,), ONE_BOX_TOKENS)
            for named in (p.strip().removeprefix("the ").removeprefix("a ") for p in phrases)
        ]

    def boxes(
        self,
        phrases: Sequence[str],
        responses: Sequence[Int[np.ndarray, "_l 1"]],
        size: tuple[int, int],
    ) -> list[Box | None]:
        """Returns what was found, in pixels of an image of `size` (width, height)."""
        return [_box(self.text(ids), size) for ids in responses]

    # Helpers.

    def _seen(self, image: Pixels) -> UInt8[np.ndarray, "side side 3"]:
        side = self.encoder.model.vision.image_size
        return resize(image, (side, side))

    def _fits(self, prompt: str, example: Example) -> Example:
        """Checks the length of what a person says, with the image."""
        seen = self.encoder.model.vision.num_tokens if example.pixels is not None else 0
        used = len(self.encoder.tokenizer.encode(prompt)) + seen
        if used > (most := self.encoder.data.max_prompt_len):
            raise too_long(prompt, used, most)
        return example


def _box(text: str, size: tuple[int, int]) -> Box | None:
    try:
        edges = parse_box(text.strip())
    except GrammarError:
        return None
    x1, y1, x2, y2 = (edge * size[i % 2] / (LOCATIONS - 1) for i, edge in enumerate(edges))
    return x1, y1, x2, y2
