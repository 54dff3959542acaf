# SPDX-License-Identifier: Apache-2.0
"""From examples to the arrays of a training pass: rows, shared rows, and batches.

`make_row` lays out an example and draws its blocks. `TrainingRow.batch` masks rows, sorts and pads
them, and stacks them into `Corrupted`, the input of the loss.

Several short examples may share a row (`data.packing`). Each is a segment that sees only itself
(`visibility.visible`), so a packed batch has the same losses and gradients as its examples in rows
of their own. They are combined by their lengths without the tokens that training leaves out.
The number of examples per row is fixed, which keeps the numbers of rows and of images static;
examples are combined so that all rows have about the same length.
"""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.corrupted_rows import (
    Corrupted,
    CorruptedRow,
    Streams,
    StreamTokens,
    corrupt_together,
)
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.diffusion import Blocks
from sparse_lavida_jax.sequence import (
    Response,
    SeenBatch,
    Views,
    prompt_row,
    stack_images,
    stacked_features,
)
from sparse_lavida_jax.tags import NO_CELL, Stream, StreamNames, make_tags, without_blocks
from sparse_lavida_jax.visibility import PAD_BLOCK

ORDER_SEEDS = 512  # training draws seeds of unmasking orders below this

Shared = Sequence[Sequence[int]]  # the examples of every row


class RowShape(NamedTuple):
    """Token counts of an example or a row in the understanding and the generation stream."""

    understanding: int
    generation: int

    def holds(self, other: "RowShape") -> bool:
        return other.understanding <= self.understanding and other.generation <= self.generation


@dataclasses.dataclass(frozen=True)
class GroupShape:
    """The static shape of the batches of a group of examples.

    Attributes:
        example: most tokens of an example.
        views: most views of an example; 0 if examples have at most one image, with one view.
        predicts: the streams that hold responses.
        rows: possible sizes of the rows of a batch in tokens, the smallest first.
    """

    example: RowShape
    views: int
    predicts: StreamNames
    rows: tuple[RowShape, ...]


@dataclasses.dataclass(frozen=True)
class Row(abc.ABC):
    """An element of a batch; each training objective has a subclass.

    Attributes:
        length: how many tokens it may have in each stream.
        views: of its images, if there may be several.
        predicts: the streams that hold its response.
    """

    length: RowShape
    views: tuple[Views, ...]
    predicts: StreamNames

    @staticmethod
    @abc.abstractmethod
    def batch(rows: list, shape: GroupShape, settings: config.Config) -> Corrupted | None:
        """Returns rows of this kind as one batch; None if they do not fit `shape` together."""


# ---------------------------------------------------------------------------------------------
# From an example to a row.


@dataclasses.dataclass(frozen=True)
class TrainingRow(Row):
    """An example with the blocks that one training pass gives its tokens.

    Attributes:
        example: the clean example.
        blocks: of the response.
        tokens: of both streams, with their blocks, not masked yet; some of the prompt may be
            dropped.
    """

    example: Example
    blocks: Blocks
    tokens: CorruptedRow

    @staticmethod
    def batch(
        rows: "list[TrainingRow]", shape: GroupShape, settings: config.Config
    ) -> Corrupted | None:
        """Returns rows as one batch with `data.packing` of them per row, if they fit."""
        per_row, model = settings.data.packing, settings.model
        lengths = [row.length for row in rows]
        shared = deal(lengths, per_row) if per_row > 1 else alone(rows)
        fullest = longest(lengths, shared)
        tokens = next((room for room in shape.rows if room.holds(fullest)), None)
        if tokens is None:
            return None
        corrupted = [row.tokens for row in rows]
        if per_row > 1 or shape.views:
            views = [row.example.shown for row in rows]
            features = [row.prompt.feature for row in corrupted]
            features, pixels = see_together(features, views, shared, shape.views, model.vision)
            for i, feature in enumerate(features):
                seen = corrupted[i].prompt._replace(feature=feature)
                corrupted[i] = corrupted[i]._replace(prompt=seen)
        else:
            pixels = stack_images([row.example.pixels for row in rows])
        return stack(
            corrupted,
            tokens,
            model,
            full_attention=settings.diffusion.attention != "step_causal",
            shared=shared if per_row > 1 else None,
            pixels=pixels,
            predicts=shape.predicts,
        )


