# SPDX-License-Identifier: Apache-2.0
"""Corrupted rows: the tokens of examples whose responses were cut into blocks, stream by stream.

`diffusion.Blocks` says which tokens of a response are clean, masked or left out. Here prompt, clean
tokens, masked tokens and registers are put into the two streams, with their tags, targets and
weights (paper Sec. 3.1 and 7.2). All of it is NumPy on the host.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import flax.struct
import numpy as np
from jaxtyping import Bool, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.diffusion import ABSENT, Blocks
from sparse_lavida_jax.sequence import RESPONSE_STREAM, Modality, PromptRow, SeenBatch
from sparse_lavida_jax.tags import NO_CELL, PROMPT_BLOCK, Stream, StreamNames
from sparse_lavida_jax.visibility import AnyArray


@flax.struct.dataclass
class Corrupted:
    """One training forward pass: tokens, tags, targets and weights of both streams.

    Attributes:
        understanding, generation: the streams, sorted by block; None if the group has none.
        pixels: the image that the vision tower sees, one per row, or the views of a row's
            images, or None.
        text_target, text_weight: target id and loss weight of each understanding token.
        image_target, image_weight: target codes of each generation token, and the loss weight of
            the token or of each of its codes.
        text_total, image_total: what the weighted sums are divided by, summed over the rows, in
            tokens; a partly masked cell counts as a fraction.
        predicts: the streams that contain responses, static.
    """

    understanding: Stream | None
    generation: Stream | None
    pixels: SeenBatch | None
    text_target: Int[AnyArray, "b u"] | None
    text_weight: Float[AnyArray, "b u"] | None
    image_target: Int[AnyArray, "b s g"] | None
    image_weight: Float[AnyArray, "b s *g"] | None
    text_total: Float[AnyArray, " b"]
    image_total: Float[AnyArray, " b"]
    predicts: StreamNames = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of one stream of one row, not sorted or padded.

    Attributes:
        tokens: ids [s] of the understanding stream, codes [s g] of the generation stream.
        index: as in `tags.Stream`.
        position, block: tags.
        last_clean: as in `Blocks`, of each token.
        target, weight: the value to predict, and its weight in the loss.
    """

    tokens: Int[np.ndarray, "s *g"]
    index: Int[np.ndarray, " s"]
    position: Int[np.ndarray, " s"]
    block: Int[np.ndarray, " s"]
    last_clean: Int[np.ndarray, " s"]
    target: Int[np.ndarray, "s *g"]
    weight: Float[np.ndarray, "s *_g"]

    @classmethod
    def joined(cls, parts: Sequence["Tokens"]) -> "Tokens":
        """Concatenates tokens, in the order of the parts."""
        columns = zip(*[vars(one).values() for one in parts], strict=True)
        return cls(*map(np.concatenate, columns))

    @classmethod
    def of_prompt(cls, tokens, index, position, *, weight_by_code: bool = False) -> "Tokens":
        """Returns tokens of block 0, which are not predicted."""
        block = np.zeros_like(index) + PROMPT_BLOCK
        weight = np.zeros(tokens.shape if weight_by_code else index.shape)
        return cls(tokens, index, position, block, block, np.zeros_like(tokens), weight)


