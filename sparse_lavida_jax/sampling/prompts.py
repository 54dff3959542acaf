# SPDX-License-Identifier: Apache-2.0
"""Lays out examples as the prompts of a batch, on the host: all guidance rows, by shape."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import numpy as np
from jaxtyping import Float, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.sampling.presets import RowRequest, StepSettings
from sparse_lavida_jax.sequence import prompt_row, stack_images, stack_views, stacked_features
from sparse_lavida_jax.tags import (
    GIVEN_BLOCK,
    NO_CELL,
    NO_FEATURE,
    PROMPT_BLOCK,
    AnyArray,
    Stream,
    make_tags,
)
from sparse_lavida_jax.visibility import PAD_BLOCK

PROMPT_BUCKET = 16  # prompts are padded to a multiple of this many tokens

# What guidance drops from the second of the three rows of an edit (spec Sec. 7.6).
EDIT_DROPS: dict[str, dict[str, bool]] = {
    "source": {"drop_prompt": True},
    "source_only": {"drop_prompt": True, "drop_kept": True},  # released edit mode 0, and so on
    "no_source": {"drop_source": True},
    "no_image": {"drop_source": True, "drop_vision": True},
    "no_text": {"drop_prompt": True, "drop_kept": True, "drop_vision": False},
}


@flax.struct.dataclass
class Prompt:
    """Prompts of one shape, a row for each request and guidance row (guidance-major: r b).

    Attributes:
        understanding, generation: prompt and given tokens, with tags; None if there are none, or
            if steps do not pass them.
        pixels: the images of each request for the vision tower, or None.
        response_position: position of the first response token.
        length: L, where register positions start.
    """

    understanding: Stream | None
    generation: Stream | None
    pixels: UInt8[AnyArray, "b *n h w 3"] | Float[AnyArray, "b *n h w 3"] | None
    response_position: Int[AnyArray, " r"]
    length: Int[AnyArray, " r"]


@dataclasses.dataclass(frozen=True)
class StreamRow:
    """The part of one stream that a row passes before the first step; see `tags.Stream`."""

    tokens: Int[np.ndarray, "s *g"]
    index: Int[np.ndarray, " s"]
    position: Int[np.ndarray, " s"]
    block: Int[np.ndarray, " s"]

    def followed_by(self, tokens, index, position) -> "StreamRow":
        """Returns the row with given tokens appended."""
        given = tokens, index, position, np.full(len(tokens), GIVEN_BLOCK)
        own = self.tokens, self.index, self.position, self.block
        return StreamRow(*(np.concatenate(pair) for pair in zip(own, given, strict=True)))


class PromptTokens(NamedTuple):
    """The tokens of a request's prompt.

    Attributes:
        rows: in each guidance row, with given tokens that no step passes.
        style: of the pass that draws its style code; 0: it has none.
    """

    rows: tuple[int, ...]
    style: int = 0


@dataclasses.dataclass(frozen=True)
class SampleInput:
    """An example to be sampled, laid out once: a row of each stream for every guidance row.

    Attributes:
        request: how it is sampled.
        text, image: prompt, and given tokens unless steps pass them (`Preset.given_in_steps`).
        response_position: position of the first response token.
        length: L, where register positions start.
        style_parts: of its style code; 0: it has none.
    """

    example: Example
    request: RowRequest
    text: tuple[StreamRow, ...]
    image: tuple[StreamRow, ...]
    response_position: int
    length: int
    style_parts: int = 0

    @property
    def prompt_tokens(self) -> PromptTokens:
        """The tokens of its prompt."""
        pairs = zip(self.text, self.image, strict=True)
        rows = tuple(len(text.index) + len(image.index) for text, image in pairs)
        return PromptTokens(rows, rows[-1] + self.style_parts if self.style_parts else 0)


def sample_input(
    example: Example, request: RowRequest, model: config.Model, settings: StepSettings
) -> SampleInput:
    """Lays out an example on the host, with all guidance rows."""
    given_in_prompt = not settings.preset.given_in_steps
    known, text, image = np.flatnonzero(example.given & given_in_prompt), [], []
    for dropped in drops(settings.guidance_rows, settings.edit_guidance):
        row = prompt_row(
            example.parts,
            text_mask_id=model.text_mask_id,
            codes_per_token=model.codes_per_token,
            **dropped,
        )
        blocks = np.full(len(row.ids), PROMPT_BLOCK), np.full(len(row.cell), PROMPT_BLOCK)
        text.append(StreamRow(row.ids, row.feature, row.position, blocks[0]))
        image.append(StreamRow(row.codes, row.cell, row.source_position, blocks[1]))
        if not len(known):
            continue
        at = row.response_position + known
        if example.modality == "text":
            tokens, no_feature = example.response[known, 0], np.full(len(known), NO_FEATURE)
            text[-1] = text[-1].followed_by(tokens, no_feature, at)
        else:
            image[-1] = image[-1].followed_by(example.response[known], known, at)
    # Where the prompt shows some of an image, the style is given. Training has no smaller images.
    shows = len(image[-1].index) or example.given.any() or (text[-1].index != NO_FEATURE).any()
    is_coded = not shows and len(example.response) == model.num_cells
    layout = row.response_position, row.length, settings.style_parts if is_coded else 0
    return SampleInput(example, request, tuple(text), tuple(image), *layout)


def lengths_of(inputs: Sequence[SampleInput], least: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Returns padded lengths of the two streams that are enough for every example.

    Args:
        least: smallest ones; without source or given cells, the generation stream is empty.
    """
    text = max(len(row.index) for one in inputs for row in one.text)
    image = max(len(row.index) for one in inputs for row in one.image)
    return rounded_up(max(text, least[0])), rounded_up(max(image, least[1])) if image else 0


