# SPDX-License-Identifier: Apache-2.0
"""The prompts of every task for a model of the small world: words, and sequences of tokens.

The sequence of a text response is `<|user|> [image] prompt <|eot|> <|assistant|> response`, that
of an image response `<|user|> [image, source cells] prompt <|eot|> <|assistant|> [layout]
response <|eot|>`: the form of the base model (spec Sec. 5), with one token in place of a header.
An `ExampleMaker` makes them, for training too; `ScenePrompts` turns requests into them.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data import released_objective
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.images import resize
from sparse_lavida_jax.prompting.gaps import Template, template_ids
from sparse_lavida_jax.prompting.protocol import Box, Grid, Pixels, PromptFormat
from sparse_lavida_jax.prompting.request_errors import RequestError, too_long
from sparse_lavida_jax.prompting.vocabulary import Reading, Vocabulary
from sparse_lavida_jax.scenes import rules, sentences, tasks, vocabulary, world
from sparse_lavida_jax.scenes.grammar import (
    STRIPS,
    GrammarError,
    Layout,
    Phrase,
    box_text,
    parse_box,
)
from sparse_lavida_jax.scenes.tasks import (
    caption,
    constrained_caption,
    detect,
    infill,
    locate,
    name,
)
from sparse_lavida_jax.scenes.tokenizer import Tokenizer
from sparse_lavida_jax.sequence import LearnedText, Part, Response, Source, Text, VisionTokens

ASKED_ALIKE = {"ask": "point"}  # another task with the same request
ANSWER_TOKENS = 16  # of a short answer
ONE_BOX_TOKENS = 8

_BOX = re.compile(r"<LOC_(\d{1,9})>" * 4)
_NAME = re.compile(r"[a-z]")  # in a layout, whose boxes are in capitals
_FAULT = re.compile(
    r"^an? (?P<wrong>[a-z0-9 -]+?) should be (?P<right>an? [a-z0-9 -]+)$"
    r"|^(?P<missing>an? [a-z0-9 -]+) is missing$|^an? (?P<extra>[a-z0-9 -]+) is too many$"
)


@runtime_checkable
class Codec(Protocol):
    """The part of an image tokenizer that is used here (`models.image_codec.ImageCodec`)."""

    def encode(self, pixels: UInt8[np.ndarray, "b h w 3"]) -> Int[np.ndarray, "b l g"]:
        """Returns the cells of images."""
        ...


def encoder_of(tokenizer: Tokenizer, settings: config.Config, codec: Codec) -> "ExampleMaker":
    """Returns the encoder of a model with this image tokenizer."""
    return ExampleMaker(tokenizer, settings.data, settings.model, appearance_codes(codec))


def appearance_codes(codec: Codec) -> Int[np.ndarray, "a g"]:
    """Returns the codes of every cell appearance of the scenes."""
    # The codes of an object do not depend on its place; this is one of them.
    grids = np.zeros((world.NUM_APPEARANCES + 1, world.GRID, world.GRID), int)
    grids[:, 2, 3] = np.arange(world.NUM_APPEARANCES + 1)
    cells = codec.encode(np.stack([world.render(grid) for grid in grids]))
    return cells[:, 2 * world.GRID + 3].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class ExampleMaker:
    """Turns samples of a task into examples.

    Attributes:
        tokenizer: of the text.
        appearance_codes: codes [49 g] of an empty cell and of every appearance in a scene, from the
            image tokenizer, or a function that returns them; None if no scene is drawn.
    """

    tokenizer: Tokenizer
    data: config.Data
    model: config.Model
    appearance_codes: Int[np.ndarray, "a g"] | Callable[[], Int[np.ndarray, "a g"]] | None
    cell_steps: ClassVar[int] = STRIPS  # places of boxes in a cell

    def seen(self, scene: world.Scene) -> UInt8[np.ndarray, "h w 3"]:
        """Returns the image of a scene at the input size of the vision tower."""
        shown = world.EMPTY_SCENE if self.data.blind else scene
        return world.render(shown, self.model.vision.image_size)

    def scene_codes(self, scene: world.Scene) -> Int[np.ndarray, "l g"]:
        """Returns the codes of an image of `scene`, cell by cell."""
        codes = self.appearance_codes
        assert codes is not None
        return (codes() if callable(codes) else codes)[scene.appearances]

    def kept(self, sample: tasks.Sample) -> Bool[np.ndarray, " l"] | None:
        """Returns the cells that an edit leaves as they are."""
        assert sample.image is not None and sample.target is not None
        return sample.image.appearances == sample.target.appearances

    def text_example(
        self,
        prompt: str,
        answer: str = "",
        *,
        image: UInt8[np.ndarray, "h w 3"] | None = None,
        given_spans: tuple[tuple[int, int], ...] = (),
        length: int | None = None,
        extra_blocks: int = 0,
    ) -> Example:
        """Returns an example with a text response, padded with end-of-text to whole text blocks.

        Args:
            given_spans: character spans of `answer` that are known beforehand.
            length: tokens of the response; by default as many as the answer needs.
            extra_blocks: further text blocks of padding.
        """
        ids, offsets = self.tokenizer.encode(answer), []
        if given_spans:
            ids, offsets = self.tokenizer.encode_with_offsets(answer)
        block = self.data.text_block_len
        reach = (len(ids) // block + 1) * block  # at least one end-of-text
        if length is None:
            length = min(reach + extra_blocks * block, max(reach, self.data.max_answer_len))
        response = np.empty((length, 1), np.int32)
        response[:] = self.tokenizer.end_of_text_id
        response[: len(ids), 0] = ids[:length]
        given = np.zeros(length, bool)
        if given_spans:
            given_to = [0] * len(answer)  # the end of the longest span at each character
            for first, end in sorted(given_spans, key=lambda span: span[1]):
                given_to[first:end] = [end] * (end - first)
            given[: len(ids)] = [stop <= given_to[start] for start, stop in offsets[:length]]
        parts = (*self._user(prompt, image, None), Response(length))
        return Example(parts, response, given, "text", image, min(reach, length))

    def image_example(
        self,
        prompt: str,
        codes: Int[np.ndarray, "l g"],
        *,
        layout: str | None = None,
        image: UInt8[np.ndarray, "h w 3"] | None = None,
        source: Int[np.ndarray, "l g"] | None = None,
        given: Bool[np.ndarray, "*grid"] | None = None,
    ) -> Example:
        """Returns an example with an image response of `codes`.

        Args:
            given: cells that are known beforehand, as a grid or in raster order.
        """
        stated = () if layout is None else (self._text(self.tokenizer.encode(layout)),)
        parts = (
            *self._user(prompt, image, source),
            *stated,
            Response(len(codes)),
            self._headers[3],
        )
        given = np.zeros(len(codes), bool) if given is None else given.reshape(-1)
        response = np.asarray(codes, np.int32)
        first = first_cells(layout or "", self.model.grid_size, self.cell_steps)
        return Example(parts, response, given, "image", image, len(codes), first=first)

    def continued(
        self, example: Example, question: str, earlier: Sequence[tuple[str, str]]
    ) -> Example:
        """Puts an example of a question at the end of a conversation, which starts with its image.

        Answers end like prompts: no model was trained on several turns.
        """
        ended, parts, image = self._headers[3], [], example.pixels
        for asked, answer in earlier:
            parts += self._user(asked, image, None)
            parts += [self._text(self.tokenizer.encode(answer)), ended]
            image = None
        parts += [*self._user(question, image, None), example.parts[-1]]
        return dataclasses.replace(example, parts=tuple(parts))

    def _text(self, ids: list[int], keep: bool = False) -> Text:
        return Text(np.asarray(ids, np.int32), keep)

    def _user(self, prompt: str, image, source) -> tuple[Part, ...]:
        user, vision, turn, _ = self._headers
        seen = () if image is None else (vision,)
        cells = () if source is None else (Source(np.asarray(source, np.int32)),)
        return (user, *seen, *cells, self._text(self.tokenizer.encode(prompt)), turn)

    @functools.cached_property
    def _headers(self) -> tuple[Text, VisionTokens, Text, Text]:
        """The start of every prompt, the part for an image in it, its end, and that of a turn."""
        t = self.tokenizer
        return (
            self._text([t.user_id], keep=True),
            VisionTokens(self.model.vision.num_tokens),
            self._text([t.end_of_turn_id, t.assistant_id], keep=True),
            self._text([t.end_of_turn_id], keep=True),
        )

    def sequence(self, example: Example) -> released_objective.Sequence:
        """Returns an example as LaViDa-O trains on it (spec Sec. 9.1), without padding.

        Everything after the assistant token is the answer, including a layout and the end of the
        turn; if the prompt is dropped, all of it is, with its headers. Given text is neither
        masked nor predicted; given cells of an image are treated like all others.
        """
        parts, answers = [], False
        for part in example.parts:
            if isinstance(part, Text):
                parts.append(LearnedText(part.ids) if answers else Text(part.ids))
                answers = answers or self.tokenizer.assistant_id in part.ids
            elif isinstance(part, Response) and example.modality == "text":
                parts += [*_answer(example), Response(0)]
            else:
                parts.append(part)
        no_codes = np.zeros((0, self.model.codes_per_token), np.int32)
        codes = example.response if example.modality == "image" else no_codes
        return released_objective.Sequence(tuple(parts), codes, views=example.shown)

    def scene_example(
        self,
        sample: tasks.Sample,
        *,
        extra_blocks: int = 0,
        with_layout: bool = True,
        keeps: bool = False,
    ) -> Example:
        """Returns the training example of a task on scenes.

        Args:
            keeps: whether the cells that the layout of an edit does not name are given.
        """
        image = None if sample.image is None else self.seen(sample.image)
        if sample.target is None:
            assert sample.answer is not None
            return self.text_example(
                sample.prompt,
                sample.answer,
                image=image,
                given_spans=sample.given,
                extra_blocks=extra_blocks,
            )
        given = sample.known_grid
        if keeps and sample.image:  # a layout names the cells that change
            given = self.kept(sample)
        return self.image_example(
            sample.prompt,
            self.scene_codes(sample.target),
            layout=sample.layout if with_layout else None,
            image=image,
            source=None if sample.image is None else self.scene_codes(sample.image),
            given=given,
        )


def first_cells(layout: str, side: int, steps: int) -> tuple[int, ...]:
    """Returns the middle cell of each thing of a layout, and the first cell of no thing.

    Args:
        side: cells per side of the image.
        steps: places of boxes in a cell.
    """
    found, is_free = list[int](), np.ones((side, side), bool)
    for edges in _BOX.findall(layout):
        x1, y1, x2, y2 = (min(int(edge), side * steps) for edge in edges)
        is_free[y1 // steps : -(-y2 // steps), x1 // steps : -(-x2 // steps)] = False
        row, column = (min((a + b) // (2 * steps), side - 1) for a, b in ((y1, y2), (x1, x2)))
        found.append(row * side + column)
    if found and is_free.any():
        found.append(int(is_free.argmax()))
    return tuple(dict.fromkeys(found))


def _answer(example: Example) -> list[Part]:
    """Splits a text response into runs of given and not given tokens."""
    edges = np.flatnonzero(np.diff(example.given)) + 1
    runs = zip(np.split(example.response[:, 0], edges), np.split(example.given, edges), strict=True)
    return [Text(ids, keep=True) if given.all() else LearnedText(ids) for ids, given in runs]


@dataclasses.dataclass(frozen=True)
class ScenePrompts(PromptFormat):
    """The prompts of the small world.

    Attributes:
        encoder: turns words, images and codes into examples.
    """

    encoder: ExampleMaker
    tokenizer_type = Tokenizer
    describe = caption.PROMPT
    describe_in = constrained_caption.PROMPT
    fill_in = infill.PROMPT
    answer_tokens = ANSWER_TOKENS
    locates_in_one_step = False
    world = "scenes"
    example = "a red circle above a blue square"

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: config.Config, codec: Codec) -> "ScenePrompts":
        # Requests do not need the codes of appearances, and they take as long as an image.
        codes = functools.cache(lambda: appearance_codes(codec))
        return cls(ExampleMaker(tokenizer, settings.data, settings.model, codes))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.encoder.tokenizer

    @property
    def usual_words(self) -> int:
        return sentences.MOST_TOKENS if self._is_read else PromptFormat.usual_words

    @property
    def _is_read(self) -> bool:
        """Whether users' words become sentences that are taught; other data has other words."""
        return self.encoder.data.source == self.world

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self.taught(self.encoder.data)

    @classmethod
    def taught(cls, data: config.Data) -> Vocabulary | None:
        return vocabulary.of_source(data.source)

    def read(self, task: str, text: str, seed: int) -> Reading:
        short = self._is_read and len(text) <= sentences.LONGEST
        return (short and self._reader(task, text, seed)) or super().read(task, text, seed)

    def _reader(self, task: str, text: str, seed: int) -> Reading | None:
        return sentences.read(task, text, seed)

    def refusal(self, task: str) -> str:
        trained = self.encoder.data.tasks
        if {tasks.COMMANDS.get(task, task), ASKED_ALIKE.get(task)} & {*trained}:
            return ""
        return f"this checkpoint was not trained to {task}: it was trained on {', '.join(trained)}."

    def lays_out(self, task: str) -> bool:
        wanted = {"generate": "layout", "edit": "edit_layout"}.get(task, "fill_layout")
        return wanted in self.encoder.data.tasks

    @property
    def longest(self) -> int:
        return self.encoder.data.max_prompt_len + self._longest_layout

    @property
    def _longest_layout(self) -> int:
        return max(self.encoder.data.max_prompt_len, self.long_answer_tokens)

    @property
    def long_answer_tokens(self) -> int:
        return self.encoder.data.max_answer_len

    @property
    def text_block_len(self) -> int:
        return self.encoder.data.text_block_len

    # Images.

    def codec_image(self, image: Pixels, side: int) -> UInt8[np.ndarray, "side side 3"]:
        return resize(image, (side, side))

    def codec_mask(self, mask: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, "_h _w"]:
        return mask

    def erased(self, image: Pixels, mask: Grid) -> Pixels:
        """Returns an image whose masked cells are empty."""
        sides = image.shape[0] // mask.shape[0], image.shape[1] // mask.shape[1]
        pixels = mask.repeat(sides[0], axis=0).repeat(sides[1], axis=1)
        return np.where(pixels[..., None], np.array(world.BACKGROUND, np.uint8), image)

    def draw(
        self,
        prompt: str,
        codes: Int[np.ndarray, "l g"],
        *,
        layout: str | None = None,
        attempts: Sequence[tuple[Pixels, str]] = (),
        grid: tuple[int, int] | None = None,
    ) -> Example:
        """Returns an example that draws an image; `attempts` and `grid` are not supported."""
        self._check_layout(layout)
        return self._fits(prompt, self.encoder.image_example(prompt, codes, layout=layout))

    def fill_words(self, task: str, prompt: str, mask: Grid) -> str:
        """Returns words that ask to inpaint (the mask) or outpaint (the rectangle of the image)."""
        word, cells = ("fill", mask) if task == "inpaint" else ("extend", ~mask)
        steps = self.frame // len(mask)  # of a cell
        rows, columns = (steps * at for at in np.nonzero(cells))
        ends = rows.max() + steps, columns.max() + steps
        box = box_text((int(columns.min()), int(rows.min()), int(ends[1]), int(ends[0])))
        # The prompts of the small world already contain it.
        return prompt if prompt.endswith(f"{word}{box}") else f"{prompt}, {word}{box}"

    def change(
        self,
        instruction: str,
        codes: Int[np.ndarray, "l g"],
        image: Pixels,
        mask: Grid | None,
        layout: str | None = None,
    ) -> Example:
        self._check_layout(layout)
        given = None if mask is None else ~mask
        if given is None and layout is not None and self.encoder.data.edit_keeps:
            given = self.kept_cells(layout)
        example = self.encoder.image_example(
            instruction, codes, layout=layout, image=self._seen(image), source=codes, given=given
        )
        return self._fits(instruction, example)

    def kept_cells(self, layout: str) -> Bool[np.ndarray, " l"] | None:
        """Returns the cells that the layout of an edit does not name; None: it is not a layout."""
        try:
            named = Layout.parse(layout.strip()).appearances
        except GrammarError:
            return None
        return np.array([cell not in named for cell in range(world.NUM_CELLS)])

    # Text.

    def layout(
        self, prompt: str, image: Pixels | None = None, template: Template | None = None
    ) -> Example:
        shown = () if image is None else (image,)
        if template is not None:
            return self.complete(prompt, template, shown)
        return self.ask(prompt, shown, self.long_answer_tokens)

    def layout_question(self, template: Template) -> str:
        held = "".join(piece for piece in template if isinstance(piece, str))
        names, boxes = bool(_NAME.search(held)), "<LOC_" in held
        task = "detect" if names == boxes else "locate" if names else "name"
        self.check_task(task)
        return {"detect": detect.PROMPT, "locate": locate.PROMPT, "name": name.PROMPT}[task]

    def cell_codes(self, name: str) -> Int[np.ndarray, " g"] | None:
        try:
            index = world.EMPTY if name == "nothing" else Phrase.parse(name).thing().index
        except GrammarError:
            return None
        codes = self.encoder.appearance_codes
        return None if codes is None else (codes() if callable(codes) else codes)[index]

    def ask(
        self,
        question: str,
        shown: Sequence[Pixels],
        tokens: int,
        earlier: Sequence[tuple[str, str]] = (),
    ) -> Example:
        if len(shown) > 1:
            raise RequestError(f"this checkpoint looks at one image, it was given {len(shown)}.")
        block = self.text_block_len
        example = self.encoder.text_example(
            question,
            image=self._seen(shown[0]) if shown else None,
            length=-(-tokens // block) * block,
        )
        if earlier:
            example = self.encoder.continued(example, question, earlier)
        said = " ".join([*itertools.chain(*earlier), question])
        return self._fits(said, example)

    def judge(self, prompt: str, image: Pixels) -> Example:
        """Returns an example that judges whether an image shows what was requested."""
        return self.ask(f"check: {prompt}", (image,), self.answer_tokens)

    def accepts(self, verdict: str) -> bool:
        return verdict.strip() == rules.CORRECT

    def correction(self, verdict: str) -> str | None:
        match = _FAULT.match(verdict.strip().partition(",")[0])
        if match is None or "edit" not in self.encoder.data.tasks:
            return None
        if match["wrong"]:
            return self.replacement(match["wrong"], match["right"])
        return f"add {match['missing']}" if match["missing"] else f"remove the {match['extra']}"

    def replacement(self, wrong: str, right: str) -> str:
        """Returns the instruction to make a thing what it should be: "a red circle"."""
        return f"replace the {wrong} with {right}"

    def ends(self) -> set[int]:
        return {self.tokenizer.end_of_text_id}

    def template_ids(
        self, template: Template
    ) -> tuple[Int[np.ndarray, " l"], Bool[np.ndarray, " l"]]:
        return template_ids(template, self.tokenizer.encode, self.tokenizer.end_of_text_id)

    def complete(self, words: str, template: Template, shown: Sequence[Pixels]) -> Example:
        ids, known = self.template_ids(template)
        most = self.long_answer_tokens
        if len(ids) > most:
            raise RequestError(f"the text with its gaps is {len(ids)} tokens long: at most {most}.")
        empty = self.ask(words, shown, len(ids) + 1)
        response, given = empty.response.copy(), np.zeros(len(empty.response), bool)
        response[: len(ids), 0], given[: len(ids)] = ids, known
        return dataclasses.replace(empty, response=response, given=given)

    # Boxes.

    @property
    def frame(self) -> int:
        return len(self.tokenizer.location_ids) - 1

    def locate_one(self, phrase: str, image: Pixels) -> Example:
        (example,) = self.locate([phrase], image)
        return example

    def locate(self, phrases: Sequence[str], image: Pixels) -> list[Example]:
        """Returns examples that locate things: one row per phrase, all decoded together."""
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
        return [_box(self.text(ids), size, self.frame) for ids in responses]

    # Helpers.

    def _seen(self, image: Pixels) -> UInt8[np.ndarray, "side side 3"]:
        if self.encoder.data.blind:
            return self.encoder.seen(world.EMPTY_SCENE)
        side = self.encoder.model.vision.image_size
        return resize(image, (side, side))

    def _check_layout(self, layout: str | None) -> None:
        used = len(self.tokenizer.encode(layout or ""))
        if used > (most := self._longest_layout):
            raise too_long(layout or "", used, most, "layout")

    def _fits(self, prompt: str, example: Example) -> Example:
        """Checks the length of the user's prompt, including the image."""
        seen = self.encoder.model.vision.num_tokens if example.pixels is not None else 0
        used = len(self.tokenizer.encode(prompt)) + seen
        if used > (most := self.encoder.data.max_prompt_len):
            raise too_long(prompt, used, most)
        return example


def _box(text: str, size: tuple[int, int], frame: int) -> Box | None:
    try:
        edges = parse_box(text.strip(), frame)
    except GrammarError:
        return None
    x1, y1, x2, y2 = (edge * size[i % 2] / frame for i, edge in enumerate(edges))
    return x1, y1, x2, y2
