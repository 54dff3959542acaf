# SPDX-License-Identifier: Apache-2.0
"""Lays out examples as the prompts of a batch, on the host: all guidance rows, in one bucket."""

import dataclasses
import itertools
from collections.abc import Sequence

import flax.struct
import jax
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
    """Prompts of a batch, a row for each request and guidance row (guidance-major: r b).

    Attributes:
        understanding, generation: prompt and given tokens, with tags; None if there are none.
        pixels: the images of each request for the vision tower, or None.
        response_position: position of the first response token.
        length: L, where register positions start.
    """

    understanding: Stream
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


@dataclasses.dataclass(frozen=True)
class LaidOut:
    """An example to be sampled, laid out once: a row of each stream for every guidance row.

    Attributes:
        request: how it is sampled.
        text, image: prompt, and given tokens unless steps pass them (`Preset.passes_given`).
        response_position: position of the first response token.
        length: L, where register positions start.
    """

    example: Example
    request: RowRequest
    text: tuple[StreamRow, ...]
    image: tuple[StreamRow, ...]
    response_position: int
    length: int

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Tokens in the prompt of each guidance row, with given tokens that no step passes."""
        pairs = zip(self.text, self.image, strict=True)
        return tuple(len(text.index) + len(image.index) for text, image in pairs)


def lay_out(
    example: Example, request: RowRequest, model: config.Model, settings: StepSettings
) -> LaidOut:
    """Lays out an example on the host, with all guidance rows."""
    given_passed = not settings.preset.passes_given
    known, text, image = np.flatnonzero(example.given & given_passed), [], []
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
        if example.kind == "text":
            tokens, no_feature = example.response[known, 0], np.full(len(known), NO_FEATURE)
            text[-1] = text[-1].followed_by(tokens, no_feature, at)
        else:
            image[-1] = image[-1].followed_by(example.response[known], known, at)
    place = row.response_position, row.length
    return LaidOut(example, request, tuple(text), tuple(image), *place)


def lengths_of(laid: Sequence[LaidOut]) -> tuple[int, int]:
    """Returns padded lengths of the two streams that are enough for every example."""
    text = max(len(row.index) for one in laid for row in one.text)
    image = max(len(row.index) for one in laid for row in one.image)
    return _padded(text), _padded(image)


def batched(
    laid: Sequence[LaidOut], model: config.Model, prompt_len: tuple[int, int] = (0, 0)
) -> Prompt:
    """Stacks laid-out examples as the prompts of a batch, padded to a bucket.

    Args:
        prompt_len: smallest padded lengths of the two streams, so that batches share programs.
    """
    pixels, views = _seen([one.example for one in laid])
    rows = len(laid[0].text)
    text = [one.text[row] for row in range(rows) for one in laid]
    image = [one.image[row] for row in range(rows) for one in laid]
    if views is not None:
        text = [
            dataclasses.replace(row, index=_numbered(row.index, shown, pixels, model.vision))
            for row, shown in zip(text, itertools.cycle(views), strict=False)
        ]
    return Prompt(
        _stack(text, model.end_of_text_id, prompt_len[0]),
        _stack(image, model.image_mask_id, prompt_len[1])
        if any(len(row.index) for row in image)
        else None,
        pixels,
        np.array([one.response_position for one in laid] * rows, np.int32),
        np.array([one.length for one in laid] * rows, np.int32),
    )


@dataclasses.dataclass(frozen=True)
class PromptPart:
    """Consecutive rows of a batch that are prefilled together, in a shape of their own.

    Attributes:
        first: index of the first row.
        prompt: of these rows.
        keeps: whether it depends only on the lengths of the request: masks and headers.
    """

    first: int
    prompt: Prompt
    keeps: bool


def guidance_shapes(prompt: Prompt, guidance_rows: int) -> tuple[tuple[int, int], ...]:
    """Returns the padded lengths of both streams that each guidance row needs.

    A guidance row is shorter than the batch by as much as its rows are shorter than the longest row
    of their request. So its shape depends on the bucket, not on the requests in the batch.
    """
    lengths = _lengths(prompt, guidance_rows)
    padded = padded_lengths(prompt)
    widths = [
        [_padded(most - int(n)) for n in (own.max(axis=0) - own).min(axis=1)]
        for own, most in zip(lengths, padded, strict=True)
    ]
    return tuple(zip(*widths, strict=True))


def padded_lengths(prompt: Prompt) -> tuple[int, int]:
    """Returns the slots of a row in each of the two streams."""
    generation = 0 if prompt.generation is None else prompt.generation.index.shape[1]
    return prompt.understanding.index.shape[1], generation


def parted(
    prompt: Prompt, guidance_rows: int, *, keeping: bool, apart: bool = False
) -> list[PromptPart]:
    """Splits a batch into parts of one shape each: guidance rows of a request differ in length.

    Args:
        keeping: whether rows that requests share become parts of their own, to be kept in a
            `ContentCache`.
        apart: whether each guidance row is a part, also next to one of the same shape.
    """
    b = len(prompt.length) // guidance_rows
    shapes = guidance_shapes(prompt, guidance_rows)
    seen = (prompt.understanding.index >= 0).any(axis=1).reshape(guidance_rows, b)
    cells = _lengths(prompt, guidance_rows)[1].any(axis=1)
    own = np.asarray(seen.any(axis=1) | cells)  # they contain images or cells
    own[-1] = True  # nothing is dropped
    parts: list[PromptPart] = []
    for (shape, keeps), numbers in itertools.groupby(
        range(guidance_rows),
        lambda number: ((*shapes[number], apart * number), keeping and not own[number]),
    ):
        shape = shape[:2]
        first, *others = numbers
        rows = range(first * b, (first + len(others) + 1) * b)
        if keeps:
            shape = (shape[0], 0)
        for alone in [range(row, row + 1) for row in rows] if keeps else [rows]:
            parts.append(PromptPart(alone.start, cut_rows(prompt, b, alone, shape), keeps))
    return parts


def _lengths(prompt: Prompt, guidance_rows: int) -> list[Int[np.ndarray, "r b"]]:
    """Returns the tokens of each row in each of the two streams."""
    streams = (prompt.understanding, prompt.generation)
    number = len(prompt.length)
    return [
        np.asarray(
            np.zeros(number, int) if stream is None
            else (stream.tags.block != PAD_BLOCK).sum(axis=1)
        ).reshape(guidance_rows, -1)
        for stream in streams
    ]  # fmt: skip


def cut_rows(prompt: Prompt, requests: int, rows: range, shape: tuple[int, int]) -> Prompt:
    """Returns some rows of a batch of `requests`, with streams cut to these lengths."""
    start, end = rows.start, rows.stop
    # Images are numbered by request: a part with images must hold whole guidance rows.
    assert not (end - start) % requests or not shape[1]

    def cut(stream: Stream | None, length: int) -> Stream | None:
        if stream is None or not length:
            return None
        return jax.tree.map(lambda x: x[start:end, :length], stream)

    understanding = cut(prompt.understanding, shape[0])
    assert understanding is not None
    sees = prompt.pixels is not None and (understanding.index >= 0).any()
    return Prompt(
        understanding,
        cut(prompt.generation, shape[1]),
        prompt.pixels if sees else None,
        prompt.response_position[start:end],
        prompt.length[start:end],
    )


def _padded(length: int) -> int:
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


def _stack(rows: Sequence[StreamRow], pad_token: int, least: int) -> Stream:
    shape = len(rows), _padded(max(least, *(len(row.index) for row in rows)))
    tokens = np.full((*shape, *rows[0].tokens.shape[1:]), pad_token, np.int32)
    index, position = np.full(shape, NO_CELL, np.int32), np.zeros(shape, np.int32)
    block = np.full(shape, PAD_BLOCK, np.int32)
    for number, row in enumerate(rows):
        used = number, slice(len(row.index))
        tokens[used], index[used] = row.tokens, row.index
        position[used], block[used] = row.position, row.block
    return Stream(tokens, index, make_tags(position, block, GIVEN_BLOCK))