class CorruptedRow(NamedTuple):
    """One example in one training pass: prompt, clean tokens, masked tokens and their registers.

    Attributes:
        response: clean ids of a text response (g = 1) or codes of an image response.
        modality: of the response; its registers are in the same stream.
        full_attention: no registers (LaViDa-O); `stack` then puts every token in block 0.
    """

    prompt: PromptRow
    response: Int[np.ndarray, "l g"]
    modality: Modality
    blocks: Blocks
    model: config.Model
    full_attention: bool = False

    @property
    def predicts(self) -> StreamNames:
        """The stream that contains the response."""
        return RESPONSE_STREAM[self.modality]

    @property
    def understanding(self) -> Tokens:
        return corrupt_together([self]).understanding.tokens

    @property
    def generation(self) -> Tokens:
        return corrupt_together([self]).generation.tokens

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of tokens of both streams."""
        answer, is_text = len((self.blocks.block != ABSENT).nonzero()[0]), self.modality == "text"
        if not self.full_attention:
            answer += self.model.num_registers * len(self.blocks.masked_blocks)
        text, image = len(self.prompt.ids), len(self.prompt.codes)
        return (text + answer, image) if is_text else (text, image + answer)


class StreamTokens(NamedTuple):
    """The tokens of several examples in one stream, not sorted or padded.

    Attributes:
        tokens: of all examples; those of one example are in order.
        example: the index of the example that each token belongs to.
        totals: what the weighted sum of the losses of each example is divided by.
    """

    tokens: Tokens
    example: Int[np.ndarray, " s"]
    totals: Sequence[float]

    @classmethod
    def of(cls, parts: Sequence[Tokens], totals: Sequence[float]) -> "StreamTokens":
        """Joins the tokens of examples."""
        example = np.arange(len(parts)).repeat([len(one.block) for one in parts])
        return cls(Tokens.joined(parts), example, totals)


class Streams(NamedTuple):
    """The tokens of several examples in both streams."""

    understanding: StreamTokens
    generation: StreamTokens


def corrupt_together(rows: Sequence[CorruptedRow]) -> Streams:
    """Lays out both streams of rows."""
    by_code, prompts = rows[0].blocks.is_by_code, [row.prompt for row in rows]
    text = [(one.ids, one.feature, one.position) for one in prompts]
    image = [(one.codes, one.cell, one.source_position) for one in prompts]
    streams, both = [], zip(get_args(Modality), (text, image), (False, by_code), strict=True)
    for modality, in_prompt, weight_by_code in both:
        numbers = [i for i, row in enumerate(rows) if row.modality == modality]
        example = np.arange(len(rows)).repeat([len(tokens) for tokens, *_ in in_prompt])
        columns = map(np.concatenate, zip(*in_prompt, strict=True))
        laid, totals = Tokens.of_prompt(*columns, weight_by_code=weight_by_code), [0.0] * len(rows)
        if numbers:
            answers, of_answers = _response_streams([rows[i] for i in numbers])
            laid = Tokens.joined([laid, answers])
            example = np.concatenate([example, np.array(numbers)[of_answers]])
            for i in numbers:
                totals[i] = rows[i].blocks.total
        streams.append(StreamTokens(laid, example, totals))
    return Streams(*streams)


def _response_streams(rows: Sequence[CorruptedRow]) -> tuple[Tokens, Int[np.ndarray, " s"]]:
    """Returns the tokens of responses that are not left out, their registers, and whose they are.

    A text has tokens [s], an image [s g].
    """
    is_text, model = rows[0].modality == "text", rows[0].model
    count = 0 if rows[0].full_attention else model.num_registers
    mask_id, register_id = model.image_mask_id, model.image_register_id
    if is_text:
        mask_id, register_id = model.text_mask_id, model.text_register_id
    blocks, numbers = [row.blocks for row in rows], np.arange(len(rows))
    block = np.concatenate([one.block for one in blocks])
    present = block != ABSENT
    present = slice(None) if present.all() else present.nonzero()[0]
    example = numbers.repeat([len(one.block) for one in blocks])[present]
    responses = [row.response[:, 0] if is_text else row.response for row in rows]
    places = [(np.arange(len(r)), one.copies) for r, one in zip(responses, blocks, strict=True)]
    here = np.concatenate([*itertools.chain(*places)])[present]
    target = np.concatenate(responses)[here + _starts(responses)[example]]
    if is_text or not blocks[0].is_by_code:
        hidden, weight = ([getattr(one, of) for one in blocks] for of in ("masked", "weight"))
    else:
        hidden, weight = zip(*(_by_code(one, target.shape[1]) for one in blocks), strict=True)
    hidden, weight = np.concatenate(hidden)[present], np.concatenate(weight)[present]
    hidden = hidden.reshape(*hidden.shape, *[1] * (target.ndim - hidden.ndim))
    position = np.array([row.prompt.response_position for row in rows])[example] + here

    # Registers: `count` for each masked block, after the whole sequence (Sec. 3.1 and 7.2).
    of_masked = numbers.repeat([len(one.masked_blocks) for one in blocks])
    after = np.array([row.prompt.length for row in rows])[of_masked]
    masked_blocks = np.array([*itertools.chain(*(one.masked_blocks for one in blocks))], int)
    registers = len(masked_blocks) * count
    no_index = np.full(len(here) * is_text + registers, NO_CELL)  # the same number as `NO_FEATURE`

    example = np.concatenate([example, of_masked.repeat(count)])
    block = np.concatenate([block[present], masked_blocks.repeat(count)])
    last_clean = [one.last_clean for one in blocks]
    tokens = Tokens(
        tokens=_extended(np.where(hidden, mask_id, target), registers, register_id),
        index=no_index if is_text else np.concatenate([here, no_index]),
        position=np.concatenate([position, (after[:, None] + np.arange(count)).reshape(-1)]),
        block=block,
        last_clean=np.array([*itertools.chain(*last_clean)])[block + _starts(last_clean)[example]],
        target=_extended(target, registers, 0),
        weight=_extended(weight, registers, 0),
    )
    return tokens, example


def _starts(parts: Sequence[Any]) -> Int[np.ndarray, " n"]:
    """Returns where each part starts in their concatenation."""
    return np.array([0, *itertools.accumulate(map(len, parts[:-1]))])


def _extended(values: np.ndarray, count: int, fill: int) -> np.ndarray:
    """Returns values followed by `count` times `fill`."""
    return np.concatenate([values, np.full((count, *values.shape[1:]), fill, values.dtype)])


def _by_code(
    blocks: Blocks, codes_per_token: int
) -> tuple[Bool[np.ndarray, "l g"], Float[np.ndarray, "l g"]]:
    """Returns which codes are hidden, and their loss weights; `code_weight` keeps their sum."""
    hidden = np.repeat(blocks.masked[:, None], codes_per_token, axis=1)
    if blocks.known is not None:
        hidden &= ~blocks.known
    weight = hidden * blocks.weight[:, None]
    if blocks.code_weight is None:
        return hidden, weight
    weighted = weight * blocks.code_weight[blocks.token]
    return hidden, weighted * (weight.sum() / max(weighted.sum(), 1e-9))