def padded_lengths(prompt: Prompt) -> tuple[int, int]:
    """Returns the slots of a row in each of the two streams."""
    text, image = (
        0 if stream is None else stream.index.shape[1]
        for stream in (prompt.understanding, prompt.generation)
    )
    return text, image


def batched(
    inputs: Sequence[SampleInput], model: config.Model, prompt_len: tuple[int, int] = (0, 0)
) -> Prompt:
    """Returns the prompts of a batch, all in one shape.

    Args:
        prompt_len: smallest padded lengths of the two streams, so that batches share programs.
    """
    rows = _Rows.of(inputs, model)
    return rows.prompt(range(len(rows.text)), lengths_of(inputs, prompt_len))


@dataclasses.dataclass(frozen=True)
class PromptPart:
    """Consecutive rows of a batch that are passed together, in a shape of their own.

    Attributes:
        first: index of the first row.
        prompt: of these rows.
        keeps: whether it depends only on the lengths of the request: masks and headers.
    """

    first: int
    prompt: Prompt
    keeps: bool = False


def parted(
    inputs: Sequence[SampleInput],
    model: config.Model,
    prompt_len: tuple[int, int] = (0, 0),
    *,
    keeping: bool = False,
    apart: bool = False,
) -> list[PromptPart]:
    """Returns the prompts of a batch in parts of one shape each: guidance rows differ in length.

    Args:
        prompt_len: smallest padded lengths of the two streams of the longest row.
        keeping: whether rows that requests share become parts of their own, to be kept in a
            `ContentCache`.
        apart: whether each guidance row is a part, also next to one of the same shape.
    """
    rows, shapes, b = _Rows.of(inputs, model), _guidance_shapes(inputs, prompt_len), len(inputs)

    def shape_of(number: int) -> tuple[tuple[int, int], bool, int]:
        own = range(number * b, (number + 1) * b)
        keeps = (
            keeping
            and number + 1 < len(shapes)
            and not (rows.has_vision(own) or rows.has_cells(own))
        )
        return shapes[number], keeps, apart * number

    parts = []
    for (shape, keeps, _), numbers in itertools.groupby(range(len(shapes)), shape_of):
        first, *others = numbers
        own = range(first * b, (first + len(others) + 1) * b)
        if keeps:
            parts += [
                PromptPart(row, rows.prompt(range(row, row + 1), (shape[0], 0)), True)
                for row in own
            ]
        else:
            parts.append(PromptPart(own.start, rows.prompt(own, shape)))
    return parts


