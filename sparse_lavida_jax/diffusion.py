# SPDX-License-Identifier: Apache-2.0
"""Time and blocks: which tokens of a response a training pass shows, masks or leaves out.

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

`data/corrupted_rows.py` puts the tokens of rows into streams. LaViDa-O's own objective (config
`diffusion.corruption = "released"`) has no blocks: see `data/released_objective.py`.
"""

import bisect
import collections
import functools
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from sparse_lavida_jax import config, orders
from sparse_lavida_jax.orders import time_from_uniform
from sparse_lavida_jax.sequence import Modality
from sparse_lavida_jax.tags import (
    FIRST_BLOCK,
    GIVEN_BLOCK,
)

ABSENT = -1  # block of a masked token that is left out of the sequence


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
