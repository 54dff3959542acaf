# SPDX-License-Identifier: Apache-2.0
"""Requests laid out as the prompts of a batch, on the host: all guidance rows, in one bucket."""

import dataclasses
import itertools

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.layout import (
    GIVEN_BLOCK,
    NO_CELL,
    NO_FEATURE,
    PROMPT_BLOCK,
    AnyArray,
    Stream,
    make_layout,
)
from sparse_lavida_jax.sequence import (
    Kind,
    Part,
    PromptRow,
    Views,
    prompt_row,
    stack_images,
    stack_views,
    stacked_features,
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


@dataclasses.dataclass(frozen=True)
class Request:
    """One thing to be sampled.

    Attributes:
        parts: the sequence; its `Response` says how many tokens to decode.
        tokens: the response's known tokens [l g]; what `given` does not mark is ignored.
        given: which response tokens are known.
        pixels: the image that a `VisionTokens` part stands for, or the views of each of several
            images (`data.images`).
        seed: all randomness of this row.
        temperature, guidance, guidance_image: of this row; None: those of the settings.
    """

    parts: tuple[Part, ...]
    tokens: Int[np.ndarray, "l g"]
    given: Bool[np.ndarray, " l"]
    pixels: UInt8[np.ndarray, "h w 3"] | tuple[Views, ...] | None
    seed: int
    temperature: float | None = None
    guidance: float | None = None
    guidance_image: float | None = None


@flax.struct.dataclass
class Prompt:
    """Prompts of a batch, a row for each request and guidance row (guidance-major: r b).

    Attributes:
        understanding, generation: prompt and given tokens, with tags; None where there are none.
        pixels: images of each request for the vision tower, or None.
        response_position: position of the first response token.
        length: L, where register positions start.
    """

    understanding: Stream
    generation: Stream | None
    pixels: UInt8[AnyArray, "b *n h w 3"] | Float[AnyArray, "b *n h w 3"] | None
    response_position: Int[AnyArray, " r"]
    length: Int[AnyArray, " r"]


def prepare(
    requests: list[Request],
    kind: Kind,
    model: config.Model,
    guidance_rows: int = 1,
    prompt_len: tuple[int, int] = (0, 0),
    *,
    edit_guidance: str = "source",
    with_given: bool = True,
) -> Prompt:
    """Lays out the prompts of a batch on the host, all guidance rows, padded to a bucket.

    Args:
        guidance_rows: 1: the prompt; 2: [dropped, full]; 3: [dropped, second, full].
        prompt_len: least padded lengths of the two streams, so that batches share programs.
        edit_guidance: what the second row of three keeps.
        with_given: whether given tokens are in the prompt's pass.
    """
    rows = [
        (request, prompt_row(
            request.parts,
            text_mask_id=model.text_mask_id,
            codes_per_token=model.codes_per_token,
            **drops,
        ))
        for drops in _drops(guidance_rows, edit_guidance)
        for request in requests
    ]  # fmt: skip
    pixels, rows = _see([request.pixels for request in requests], rows, model.vision)
    text, image = [], []
    for request, row in rows:
        known = np.flatnonzero(request.given & with_given)
        position = row.response_position + known
        block = np.full(len(known), GIVEN_BLOCK)
        text.append((row.ids, row.feature, row.position, np.full_like(row.position, PROMPT_BLOCK)))
        image.append(
            (row.codes, row.cell, row.source_position, np.full_like(row.cell, PROMPT_BLOCK))
        )
        if kind == "text":
            given = (request.tokens[known, 0], np.full(len(known), NO_FEATURE), position, block)
            text[-1] = tuple(np.concatenate(pair) for pair in zip(text[-1], given, strict=True))
        else:
            given = (request.tokens[known], known, position, block)
            image[-1] = tuple(np.concatenate(pair) for pair in zip(image[-1], given, strict=True))
    return Prompt(
        _stack(text, model.end_of_text_id, prompt_len[0]),
        _stack(image, model.image_mask_id, prompt_len[1])
        if any(len(row[1]) for row in image)
        else None,
        pixels,
        np.array([row.response_position for _, row in rows], np.int32),
        np.array([row.length for _, row in rows], np.int32),
    )


@dataclasses.dataclass(frozen=True)
class PromptPart:
    """Rows of a batch that are prefilled together, in a shape of their own.

    Attributes:
        first: the first of the rows, which stand one behind the other.
        prompt: of these rows.
        keeps: whether it holds nothing of the request but its lengths: masks and headers.
    """

    first: int
    prompt: Prompt
    keeps: bool


def guidance_shapes(prompt: Prompt, guidance_rows: int) -> tuple[tuple[int, int], ...]:
    """Returns the padded lengths of both streams that each guidance row needs.

    A guidance row is as much shorter than the batch as its rows are shorter than the longest row of
    their request. So its shape depends on the bucket, and not on which requests are in the batch.
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


def parted(prompt: Prompt, guidance_rows: int, *, keeping: bool) -> list[PromptPart]:
    """Returns a batch in parts of one shape each: guidance rows of one request differ in length.

    Args:
        keeping: whether rows that `keeps` are parts of their own, for a store of such prefixes.
    """
    b = len(prompt.length) // guidance_rows
    shapes = guidance_shapes(prompt, guidance_rows)
    seen = (prompt.understanding.index >= 0).any(axis=1).reshape(guidance_rows, b)
    cells = _lengths(prompt, guidance_rows)[1].any(axis=1)
    own = np.asarray(seen.any(axis=1) | cells)  # of their images or cells
    own[-1] = True  # nothing is dropped
    parts: list[PromptPart] = []
    for (shape, keeps), numbers in itertools.groupby(
        range(guidance_rows), lambda number: (shapes[number], keeping and not own[number])
    ):
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
            else (stream.layout.block != PAD_BLOCK).sum(axis=1)
        ).reshape(guidance_rows, -1)
        for stream in streams
    ]  # fmt: skip


def cut_rows(prompt: Prompt, requests: int, rows: range, shape: tuple[int, int]) -> Prompt:
    """Returns some rows of a batch of `requests` with streams of these lengths."""
    start, end = rows.start, rows.stop
    # Images are numbered by request: a part that sees them holds whole guidance rows.
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


def prompt_lengths(requests: list[Request], kind: Kind, model: config.Model) -> tuple[int, int]:
    """Returns the padded prompt lengths that hold every one of `requests` without guidance."""
    return padded_lengths(prepare(requests, kind, model))


def _drops(guidance_rows: int, edit_guidance: str) -> list[dict[str, bool]]:
    """What guidance drops from each of its rows (`layout.prompt_row`)."""
    dropped = {"drop_prompt": True, "drop_source": True}
    second = [EDIT_DROPS[edit_guidance]] if guidance_rows == 3 else []
    return [dropped, *second, {}] if guidance_rows > 1 else [{}]


def _see(images, rows: list[tuple[Request, PromptRow]], vision: config.Vision):
    """Stacks what the vision tower is shown; numbers the features as `Denoiser.see` does.

    Guidance rows of a request share its images.

    A request with views of its images makes views of all: one plain image is one view.
    """
    seen = [() if p is None else p if isinstance(p, tuple) else (p[None],) for p in images]
    pixels = stack_views(seen)
    if pixels is None or not any(isinstance(image, tuple) for image in images):
        return stack_images(images), rows
    numbered = [
        (request, dataclasses.replace(row, feature=stacked_features(
            row.feature,
            tuple(len(views) for views in shown),
            pixels.shape[1],
            vision.num_tokens,
            newline=vision.newline,
        )))
        for (request, row), shown in zip(rows, itertools.cycle(seen), strict=False)
    ]  # fmt: skip
    return pixels, numbered


def _stack(rows, pad_token: int, least: int) -> Stream:
    longest = max(least, *(len(row[1]) for row in rows))
    length = _padded(longest)

    def padded(values, fill):
        missing = ((0, length - len(values)),) + ((0, 0),) * (values.ndim - 1)
        return np.pad(values, missing, constant_values=fill).astype(np.int32)

    tokens, index, position, block = (
        np.stack([padded(row[i], fill) for row in rows])
        for i, fill in enumerate((pad_token, NO_CELL, 0, PAD_BLOCK))
    )
    return Stream(tokens, index, make_layout(position, block, GIVEN_BLOCK))
