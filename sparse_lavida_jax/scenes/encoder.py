# SPDX-License-Identifier: Apache-2.0
"""From a task with its strings and scenes to token sequences: one example of training or sampling.

The sequence of a text response is `<|user|> [image] prompt <|eot|> <|assistant|> response`, that
of an image response `<|user|> [image, source cells] prompt <|eot|> <|assistant|> [plan]
response <|eot|>`: the form of the base model (spec Sec. 5), with one token where it has a header.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.lavida_o.objective import Sequence
from sparse_lavida_jax.scenes import digits, tasks, world
from sparse_lavida_jax.scenes.tokenizer import Tokenizer
from sparse_lavida_jax.sequence import LearnedText, Part, Response, Source, Text, VisionTokens


@runtime_checkable
class Codec(Protocol):
    """What the world needs of an image tokenizer (`models.vq.ImageCodec`)."""

    is_grey: bool

    def encode(self, pixels: UInt8[np.ndarray, "b h w 3"]) -> Int[np.ndarray, "b l g"]:
        """Returns the cells of images."""
        ...


def encoder_of(tokenizer: Tokenizer, settings: config.Config, codec: Codec) -> "Encoder":
    """Returns the encoder of a model with this image tokenizer."""
    codes = None if codec.is_grey else appearance_codes(codec)
    return Encoder(tokenizer, settings.data, settings.model, codes)


def appearance_codes(codec: Codec) -> Int[np.ndarray, "a g"]:
    """Returns the codes of every cell appearance of the scenes."""
    # Where a thing stands does not matter to its codes; this is one place.
    grids = np.zeros((world.NUM_APPEARANCES + 1, world.GRID, world.GRID), int)
    grids[:, 2, 3] = np.arange(world.NUM_APPEARANCES + 1)
    cells = codec.encode(np.stack([world.render(grid) for grid in grids]))
    return cells[:, 2 * world.GRID + 3]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Turns samples of a task into examples.

    Attributes:
        tokenizer: of the text.
        appearance_codes: codes [49 g] of an empty cell and of every appearance of a scene, as the
            image tokenizer encodes them; None for digits, whose grey levels are the codes.
    """

    tokenizer: Tokenizer
    data: config.Data
    model: config.Model
    appearance_codes: Int[np.ndarray, "a g"] | None

    def seen(self, scene: world.Scene) -> UInt8[np.ndarray, "h w 3"]:
        """Returns the image of a scene at the size of the vision tower."""
        return world.render(scene, self.model.vision.image_size)

    def scene_codes(self, scene: world.Scene) -> Int[np.ndarray, "l g"]:
        """Returns the codes of an image of `scene`: those of its cells one by one."""
        assert self.appearance_codes is not None
        return self.appearance_codes[np.asarray(scene.cells)]

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
            length: tokens of the response; by default what the answer needs.
            extra_blocks: text blocks of padding after what the answer needs.
        """
        ids, offsets = self.tokenizer.encode_with_offsets(answer)
        block = self.data.text_block_len
        reach = (len(ids) // block + 1) * block  # at least one end-of-text
        if length is None:
            length = min(reach + extra_blocks * block, max(reach, self.data.max_answer_len))
        response = np.full((length, 1), self.tokenizer.end_of_text_id, np.int32)
        response[: len(ids), 0] = ids[:length]
        given = np.zeros(length, bool)
        for i, (start, stop) in enumerate(offsets[:length]):
            given[i] = any(a <= start and stop <= b for a, b in given_spans)
        parts = (*self._user(prompt, image, None), Response(length))
        return Example(parts, response, given, "text", image, min(reach, length))

    def image_example(
        self,
        prompt: str,
        codes: Int[np.ndarray, "l g"],
        *,
        plan: str | None = None,
        image: UInt8[np.ndarray, "h w 3"] | None = None,
        source: Int[np.ndarray, "l g"] | None = None,
        given: Bool[np.ndarray, "*grid"] | None = None,
    ) -> Example:
        """Returns an example with an image response of `codes`.

        Args:
            given: cells that are known beforehand, as a grid or in raster order.
        """
        planned = () if plan is None else (self._text(self.tokenizer.encode(plan)),)
        parts = (
            *self._user(prompt, image, source),
            *planned,
            Response(len(codes)),
            self._text([self.tokenizer.end_of_turn_id], keep=True),
        )
        given = np.zeros(len(codes), bool) if given is None else given.reshape(-1)
        return Example(parts, codes.astype(np.int32), given, "image", image, len(codes))

    def _text(self, ids: list[int], keep: bool = False) -> Text:
        return Text(np.asarray(ids, np.int32), keep)

    def _user(self, prompt: str, image, source) -> tuple[Part, ...]:
        vision = () if image is None else (VisionTokens(self.model.vision.num_tokens),)
        cells = () if source is None else (Source(source.astype(np.int32)),)
        t = self.tokenizer
        return (
            self._text([t.user_id], keep=True),
            *vision,
            *cells,
            self._text(t.encode(prompt)),
            self._text([t.end_of_turn_id, t.assistant_id], keep=True),
        )

    def sequence(self, example: Example) -> Sequence:
        """Returns an example as LaViDa-O trains on it (spec Sec. 9.1), without padding.

        What follows the assistant token is the answer, a plan and the end of the turn included;
        nothing of the prompt is kept when it is dropped, not even headers. Text that is
        given is neither masked nor predicted; given cells of an image are like all others.
        """
        parts, answers = [], False
        for part in example.parts:
            if isinstance(part, Text):
                parts.append(LearnedText(part.ids) if answers else Text(part.ids))
                answers = answers or self.tokenizer.assistant_id in part.ids
            elif isinstance(part, Response) and example.kind == "text":
                parts += [*_answer(example), Response(0)]
            else:
                parts.append(part)
        no_codes = np.zeros((0, self.model.codes_per_token), np.int32)
        views = () if example.pixels is None else (example.pixels[None],)
        codes = example.response if example.kind == "image" else no_codes
        return Sequence(tuple(parts), codes, views=views)

    def scene_example(
        self, sample: tasks.Sample, *, extra_blocks: int = 0, with_plan: bool = True
    ) -> Example:
        """Returns the training example of a task on scenes."""
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
        return self.image_example(
            sample.prompt,
            self.scene_codes(sample.target),
            plan=sample.plan if with_plan else None,
            image=image,
            source=None if sample.image is None else self.scene_codes(sample.image),
            given=sample.known_grid,
        )

    def digit_example(self, sample: digits.Digit) -> Example:
        """Returns the training example of a handwritten digit."""
        return self.image_example(sample.prompt, sample.codes)


def _answer(example: Example) -> list[Part]:
    """Returns a text response in runs of tokens that are given or not."""
    edges = np.flatnonzero(np.diff(example.given)) + 1
    runs = zip(np.split(example.response[:, 0], edges), np.split(example.given, edges), strict=True)
    return [Text(ids, keep=True) if given.all() else LearnedText(ids) for ids, given in runs]