def make_row(example: Example, settings: config.Config, rng: np.random.Generator) -> TrainingRow:
    """Returns a row of an example; given tokens, blocks and dropped parts are drawn at random."""
    given = given_of(example, settings, rng)
    blocks = _blocks_of(example, given, settings, rng)
    model = settings.model
    codes = model.codes_per_token
    if settings.diffusion.partial_cells:
        blocks = diffusion.partly_known(rng, blocks, example.modality, codes, settings.diffusion)
    if settings.data.edit_area_weight > 1:  # then all rows of a batch have weights by code
        weight = example.code_weight
        weight = np.ones((len(example.response), codes)) if weight is None else weight
        blocks = blocks._replace(code_weight=weight)
    prompt = prompt_row(
        example.parts,
        text_mask_id=model.text_mask_id,
        codes_per_token=codes,
        drop_prompt=rng.random() < settings.data.prompt_drop,
        drop_source=rng.random() < settings.data.source_drop,
        room_after=_room_after(example, settings.data, rng),
    )
    without_registers = settings.diffusion.attention == "full"
    tokens = CorruptedRow(
        prompt, example.response, example.modality, blocks, model, without_registers
    )
    length = RowShape(*tokens.lengths)
    return TrainingRow(length, example.views, tokens.predicts, example, blocks, tokens)


def _room_after(example: Example, data: config.Data, rng: np.random.Generator) -> int:
    """Returns how much longer than this response a sampled text may get, in whole text blocks.

    The additional tokens are not part of the row; they only move the positions of the registers.
    The length is drawn log-uniformly up to `data.sampled_answer_len`. Images, and texts that are
    followed by something (boxes), have a fixed length; then nothing is drawn.
    """
    length, block, longest = len(example.response), data.text_block_len, data.sampled_answer_len
    is_open = example.modality == "text" and isinstance(example.parts[-1], Response)
    if not is_open or longest < length + block:
        return 0
    drawn = length * ((longest + block) / length) ** rng.random()
    return int(min(drawn, longest) - length) // block * block


def given_of(
    example: Example, settings: config.Config, rng: np.random.Generator
) -> Bool[np.ndarray, " l"]:
    """With probability `given`, marks a random rectangle, all but one, or a span as given."""
    given = example.given
    if given.nonzero()[0].size or rng.random() >= settings.data.given:
        return given
    if example.modality == "image":
        side = settings.model.grid_size
        (y0, y1), (x0, x1) = (np.sort(rng.integers(0, side + 1, 2)) for _ in range(2))
        shown = np.zeros((side, side), bool)
        shown[y0:y1, x0:x1] = True
        shown = shown.reshape(-1) ^ (rng.random() < 0.5)
    else:
        # A span of the part that is decoded; it may be a prefix or a suffix.
        start, stop = np.sort(rng.integers(0, example.reach + 1, 2))
        shown = np.zeros(len(given), bool)
        shown[start:stop] = True
    left = ~shown if example.learned is None else ~shown & example.learned
    return shown if left[: example.reach].any() else given


def _blocks_of(
    example: Example,
    given: Bool[np.ndarray, " l"],
    settings: config.Config,
    rng: np.random.Generator,
) -> Blocks:
    if settings.diffusion.blocks == "uniform" or settings.diffusion.attention == "full":
        return diffusion.uniform_blocks(rng, given, settings.diffusion)
    if example.modality == "text":
        steps = _pick(rng, settings.diffusion.plan_text_steps)
        return diffusion.semi_autoregressive_blocks(
            rng, example.reach, settings.data.text_block_len, steps, given, settings.diffusion
        )
    side, sampling = settings.model.grid_size, settings.sampling
    cells = orders.order(sampling.order, side, side, int(rng.integers(ORDER_SEEDS)))
    left = ~given if example.learned is None else ~given & example.learned
    cells = cells[left[cells]]
    steps = _pick(rng, settings.diffusion.plan_steps)
    share = settings.diffusion.layout_first if example.first else 0.0
    first = [cell for cell in example.first if left[cell]] if share and rng.random() < share else []
    cells = orders.begun(cells, first)
    sizes = orders.counts_after(len(first), sampling.schedule, steps, len(cells), sampling.shift)
    merge = settings.diffusion.merge_cells
    merge = settings.model.num_registers if merge < 0 else merge
    if settings.diffusion.blocks == "plan":
        return diffusion.plan_blocks(cells, sizes, given, merge)
    return diffusion.schedule_blocks(rng, cells, sizes, given, settings.diffusion, merge)


