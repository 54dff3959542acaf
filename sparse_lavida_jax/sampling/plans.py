# SPDX-License-Identifier: Apache-2.0
"""The plans that the sampler follows: which positions each step passes, decodes and keeps.

A plan holds an order and a schedule for every row of a batch. Its steps are grouped into phases
of one width, each of which is one compiled loop. NumPy on the host: nothing here is traced.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from sparse_lavida_jax.orders import begun, counts, counts_after, merged
from sparse_lavida_jax.sequence import cells_from_codes
from sparse_lavida_jax.tags import FIRST_BLOCK, GIVEN_BLOCK, AnyArray

PAD_POSITION = -1  # fills a step of a row that has fewer tokens than the widest one

# Widths a phase may have: powers of two and the midpoints between them, so that rounding up adds
# at most a half and on average a fifth.
BUCKETS = tuple(sorted({2**i for i in range(17)} | {3 * 2**i for i in range(16)}))

MAX_PHASES = 7
PADDING = 0.125  # share of the tokens

PassesClean = Literal["newest", "all"]


# ---------------------------------------------------------------------------------------------
# Plans: which position is decoded in which step, for every row.


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """Which positions of an image response each step decodes, known before the first step.

    Attributes:
        decode: positions decoded in each step, `PAD_POSITION` where a row has fewer.
        decoded_at: the block in which each position is decoded: `FIRST_BLOCK` + i in step i,
            `GIVEN_BLOCK` if it is given.
    """

    decode: Int[np.ndarray, "k b w"]
    decoded_at: Int[np.ndarray, "b l"]

    @property
    def num_steps(self) -> int:
        return len(self.decode)

    @property
    def block(self) -> Int[np.ndarray, " k"]:
        """The block of each step."""
        return FIRST_BLOCK + np.arange(self.num_steps)


def image_plan(
    cells: Int[np.ndarray, "*b l"],
    *,
    schedule: str,
    num_steps: int,
    shift: float,
    given: Bool[np.ndarray, "b l"] | None = None,
    merge: int = 0,
    first: Sequence[Sequence[int]] | None = None,
) -> SamplingPlan:
    """Returns the plan that decodes `cells` in order, except the given ones.

    Every row gets the counts for its own number of cells. A row with fewer cells than `num_steps`
    finishes before the others: its last steps are padding.

    Args:
        cells: an order; one for all rows or one per row. Without `given`, one means one row.
        given: cells known beforehand.
        merge: the least number of cells that a step decodes (`merged`).
        first: for each row, the cells that the first step decodes; none: those of the order.
    """
    if given is None:
        given = np.zeros((len(cells) if cells.ndim == 2 else 1, cells.shape[-1]), bool)
    batch, length = given.shape
    cells = np.broadcast_to(cells, (batch, length))
    begin = [
        [cell for cell in (first[row] if first else ()) if not given[row, cell]]
        for row in range(batch)
    ]
    per_row = [
        merged(counts_after(len(own), schedule, num_steps, int(n), shift), merge)
        for own, n in zip(begin, (~given).sum(axis=1), strict=True)
    ]
    steps = max((len(row) for row in per_row), default=0)
    width = max((int(row.max(initial=0)) for row in per_row), default=0)
    decode = np.full((steps, batch, width), PAD_POSITION, np.int32)
    decoded_at = np.full((batch, length), GIVEN_BLOCK, np.int32)
    for row, per_step in enumerate(per_row):
        wanted = begun(cells[row][~given[row, cells[row]]], begin[row])
        step = np.repeat(np.arange(len(per_step)), per_step)
        slot = np.arange(len(wanted)) - (np.cumsum(per_step) - per_step)[step]
        decode[step, row, slot] = wanted
        decoded_at[row, wanted] = FIRST_BLOCK + step
    return SamplingPlan(decode, decoded_at)


# ---------------------------------------------------------------------------------------------
# Phases: consecutive steps of one width, each compiled as one loop.


@flax.struct.dataclass
class Steps:
    """Consecutive steps whose arrays have the same widths: a phase, which is one compiled loop.

    All positions count within the response; `PAD_POSITION` fills up. Arrays have an entry for each
    step, and `steps[i]` is one step, whose arrays lack that axis. The other fields hold for all
    steps and are compiled in.

    Attributes:
        block: block of each step.
        clean: decoded tokens that are passed (again); they are stored if responses are cached.
        decode: tokens that the step predicts; of a text, some may be decoded already.
        candidates: which codes of `decode` it may commit; with one entry per token, all codes of
            the token are committed together.
        rest: other tokens that it passes: masked, or known in part.
        count: how many candidates each row commits. For a text row whose block holds fewer masked
            tokens than there are steps, 0 at the end.
        noise: scale of the noise on the confidence.
        temperature: share of the temperature.
        guidance: share of the guidance scales.
        guided: whether guidance acts.
        refreshes: whether a step passes the prompt and refills the cache.
        registers: how many a step passes.
        reach: how many slots of the decoded stream's region of the cache a step reads; None: all.
    """

    block: Int[AnyArray, "*n"]
    clean: Int[AnyArray, "*n b wc"]
    decode: Int[AnyArray, "*n b w"]
    candidates: Bool[AnyArray, "*n b w u"]
    rest: Int[AnyArray, "*n b wr"]
    count: Int[AnyArray, "*n b"]
    noise: Float[AnyArray, "*n"]
    temperature: Float[AnyArray, "*n"]
    guidance: Float[AnyArray, "*n"]
    guided: bool = flax.struct.field(pytree_node=False, default=True)
    refreshes: bool = flax.struct.field(pytree_node=False, default=False)
    registers: int = flax.struct.field(pytree_node=False, default=0)
    reach: int | None = flax.struct.field(pytree_node=False, default=None)

    def __getitem__(self, item: Any) -> "Steps":
        return jax.tree.map(lambda x: x[item], self)

    @property
    def num_steps(self) -> int:
        return len(self.block)

    @property
    def width(self) -> int:
        """The slots of a step, registers included."""
        positions = self.clean, self.decode, self.rest
        return sum(part.shape[-1] for part in positions) + self.registers

    def tokens(self) -> Int[np.ndarray, "n b 3"]:
        """Returns how many tokens each step passes of each row: clean, to decode, and others."""
        positions = self.clean, self.decode, self.rest
        return np.stack([(part != PAD_POSITION).sum(axis=-1) for part in positions], axis=-1)

    def dense(self, positions: Int[np.ndarray, "b l"]) -> "Steps":
        """Returns steps that each pass these positions, and no registers."""
        decode = np.repeat(positions[None], self.num_steps, axis=0)
        parts = {"clean": decode[..., :0], "decode": decode, "rest": decode[..., :0]}
        return dataclasses.replace(self, **parts, candidates=decode[..., None] >= 0, registers=0)


def first_row(phases: Sequence[Steps]) -> list[Steps]:
    """Returns the phases of the first row alone."""
    by_row = ("clean", "decode", "candidates", "rest", "count")
    return [
        dataclasses.replace(phase, **{name: getattr(phase, name)[:, :1] for name in by_row})
        for phase in phases
    ]


def cut(phases: Sequence[Steps], blocks: Sequence[int]) -> Iterator[tuple[int, Steps]]:
    """Yields the parts of phases between some blocks, with the number of steps before each."""
    before = 0
    for phase in phases:
        inner = np.searchsorted(phase.block, blocks).tolist()
        for start, stop in itertools.pairwise(sorted({0, phase.num_steps, *inner})):
            whole = stop - start == phase.num_steps
            yield before + start, phase if whole else phase[start:stop]
        before += phase.num_steps


def in_groups(phase: Steps, multiple: int) -> Steps:
    """Returns a phase whose steps pass a multiple of so many tokens, registers included."""
    if not (missing := -phase.width % multiple):
        return phase
    fill = ((0, 0), (0, 0), (0, missing))
    rest = np.pad(phase.rest, fill, constant_values=PAD_POSITION)
    return dataclasses.replace(phase, rest=rest)


def _phase(
    block: Int[np.ndarray, " n"],
    decode: Int[np.ndarray, "n b w"],
    count: Int[np.ndarray, "n b"],
    *,
    clean: Int[np.ndarray, "n b wc"] | None = None,
    rest: Int[np.ndarray, "n b wr"] | None = None,
    candidates: Bool[np.ndarray, "n b w u"] | None = None,
) -> Steps:
    """Returns a phase without noise on confidences, and without registers.

    By default it passes nothing but `decode`, all of which are candidates.
    """
    steps, nothing = len(block), np.zeros((*decode.shape[:2], 0), np.int32)
    return Steps(
        block.astype(np.int32),
        nothing if clean is None else clean,
        decode,
        np.ones((*decode.shape, 1), bool) if candidates is None else candidates,
        nothing if rest is None else rest,
        count,
        noise=np.zeros(steps, np.float32),
        temperature=np.ones(steps, np.float32),
        guidance=np.ones(steps, np.float32),
    )


def with_steps(parts: list[Steps], **of_steps: Shaped[np.ndarray, " k"]) -> list[Steps]:
    """Returns the phases with the values that change from step to step.

    They are cut where guidance starts or stops and where the number of registers changes.

    Args:
        of_steps: guided, noise, temperature, guidance, registers; see `Steps`. Steps beyond their
            end have the last values.
    """
    number = sum(part.num_steps for part in parts)
    arrays = {
        name: values[np.minimum(np.arange(number), len(values) - 1)]
        for name, values in of_steps.items()
    }
    statics = {name: arrays.pop(name) for name in ("guided", "registers") if name in arrays}
    turns = {int(i) + 1 for values in statics.values() for i in np.flatnonzero(np.diff(values))}
    result, start = [], 0
    for part in parts:
        stop = start + part.num_steps
        bounds = sorted({start, stop} | turns & {*range(start, stop)})
        for i, j in itertools.pairwise(bounds):
            own = {name: values[i:j] for name, values in arrays.items()}
            own |= {name: values[i].item() for name, values in statics.items()}
            result.append(dataclasses.replace(part[i - start : j - start], **own))
        start = stop
    return result


def phases(
    plan: SamplingPlan,
    *,
    passes_clean: PassesClean,
    passes_rest: bool,
    buckets: Sequence[int] = BUCKETS,
    max_phases: int = MAX_PHASES,
    padding: float = PADDING,
) -> list[Steps]:
    """Groups the steps of an image plan into a few phases of bucketed widths.

    The trade-off: every phase costs a compilation and a launch, every token of padding costs work
    in every layer. Consider all ways to cut the steps into at most `max_phases`. Of those that
    pass at most a share `padding` more tokens than the best one, the one with the fewest phases
    is taken. 64 steps over 1024 cells at shift 5 become 5 phases.

    Args:
        passes_clean: "newest": what the previous step decoded (the cache holds the rest); "all":
            everything decoded so far. Given cells are always in the prompt's pass.
        passes_rest: whether masked positions outside the step are passed too (no truncation).
        buckets: allowed widths except 0, ascending.
        padding: as a share of the tokens.
    """
    # [k b l] each; a plan on the host is small.
    at, block = plan.decoded_at[None], plan.block[:, None, None]
    is_clean = at == block - 1 if passes_clean == "newest" else at < block
    clean = _positions(is_clean & (at >= FIRST_BLOCK))
    rest = _positions((at > block) & passes_rest)
    parts = [(part, _used(part)) for part in (clean, plan.decode, rest)]
    widths = np.stack([used.max(axis=1) for _, used in parts], axis=1)
    bucketed, count, result = _bucketed(widths, buckets), parts[1][1], []
    for start, stop in _cuts(bucketed, max_phases, padding):
        own = bucketed[start:stop].max(axis=0).tolist()
        clean, decode, rest = (
            _fit(part[start:stop], width) for (part, _), width in zip(parts, own, strict=True)
        )
        steps = block[start:stop, 0, 0]
        result.append(_phase(steps, decode, count[start:stop], clean=clean, rest=rest))
    return result


def code_phases(
    plan: SamplingPlan, h: int, w: int, side: int, *, by_confidence: bool = False
) -> list[Steps]:
    """Groups the steps of a plan over the codes of an image; every step passes all its cells.

    This is LaViDa-O's sampler: a step commits single codes, and a cell may be known in part. The
    cells that hold a code of the step are in `decode`, filled up with other cells to the width of
    the phase, so that nothing is padded and the head is computed for few cells. Given cells are
    in the prompt's pass.

    Args:
        plan: of the `h * side` x `w * side` codes, in raster order.
        h, w: grid of cells.
        side: codes along one side of a cell; 1: a plan over whole cells.
        by_confidence: the step chooses after its pass among all masked codes; the plan decides
            only how many it commits.
    """
    batch = len(plan.decoded_at)
    at = cells_from_codes(plan.decoded_at.reshape(batch, h * side, w * side), side)
    block = plan.block
    is_open = (at != GIVEN_BLOCK).any(axis=-1)
    passed = _positions(is_open[None])
    if by_confidence:
        decode = np.broadcast_to(passed, (plan.num_steps, *passed.shape[1:]))
        candidates = np.ones((*decode.shape, at.shape[-1]), bool)
        whole = _phase(block, decode, _used(plan.decode), candidates=candidates)
        return [whole] if plan.num_steps else []
    now = at[None] == block[:, None, None, None]  # [k b l g]
    touched = now.any(axis=-1)
    # The touched cells of each step, then the others, then the given ones.
    sorted_cells = np.argsort(np.where(is_open, 1, 2)[None] - touched, axis=-1, kind="stable")
    sorted_cells = sorted_cells[..., : passed.shape[-1]].astype(np.int32)
    is_open = np.take_along_axis(np.broadcast_to(is_open, touched.shape), sorted_cells, axis=-1)
    positions = np.where(is_open, sorted_cells, np.int32(PAD_POSITION))
    widths = np.zeros((plan.num_steps, 3), int)
    widths[:, 1] = touched.sum(axis=-1).max(axis=1, initial=0)
    bucketed, result = _bucketed(widths, BUCKETS), []
    for start, stop in _cuts(bucketed, MAX_PHASES, PADDING):  # only the head works on padding
        width = min(int(bucketed[start:stop].max()), positions.shape[-1])
        decode, rest = np.split(positions[start:stop], [width], axis=-1)
        own = sorted_cells[start:stop, :, :width, None]
        candidates = np.take_along_axis(now[start:stop], own, axis=2)
        count = candidates.sum(axis=(-1, -2)).astype(np.int32)
        part = _phase(block[start:stop], decode, count, rest=rest, candidates=candidates)
        result.append(part)
    return result


def in_passes(parts: list[Steps], passes: int, side: int, *, clean_once: bool) -> list[Steps]:
    """Returns phases over whole cells with every step split into passes over the cells' codes.

    All passes of a step have its block: later passes see what earlier ones decoded, and nothing is
    stored before the next step. Codes with an even sum of row and column come first.

    Args:
        passes: a divisor of the codes of a cell.
        side: codes along one side of a cell.
        clean_once: whether clean tokens are stored, so that only the first pass has them.
    """
    if passes == 1:
        return parts
    y, x = np.divmod(np.arange(side**2), side)
    rank = np.argsort(np.argsort((y + x) % 2, kind="stable"))
    result = []
    for part in parts:
        again = part[np.repeat(np.arange(part.num_steps), passes)]
        now = np.tile(np.arange(passes), part.num_steps)[:, None, None]
        candidates = again.candidates & (now[..., None] == rank * passes // side**2)
        again = dataclasses.replace(again, candidates=candidates)
        if clean_once:
            clean = np.where(now == 0, again.clean, np.int32(PAD_POSITION))
            again = dataclasses.replace(again, clean=clean)
        result.append(again)
    return result


def _cuts(widths: Int[np.ndarray, "k 3"], max_phases: int, padding: float) -> list[tuple[int, int]]:
    """Returns the bounds of the phases, by dynamic programming over the last cut.

    Args:
        widths: of the parts of each step, already those of buckets: the bucket of the widest step
            of a phase is the widest of their buckets.
    """
    steps = len(widths)
    cost = np.full((steps + 1, steps + 1), np.inf)  # [i, j]: of a phase of the steps i to j - 1
    for i in range(steps):
        widest = np.maximum.accumulate(widths[i:], axis=0)
        cost[i, i + 1 :] = np.arange(1, steps - i + 1) * widest.sum(axis=1)
    best = np.full(steps + 1, np.inf)  # of splitting the first j steps into s phases
    best[0] = 0
    totals, starts = [], []
    for _ in range(min(max_phases, steps)):
        by_start = best[:, None] + cost
        starts.append(by_start.argmin(axis=0))
        best = by_start.min(axis=0)
        totals.append(best[steps])
    if not totals:
        return []
    fewest = next(s for s, total in enumerate(totals) if total <= min(totals) * (1 + padding))
    bounds, stop = [], steps
    for start_of in reversed(starts[: fewest + 1]):
        bounds.append((int(start_of[stop]), stop))
        stop = int(start_of[stop])
    return bounds[::-1]


def _bucketed(widths: Int[np.ndarray, "k 3"], buckets: Sequence[int]) -> Int[np.ndarray, "k 3"]:
    """Returns the smallest allowed widths that are large enough; 0 stays 0."""
    if too_wide := widths[widths > buckets[-1]].tolist():
        raise ValueError(
            f"a step holds {too_wide[0]} tokens, the widest bucket {buckets[-1]}: add one."
        )
    allowed = np.array([0, *buckets])
    return allowed[np.searchsorted(allowed, widths)]


def _positions(chosen: Bool[np.ndarray, "n b l"]) -> Int[np.ndarray, "n b w"]:
    """Returns the indices of the chosen positions of each row, ascending, padded at the end."""
    used = chosen.sum(axis=-1, keepdims=True)
    packed = np.full((*chosen.shape[:-1], used.max(initial=0)), PAD_POSITION, np.int32)
    packed[np.arange(packed.shape[-1]) < used] = np.flatnonzero(chosen) % chosen.shape[-1]
    return packed


def _used(part: Int[np.ndarray, "n b w"]) -> Int[np.ndarray, "n b"]:
    return (part != PAD_POSITION).sum(axis=-1).astype(np.int32)


def _fit(part: Int[np.ndarray, "n b w"], width: int) -> Int[np.ndarray, "n b w2"]:
    """Returns `part` with its last axis cut or padded to `width`."""
    short = max(width - part.shape[-1], 0)
    padded = np.pad(part, ((0, 0), (0, 0), (0, short)), constant_values=PAD_POSITION)
    return padded[..., :width]


def text_plan(
    length: int,
    block_len: int,
    steps_per_block: int,
    given: Bool[np.ndarray, "b l"] | None = None,
    *,
    schedule: str = "even",
    shift: float = 1.0,
    block_order: Sequence[int] | None = None,
    **passes: Any,
) -> list[Steps]:
    """Returns the phases of a text response: its text blocks, from left to right by default.

    Which tokens of the text block a step commits is known only after its forward pass; the plan
    says how many: an even split with the remainder in the earliest steps, or those of a schedule,
    as released (spec Sec. 6). Step numbers continue from text block to text block. A text block in
    which no row has anything masked is left out.

    Args:
        length: tokens of the response, a whole number of text blocks.
        steps_per_block: at most this many; fewer where fewer tokens are masked.
        given: tokens known beforehand; by default one row without any.
        schedule: "even", or one of `orders.SCHEDULES` with its `shift`.
        block_order: the text blocks in the order of their decoding; by default 0, 1, ...
        passes: fields of `TextPasses`.

    Raises:
        ValueError: `length` is not a whole number of text blocks, a number is below 1, or
            `block_order` does not hold every text block once.
    """
    if min(length, block_len, steps_per_block) < 1 or length % block_len:
        raise ValueError(
            f"a text response is a whole number of text blocks, got {length=}, {block_len=},"
            f" {steps_per_block=}. Pad the response with end-of-text to a multiple of block_len."
        )
    num_blocks = length // block_len
    visited = list(range(num_blocks) if block_order is None else block_order)
    if sorted(visited) != list(range(num_blocks)):
        raise ValueError(
            f"a block order holds each of the {num_blocks} text blocks once, counted from 0, got"
            f" {visited}."
        )
    masked = ~given if given is not None else np.ones((1, length), bool)
    turn = np.argsort(visited)[np.arange(length) // block_len]  # of the text block of each position
    asked, plan = TextPasses(**passes), []
    newest = np.zeros_like(masked)  # decoded in the previous text block
    for i in range(num_blocks):
        own = masked & (turn == i)
        count = _text_counts(own.sum(axis=1), steps_per_block, schedule, shift)
        if len(count):
            # The numbers ignore what is given, so that a row's noise does not depend on other rows.
            blocks = FIRST_BLOCK + i * steps_per_block + np.arange(len(count))
            plan += asked.text_block(blocks, count, masked, turn - i, newest, block_len)
            newest = own
    return plan


@dataclasses.dataclass(frozen=True)
class TextPasses:
    """What the steps of a text block pass in addition to its own tokens.

    With `passes_clean="newest"` only the first step of a text block passes the positions of the
    previous one, so that step is a phase of its own: two phases per text block. (The first text
    block has the same two shapes, with padding for clean tokens, so that it needs no further
    compilation.) Clean tokens of the current text block are in `decode`, and every step computes
    them again.

    Attributes:
        passes_clean: "newest": the previous text block; "all": all previous ones, in every step.
        passes_rest: whether text blocks to be decoded later are passed too, masked.
        given_in_steps: whether given tokens are passed like all others; otherwise they are in the
            prompt's pass.
        refreshes: Fast-dLLM's caches. The first step of a text block is a phase of its own that
            passes everything; what it has in `clean` stays in the cache for the other steps:
            the text blocks decoded before, and without `passes_rest` also those decoded later.
        leftovers: every step passes and predicts the whole response, and may commit any masked
            token of this text block and the ones before it: as released, where the mask token
            itself may be drawn.
    """

    passes_clean: PassesClean = "newest"
    passes_rest: bool = False
    given_in_steps: bool = False
    refreshes: bool = False
    leftovers: bool = False

    def text_block(
        self,
        block: Int[np.ndarray, " n"],
        count: Int[np.ndarray, "n b"],
        masked: Bool[np.ndarray, "b l"],
        later: Int[np.ndarray, " l"],
        newest: Bool[np.ndarray, "b l"],
        block_len: int,
    ) -> list[Steps]:
        """Returns the phases of one text block.

        Args:
            block, count: of each step.
            masked: tokens of the response that are not given.
            later: for each position, how many text blocks later than this one it is decoded.
            newest: tokens that the previous text block decoded.
        """
        steps, length = len(block), masked.shape[1]
        passed = masked | self.given_in_steps
        if self.leftovers:
            decode = _repeat(passed, steps, length)
            return [_phase(block, decode, count, candidates=(later <= 0)[decode][..., None])]
        decode = _repeat(passed & (later == 0), steps, block_len)
        before = int((later < 0).sum())
        rest_len = (length - before - block_len) * self.passes_rest
        rest = _repeat(passed & (later > 0) & self.passes_rest, steps, rest_len)
        if self.refreshes and not self.passes_rest:
            clean, width = passed & (later != 0), length - block_len
        elif self.refreshes or self.passes_clean == "all":
            clean, width = passed & (later < 0), before
        else:
            clean, width = newest, block_len if length > block_len else 0
        clean = _repeat(clean, steps, width)
        whole = _phase(block, decode, count, clean=clean, rest=rest)
        if not self.refreshes and (self.passes_clean == "all" or length == block_len):
            return [whole]
        # Only the first step passes clean tokens.
        first, others = whole[:1], whole[1:]
        first = dataclasses.replace(first, refreshes=self.refreshes)
        others = dataclasses.replace(others, clean=others.clean[..., :0])
        return [first, others] if steps > 1 else [first]


def _text_counts(
    masked: Int[np.ndarray, " b"], most: int, schedule: str, shift: float
) -> Int[np.ndarray, "n b"]:
    """Returns how many tokens each step commits in each row of a text block."""
    steps = min(most, int(masked.max()))
    if schedule == "even":
        step = np.arange(steps)[:, None]
        return (masked // max(steps, 1) + (step < masked % max(steps, 1))).astype(np.int32)
    per_row = [counts(schedule, steps, int(n), shift) for n in masked] if steps else []
    count = np.zeros((steps, len(masked)), np.int32)
    for row, per_step in enumerate(per_row):
        count[: len(per_step), row] = per_step
    return count


def _repeat(chosen: Bool[np.ndarray, "b l"], steps: int, width: int) -> Int[np.ndarray, "n b w"]:
    return np.repeat(_fit(_positions(chosen[None]), width), steps, axis=0)