def _guidance_shapes(
    inputs: Sequence[SampleInput], prompt_len: tuple[int, int]
) -> list[tuple[int, int]]:
    """Returns the padded lengths of both streams that each guidance row needs.

    A guidance row is shorter than the batch by as much as its rows are shorter than the longest row
    of their request. So its shape depends on the bucket, not on the requests in the batch.
    """
    tokens = np.array(
        [[[len(row.index) for row in rows] for rows in (one.text, one.image)] for one in inputs]
    )  # [b 2 r]
    shorter = (tokens.max(axis=2, keepdims=True) - tokens).min(axis=0)
    text, image = lengths_of(inputs, prompt_len)
    return [
        (rounded_up(text - one), rounded_up(image - other)) for one, other in shorter.T.tolist()
    ]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a batch before they are padded, guidance-major.

    Attributes:
        pixels: the images of each request.
    """

    text: Sequence[StreamRow]
    image: Sequence[StreamRow]
    pixels: AnyArray | None
    response_position: Int[np.ndarray, " r"]
    length: Int[np.ndarray, " r"]
    model: config.Model

    @classmethod
    def of(cls, inputs: Sequence[SampleInput], model: config.Model) -> "_Rows":
        pixels, views = _seen([one.example for one in inputs])
        number = len(inputs[0].text)
        text = [one.text[row] for row in range(number) for one in inputs]
        image = [one.image[row] for row in range(number) for one in inputs]
        if views is not None:
            text = [
                dataclasses.replace(row, index=_numbered(row.index, shown, pixels, model.vision))
                for row, shown in zip(text, itertools.cycle(views), strict=False)
            ]
        position = np.array([one.response_position for one in inputs] * number, np.int32)
        length = np.array([one.length for one in inputs] * number, np.int32)
        return cls(text, image, pixels, position, length, model)

    def has_vision(self, rows: range) -> bool:
        """Whether any of some rows contains an image for the vision tower."""
        return any((self.text[row].index >= 0).any() for row in rows)

    def has_cells(self, rows: range) -> bool:
        """Whether any of some rows contains cells: of a source, or given."""
        return any(len(self.image[row].index) for row in rows)

    def prompt(self, rows: range, lengths: tuple[int, int]) -> Prompt:
        """Returns consecutive rows, padded to these lengths of the two streams.

        Images are numbered by request: rows with images have to be those of all requests.
        """
        own = slice(rows.start, rows.stop)
        return Prompt(
            _stack(self.text[own], self.model.end_of_text_id, lengths[0]),
            _stack(self.image[own], self.model.image_mask_id, lengths[1]) if lengths[1] else None,
            self.pixels if self.has_vision(rows) else None,
            self.response_position[own],
            self.length[own],
        )


def rounded_up(length: int) -> int:
    """Returns the slots that a prompt of so many tokens is padded to."""
    return -(-length // PROMPT_BUCKET) * PROMPT_BUCKET


def drops(guidance_rows: int, edit_guidance: str) -> list[dict[str, bool]]:
    """What guidance drops from each of its rows (`sequence.prompt_row`)."""
    dropped = {"drop_prompt": True, "drop_source": True}
    second = [EDIT_DROPS[edit_guidance]] if guidance_rows == 3 else []
    return [dropped, *second, {}] if guidance_rows > 1 else [{}]


def _seen(examples: Sequence[Example]):
    """Stacks the input of the vision tower; guidance rows share the images of an example.

    Returns:
        The images, and how many views each image of an example has; None if all images are plain.
        If one example has views, all have: a plain image is one view.
    """
    if not any(example.views for example in examples):
        return stack_images([example.pixels for example in examples]), None
    views = [example.shown for example in examples]
    return stack_views(views), [tuple(map(len, shown)) for shown in views]


def _numbered(feature, views: tuple[int, ...], pixels, vision: config.Vision):
    """Returns the features of a row as `Denoiser.see` numbers them for stacked views."""
    most = pixels.shape[1]
    return stacked_features(feature, views, most, vision.num_tokens, newline=vision.newline)


def _stack(rows: Sequence[StreamRow], pad_token: int, length: int) -> Stream:
    shape = len(rows), length
    tokens = np.full((*shape, *rows[0].tokens.shape[1:]), pad_token, np.int32)
    index, position = np.full(shape, NO_CELL, np.int32), np.zeros(shape, np.int32)
    block = np.full(shape, PAD_BLOCK, np.int32)
    for number, row in enumerate(rows):
        used = number, slice(len(row.index))
        tokens[used], index[used] = row.tokens, row.index
        position[used], block[used] = row.position, row.block
    return Stream(tokens, index, make_tags(position, block, GIVEN_BLOCK))