def _pick(rng: np.random.Generator, choices: Sequence[int]) -> int:
    """Draws one choice as `rng.choice` does, without making an array of the choices."""
    return choices[int(rng.integers(len(choices)))]


# ---------------------------------------------------------------------------------------------
# From rows to a batch.


def see_together(
    features: Sequence[Int[np.ndarray, " _u"]],
    views: list[tuple[Views, ...]],
    shared: Shared,
    most: int,
    vision: config.Vision,
) -> tuple[list[Int[np.ndarray, " _u"]], SeenBatch | None]:
    """Returns the features of rows, numbered for the stacked views, and those views.

    Args:
        features: of the understanding tokens of each row.
        views: of each row; padded with blank views, to which no token refers.
        shared: which rows share each row of the batch.
        most: pad each row to at least this many views; to more if a row has more.
    """
    most, numbered = max(most, *(sum(map(len, own)) for own in views)), [*features]
    if not most:
        return numbered, None
    for members in shared:
        for place, i in enumerate(members):
            numbered[i] = stacked_features(
                features[i],
                tuple(map(len, views[i])),
                most * len(members),
                vision.num_tokens,
                newline=vision.newline,
                before=most * place,
            )
    no_image = np.zeros((1, vision.image_size, vision.image_size, 3), np.uint8)
    blank = np.zeros_like(next((view[:1] for own in views for view in own), no_image))
    seen = [np.concatenate([*own, *[blank] * (most - sum(map(len, own)))]) for own in views]
    return numbered, np.stack([np.concatenate([seen[i] for i in members]) for members in shared])


def stack(
    rows: Sequence[CorruptedRow] | Streams,
    shape: RowShape,
    model: config.Model,
    *,
    full_attention: bool = False,
    shared: Shared | None = None,
    pixels: SeenBatch | None = None,
    predicts: StreamNames | None = None,
) -> Corrupted:
    """Sorts each row by block, pads it to `shape` and stacks the rows.

    Args:
        rows: of examples, or both streams of their tokens.
        full_attention: put every token into block 0.
        shared: which examples share each row of the batch, as segments; by default each has
            its own row.
        pixels: input of the vision tower.
        predicts: the streams that hold responses; by default those of the rows.

    Raises:
        ValueError: a row is longer than `shape`.
    """
    if not isinstance(rows, Streams):
        found: set[StreamNames] = {row.predicts for row in rows}
        predicts = predicts or (found.pop() if len(found) == 1 else "both")
        rows = corrupt_together(rows)
    (understanding, text), (generation, image) = (
        _stacked(
            stream, shared or alone(stream.totals), length, pad_token,
            full_attention=full_attention, by_segment=shared is not None,
        )
        for stream, length, pad_token in zip(
            rows, shape, (model.end_of_text_id, model.image_mask_id), strict=True
        )
    )  # fmt: skip
    return Corrupted(
        understanding=understanding,
        generation=generation,
        pixels=pixels,
        text_target=text.get("target"),
        text_weight=text.get("weight"),
        image_target=image.get("target"),
        image_weight=image.get("weight"),
        text_total=text["total"],
        image_total=image["total"],
        predicts=predicts or "both",
    )


def _stacked(
    stream: StreamTokens,
    shared: Shared,
    length: int,
    pad_token: int,
    *,
    full_attention: bool,
    by_segment: bool,
) -> tuple[Stream | None, dict[str, np.ndarray]]:
    """Returns one stream of a batch, and its stacked fields by name; no stream if length is 0."""
    total = np.array([sum(stream.totals[i] for i in members) for members in shared], np.float32)
    if not length:
        return None, {"total": total}
    made = _sorted_and_padded(stream, shared, length, pad_token, by_segment=by_segment)
    tags = make_tags(made["position"], made["block"], made["last_clean"], made.get("segment"))
    tags = without_blocks(tags) if full_attention else tags
    return Stream(made["tokens"], made["index"], tags), made | {"total": total}


