# SPDX-License-Identifier: Apache-2.0
"""Time, blocks and corruption: how a clean response becomes a training pass.

Paper Sec. 3.3 and 7.1. All of it is NumPy on the host. Random bits come from the generator of the
row, so that they depend only on its number.

Three block assignments (config `diffusion.blocks`):

* `plan`, in our configs for training: every step of a sampler's plan (order, counts) at once, where
  small steps are merged (`diffusion.merge_cells`). Each block
  is there twice: clean, for later ones, and masked, with an M of its own; the last one only masked.
  Every cell is predicted once, with weight 1: the sum is the sampler's negative log likelihood
  under the whole plan, so the plan is the only random draw (docs/method.md). Of a text
  with more than `text_masked_blocks` steps, so many are chosen at random.
* `schedule`: of a plan, the step k that contains a uniform t, so with probability |C_k|/L.
  Clean tokens get the step that decoded them (M = k-1), the first masked block is C_k and further
  ones are cut from the rest of the order; other masked tokens are left out (truncation lemma). A
  kept token has weight L / (kept tokens). For N = 1 and blocks of the sampler's own sizes, this is
  unbiased for the sampler's own negative log likelihood, and with a random order and one token per
  step it is Eq. 1. In half of the draws steps are merged into larger blocks: no longer unbiased,
  but with more tokens in the loss. In a text, the masked block is everything still masked in the
  text block, among which the sampler chooses; several steps (`text_masked_blocks`) have an M each,
  and any number of them is unbiased.
* `uniform`, as the paper says: masks each token with probability t; clean tokens are assigned
  uniformly to blocks 1..M, masked tokens to M+1..M+N. The weight 1/(t p(t)), where p is the density
  from which t was drawn, makes the loss Eq. 1.

LaViDa-O's own objective (config `diffusion.corruption = "released"`) has no blocks: see
`data/released_objective.py`.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import flax.struct
import numpy as np
from jaxtyping import Bool, Float, Int

from sparse_lavida_jax import config, orders
from sparse_lavida_jax.orders import time_from_uniform
from sparse_lavida_jax.sequence import RESPONSE_STREAM, Modality, PromptRow, SeenBatch
from sparse_lavida_jax.tags import (
    FIRST_BLOCK,
    GIVEN_BLOCK,
    NO_CELL,
    PROMPT_BLOCK,
    Stream,
    StreamNames,
)
from sparse_lavida_jax.visibility import AnyArray

ABSENT = -1  # block of a masked token that is left out of the sequence


# ---------------------------------------------------------------------------------------------
# Blocks of a response.


class Blocks(NamedTuple):
    """The state of each token of one response in one training pass.

    The tokens of the response may be followed by copies of some (`copies`): a token occurs once for
    each masked block that predicts it, and once more if it is clean for a later one.

    Attributes:
        block: block of each token and copy, `ABSENT` if it is left out.
        masked: whether it is masked (and predicted).
        num_clean: M, the number of clean blocks, which are 1 to M.
        masked_blocks: the masked blocks; each gets its own registers.
        weight: loss weight of each token and copy, 0 if it is not predicted.
        total: what the weights of a response are divided by (L, or the number of predicted tokens).
        known: codes of partly masked cells that are shown and have no loss; None if training has
            none (`partly_known`).
        code_weight: the weight of each code of an image relative to its other codes
            (`Data.edit_area_weight`); None: all equal.
        copies: the index, in the response, of the token that each copy repeats.
        horizons: of masked blocks, where that is not M.
    """

    block: Int[np.ndarray, " n"]
    masked: Bool[np.ndarray, " n"]
    num_clean: int
    masked_blocks: tuple[int, ...]
    weight: Float[np.ndarray, " n"]
    total: float
    known: Bool[np.ndarray, "n g"] | None = None
    code_weight: Float[np.ndarray, "l g"] | None = None
    copies: Int[np.ndarray, " c"] = np.zeros(0, np.int64)
    horizons: Mapping[int, int] = types.MappingProxyType({})

    @property
    def is_by_code(self) -> bool:
        """Whether the codes of an image have weights of their own."""
        return self.known is not None or self.code_weight is not None

    @property
    def last_clean(self) -> list[int]:
        """The last clean block that each block may look back to, from block 0 on, or a later one.

        `tags.make_tags` takes the smaller of this and the block.
        """
        end = max((self.num_clean, *self.masked_blocks))
        masked = range(self.num_clean + 1, end + 1)
        clean = [self.num_clean] * (self.num_clean + 1)
        return clean + [self.horizons.get(number, self.num_clean) for number in masked]

    @property
    def token(self) -> Int[np.ndarray, " n"]:
        """The index, in the response, of each token, or of the token that it copies."""
        return np.concatenate([np.arange(len(self.block) - len(self.copies)), self.copies])


def uniform_blocks(
    rng: np.random.Generator, given: Bool[np.ndarray, " l"], settings: config.Diffusion
) -> Blocks:
    """Masks tokens with probability t and scatters both kinds uniformly (Sec. 3.3).

    At least one token that is not given is masked. Given tokens are in block 1 of M.
    """
    t, density = time_from_uniform(settings.time_policy, rng.random())
    draw = np.where(given, np.inf, rng.random(len(given)))
    masked = draw <= max(t, draw.min())
    num_clean, num_masked = settings.num_clean_blocks, settings.num_masked_blocks
    clean_block = rng.integers(1, num_clean + 1, len(given))
    clean_block = np.where(given, GIVEN_BLOCK, clean_block)
    masked_block = rng.integers(num_clean + 1, num_clean + num_masked + 1, len(given))
    block = np.where(masked, masked_block, clean_block)
    weight, total = masked.astype(float), float(masked.sum())
    if settings.weighting == "1/t":
        # A token that was masked only to have at least one does not count in Eq. 1.
        weight, total = np.where(draw <= t, 1 / (t * density), 0.0), float((~given).sum())
    masked_blocks = tuple(np.unique(block[masked]).tolist())
    return Blocks(block.astype(np.int32), masked, num_clean, masked_blocks, weight, total)


def schedule_blocks(
    rng: np.random.Generator,
    order: Int[np.ndarray, " r"],
    sizes: Int[np.ndarray, " k"],
    given: Bool[np.ndarray, " l"],
    settings: config.Diffusion,
    merge_cells: int,
) -> Blocks:
    """Takes one step of a sampler's plan over an image response, and some of the steps after it.

    Args:
        order: positions in the order in which the plan decodes them (all that are not given).
        sizes: |C_1|..|C_K|, summing to `len(order)`.
        merge_cells: with probability 1/2, steps are merged until a block has at least this many
            tokens, since with the sampler's own sizes only few tokens have a loss.
    """
    ends = np.cumsum(sizes)
    step = int(np.searchsorted(ends, rng.random() * len(order), side="right"))
    block = np.where(given, np.int32(GIVEN_BLOCK), np.int32(ABSENT))
    done = np.arange(FIRST_BLOCK, FIRST_BLOCK + step).repeat(sizes[:step])
    block[order[: len(done)]] = done
    merge = merge_cells if rng.random() < 0.5 else 1
    masked = np.zeros(len(given), bool)
    masked_blocks, start, taken = [], int(ends[step] - sizes[step]), step
    while taken < len(sizes) and len(masked_blocks) < settings.num_masked_blocks:
        stop = int(ends[taken])
        taken += 1
        while taken < len(sizes) and stop - start < merge:
            stop = int(ends[taken])
            taken += 1
        number = FIRST_BLOCK + step + len(masked_blocks)
        block[order[start:stop]] = number
        masked[order[start:stop]] = True
        masked_blocks.append(number)
        start = stop
    weight, total = masked.astype(float), float(masked.sum())
    if settings.weighting == "1/t":
        weight, total = masked * (len(order) / masked.sum()), float(len(order))
    return Blocks(block, masked, FIRST_BLOCK + step - 1, tuple(masked_blocks), weight, total)


def plan_blocks(
    order: Int[np.ndarray, " r"],
    sizes: Int[np.ndarray, " k"],
    given: Bool[np.ndarray, " l"],
    merge_cells: int,
) -> Blocks:
    """Takes every step of a sampler's plan over an image response.

    Tokens of the last step stay in their own place, masked. Those of earlier steps are clean in
    their own place and have masked copies, which see the tokens decoded before their step. So the
    length of a row depends only on the plan's sizes, not on its order.

    Args:
        order: positions in the order in which the plan decodes them (all that are not given).
        sizes: tokens per step, summing to `len(order)`.
        merge_cells: steps are merged until each decodes at least this many cells, as with
            `Sampling.merge_cells`.
    """
    return _image_plan(tuple(sizes.tolist()), merge_cells).blocks(order, given)


def semi_autoregressive_blocks(
    rng: np.random.Generator,
    length: int,
    block_len: int,
    steps_per_block: int,
    given: Bool[np.ndarray, " l"],
    settings: config.Diffusion,
) -> Blocks:
    """Takes steps inside text blocks: earlier text blocks clean, later ones absent.

    A text block is drawn in proportion to its tokens, and a step in it; the masked block is
    everything still masked in that text block. The tokens of a text block are put in random order
    and split evenly into steps; a clean token gets the step that decoded it.
    `Diffusion.text_masked_blocks` steps are drawn, and equal ones count once; with `plan`, a text
    with no more steps than that uses all of them, weighted by the tokens they decode. Tokens
    predicted by the last step stay in their place, those predicted by the others are copies; each
    step sees the tokens decoded before it. With "1/t" each step has its share of the weight, with
    "mean" each token that it predicts.

    Args:
        length: tokens that the sampler may reach (whole text blocks; it never decodes beyond the
            first end-of-text). Tokens of `given` after that are absent.
    """
    left = ~given
    text_blocks = [
        left[start : start + block_len].nonzero()[0] + start
        for start in range(0, length, block_len)
    ]
    orders = [rng.permutation(inside) for inside in text_blocks if len(inside)]
    sizes = tuple([even_split(len(inside), steps_per_block) for inside in orders])
    most = settings.text_masked_blocks
    if settings.blocks == "plan" and sum(map(len, sizes)) <= most:
        steps = _whole_plan(sizes, settings.weighting)
    else:
        steps = _steps_of(sizes, *_text_steps(rng, sizes, most), settings.weighting)
    return steps.blocks(np.concatenate(orders), given)


class _Steps(NamedTuple):
    """Steps of a plan, whatever its order; all fields but those described are as in `Blocks`.

    Six cells in three steps of two: C_1 and C_2 are clean in blocks 2 and 3, and C_1 to C_3 masked
    in blocks 4, 5 and 6, whose horizons are 1, 2 and 3. Then `of_order` is 2 2 3 3 6 6, `copied` is
    0 1 2 3 and `of_copies` 4 4 5 5. With the order 4 1 0 5 2 3, `Blocks.block` is 3 2 6 6 2 3 for
    cells 0 to 5, and 4 4 5 5 for the copies of cells 4, 1, 0 and 5.

    Attributes:
        of_order: block of each token in its own place, in the plan's order.
        copied: where in that order the copied tokens are.
        of_copies: block of each copy.
        weights: of the tokens of each block, from 0 on; the last one is that of `ABSENT`.
    """

    num_clean: int
    masked_blocks: tuple[int, ...]
    horizons: Mapping[int, int]
    total: float
    of_order: Int[np.ndarray, " r"]
    copied: Int[np.ndarray, " c"]
    of_copies: Int[np.ndarray, " c"]
    weights: Float[np.ndarray, " n"]

    def blocks(self, order: Int[np.ndarray, " r"], given: Bool[np.ndarray, " l"]) -> Blocks:
        """Returns the blocks of a response for one order."""
        end = len(given)
        block = np.empty(end + len(self.copied), np.int32)
        if len(order) < end:
            block[:end] = ABSENT
            block[:end][given] = GIVEN_BLOCK
        block[order], block[end:] = self.of_order, self.of_copies
        masked, weight, copies = block > self.num_clean, self.weights[block], order[self.copied]
        return Blocks(
            block, masked, self.num_clean, self.masked_blocks, weight, self.total,
            copies=copies, horizons=self.horizons,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _image_plan(sizes: tuple[int, ...], merge_cells: int) -> _Steps:
    merged = orders.merged(np.array(sizes), merge_cells).tolist()
    return _whole_plan(tuple((size,) for size in merged), "mean")  # for whole cells as "1/t"


@functools.lru_cache(maxsize=1024)
def _whole_plan(sizes: tuple[tuple[int, ...], ...], weighting: str) -> _Steps:
    times = [*itertools.chain(*sizes)]
    return _steps_of(sizes, range(len(times)), times, weighting)


def _steps_of(
    sizes: Sequence[Sequence[int]], steps: Sequence[int], times: Sequence[int], weighting: str
) -> _Steps:
    """Returns steps of a plan, each of which predicts what is still masked of its text block.

    Args:
        sizes: tokens of each step of each text block; the steps are numbered across text blocks.
        steps: rising numbers of steps.
        times: how often each was drawn.
    """
    size = [*itertools.chain(*sizes)]
    starts, begin = [*itertools.accumulate(size, initial=0)], 0
    end = []  # of the text block of each step
    for own in sizes:
        begin += sum(own)
        end += [begin] * len(own)
    lengths = [end[step] - starts[step] for step in steps]
    num_clean = FIRST_BLOCK + steps[-1] - 1
    masked_blocks = tuple(range(num_clean + 1, num_clean + 1 + len(steps)))
    if weighting == "1/t":
        total, drawn = float(begin), sum(times)
        share = [total * often / (drawn * n) for often, n in zip(times, lengths, strict=True)]
    else:
        total, share = float(sum(lengths)), [1.0] * len(steps)
    # The last step predicts tokens in their own places, the others predict copies.
    copied = [np.arange(starts[step], end[step]) for step in steps[:-1]]
    of_order, last = np.full(begin, ABSENT), starts[steps[-1]]
    of_order[:last] = np.arange(FIRST_BLOCK, num_clean + 1).repeat(size[: steps[-1]])
    of_order[last : end[steps[-1]]] = masked_blocks[-1]
    copied = np.concatenate([np.zeros(0, int), *copied])
    of_copies = np.array(masked_blocks[:-1], int).repeat(lengths[:-1])
    horizons = dict(zip(masked_blocks, [FIRST_BLOCK + step - 1 for step in steps], strict=True))
    weights = np.array([*[0.0] * (num_clean + 1), *share, 0.0])
    return _Steps(num_clean, masked_blocks, horizons, total, of_order, copied, of_copies, weights)


def _text_steps(
    rng: np.random.Generator, sizes: Sequence[tuple[int, ...]], count: int
) -> tuple[list[int], list[int]]:
    """Draws `count` stratified steps; returns the distinct ones and how often each was drawn.

    Args:
        sizes: tokens per step of each text block; steps are numbered across text blocks.
    """
    text_blocks = _stratified(rng, [sum(size) for size in sizes], count)
    before, steps = [*itertools.accumulate(map(len, sizes), initial=0)], []
    for text_block, same in itertools.groupby(text_blocks):
        inside = _stratified(rng, sizes[text_block], len([*same]))
        steps += [before[text_block] + step for step in inside]
    drawn = collections.Counter(steps)
    return [*drawn], [*drawn.values()]


def _stratified(rng: np.random.Generator, sizes: Sequence[int], count: int) -> list[int]:
    """Draws in proportion to sizes, once in each of `count` equal intervals: in rising order."""
    ends = [*itertools.accumulate(sizes)]
    return [
        bisect.bisect_right(ends, (number + inside) / count * ends[-1])
        for number, inside in enumerate(rng.random(count).tolist())
    ]


@functools.cache
def even_split(count: int, steps: int) -> tuple[int, ...]:
    """Splits `count` tokens over up to `steps` steps, the remainder to the first ones (spec 6)."""
    steps = min(steps, count)
    return tuple(count // steps + (step < count % steps) for step in range(steps))


def partly_known(
    rng: np.random.Generator,
    blocks: Blocks,
    modality: Modality,
    codes_per_token: int,
    settings: config.Diffusion,
) -> Blocks:
    """Reveals some codes of every cell in a share of an image's masked blocks.

    All cells of a block show the same number of codes, 1 to g - 1, chosen separately in each cell.
    Later passes of a step see such cells (`Sampling.cell_passes`). Text is left as it is.
    """
    known = np.zeros((len(blocks.block), codes_per_token), bool)
    total = blocks.total
    if modality == "image" and codes_per_token > 1:
        for number in blocks.masked_blocks:
            if rng.random() < settings.partial_cells:
                cells = np.flatnonzero(blocks.masked & (blocks.block == number))
                rank = rng.random((len(cells), codes_per_token)).argsort(axis=1)
                known[cells] = rank < rng.integers(1, codes_per_token)
        if settings.weighting == "mean":
            total -= known.sum() / codes_per_token
    return blocks._replace(known=known, total=total)


# ---------------------------------------------------------------------------------------------
# Rows and batches.


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