def _sorted_and_padded(
    stream: StreamTokens, shared: Shared, length: int, pad_token: int, *, by_segment: bool
) -> dict[str, np.ndarray]:
    """Returns one stream of a batch: fields of `Tokens`, and perhaps the segment of each token."""
    # The place of each example, counted over the segments of all rows.
    per_row, place = len(shared[0]), np.empty(len(stream.totals), int)
    place[[i for members in shared for i in members]] = np.arange(len(place))
    place = place[stream.example]
    filled = np.bincount(place // per_row, minlength=len(shared))
    if (most := filled.max()) > length:
        raise ValueError(
            f"a row has {most} tokens, and the shape of its batch holds {length}: give a larger"
            " shape, or leave the row out."
        )
    columns = vars(stream.tokens) | ({"segment": place % per_row} if by_segment else {})
    slots = np.empty(len(place), int)
    is_token = np.arange(length) < filled[:, None]
    block = columns["block"]
    by_block = (place * (int(block.max(initial=0)) + 1) + block).argsort(kind="stable")
    slots[by_block] = is_token.reshape(-1).nonzero()[0]
    fills = {"tokens": pad_token, "index": NO_CELL, "block": PAD_BLOCK, "segment": per_row}

    def padded(values, fill):
        dtype = np.float32 if values.dtype.kind == "f" else np.int32
        result = np.full((is_token.size, *values.shape[1:]), fill, dtype)
        result[slots] = values.astype(dtype, copy=False)
        return result.reshape(*is_token.shape, *values.shape[1:])

    return {name: padded(values, fills.get(name, 0)) for name, values in columns.items()}


# ---------------------------------------------------------------------------------------------
# Which examples share a row, and how long rows are.


def alone(rows: Sequence) -> Shared:
    """Returns a grouping with one example per row."""
    return [[i] for i in range(len(rows))]


def deal(lengths: list[RowShape], per_row: int) -> Shared:
    """Groups examples into rows of `per_row`, of about equal length: the longest are dealt first.

    Raises:
        ValueError: the number of examples is not a multiple of `per_row`.
    """
    if len(lengths) % per_row:
        raise ValueError(
            f"{len(lengths)} examples do not make rows of {per_row}: their number must be a"
            " multiple of data.packing."
        )
    rows: list[list[int]] = [[] for _ in range(len(lengths) // per_row)]
    filled = [0] * len(rows)
    for example in sorted(range(len(lengths)), key=lambda i: (-sum(lengths[i]), i)):
        free = [row for row in range(len(rows)) if len(rows[row]) < per_row]
        emptiest = min(free, key=lambda row: (filled[row], row))
        rows[emptiest].append(example)
        filled[emptiest] += sum(lengths[example])
    return rows


def longest(lengths: list[RowShape], shared: Shared) -> RowShape:
    """Returns the largest number of tokens of a row in each stream."""
    of_rows = [
        [sum(side) for side in zip(*[lengths[i] for i in row], strict=True)] for row in shared
    ]
    return RowShape(*map(max, zip(*of_rows, strict=True)))


def buckets(
    lengths: list[RowShape], batch_size: int, per_row: int, count: int, multiple: int
) -> tuple[RowShape, ...]:
    """Returns at most `count` static shapes, each of which fits an equal share of the batches.

    Batches are simulated from the given lengths in order; the last shape fits all of them.

    Args:
        lengths: of a sample of examples; repeated from the start to fill a batch.
        batch_size: examples per batch.
        per_row: examples per row.
        multiple: of tokens, to which shapes are rounded up.
    """
    number = -(-len(lengths) // batch_size)
    lengths = [lengths[i % len(lengths)] for i in range(number * batch_size)]
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    fullest = sorted((longest(batch, deal(batch, per_row)) for batch in batches), key=sum)
    ends = (int(np.ceil(share * len(fullest))) for share in np.arange(1, count + 1) / count)
    return tuple(dict.fromkeys(longest_of(fullest[:end], multiple) for end in ends))


def longest_of(shapes: Iterable[RowShape], multiple: int) -> RowShape:
    """Returns the smallest shape that holds each of these, rounded up."""
    return RowShape(*(-(-max(each) // multiple) * multiple for each in zip(*shapes, strict=True)))
