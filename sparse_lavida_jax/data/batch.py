# SPDX-License-Identifier: Apache-2.0
"""From examples to the arrays of a training pass: rows, shared rows, and batches.

`make_row` lays an example out and draws its blocks. `TrainingRow.batch` masks rows, sorts and pads
them, and stacks them to `Corrupted`, which is what the loss takes.

Several short examples may share a row (`data.packing`). Each is a segment that sees itself alone
(`visibility.visible`), so a packed batch has the losses and gradients of its examples in rows of
their own. Packing comes last on the host: what training leaves out of a sequence is gone by then.
The number of examples of a row is fixed, which keeps the number of rows and of images static;
which examples meet is chosen so that all rows end up about as long.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.diffusion import ABSENT, Blocks, Corrupted, CorruptedRow, Predicts, Tokens
from sparse_lavida_jax.layout import NO_CELL, Stream, make_layout, sort_by_block, without_blocks
from sparse_lavida_jax.sequence import (
    Kind,
    PromptRow,
    Response,
    SeenBatch,
    Views,
    prompt_row,
    stack_images,
    stack_views,
    stacked_features,
)
from sparse_lavida_jax.visibility import PAD_BLOCK

ORDER_SEEDS = 512  # training draws the seed of an unmasking order below this

Shared = Sequence[Sequence[int]]  # the examples of every row


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Token counts of an example, or of a row: of the understanding and the generation stream."""

    understanding: int
    generation: int

    def holds(self, other: "RowShape") -> bool:
        return other.understanding <= self.understanding and other.generation <= self.generation


@dataclasses.dataclass(frozen=True)
class GroupShape:
    """The static shape of the batches of a group of examples.

    Attributes:
        example: tokens that an example may have.
        views: of the vision tower, likewise; 0 where examples have one image at most, of one view.
        predicts: the streams that hold responses.
        rows: tokens of the rows of a batch, the smallest first.
    """

    example: RowShape
    views: int
    predicts: Predicts
    rows: tuple[RowShape, ...]


@runtime_checkable
class Row(Protocol):
    """What a batch is made of: a `TrainingRow`, or a row of another objective."""

    @property
    def length(self) -> RowShape:
        """How many tokens it may have in each stream."""
        ...

    @property
    def views(self) -> tuple[Views, ...]:
        """The views of its images, where they may be several."""
        ...

    @property
    def kinds(self) -> frozenset[Kind]:
        """What it predicts."""
        ...

    @staticmethod
    def batch(rows: list, shape: GroupShape, settings: config.Config) -> Corrupted | None:
        """Returns rows of this kind as one batch; None where they do not fit `shape` together."""
        ...


# ---------------------------------------------------------------------------------------------
# From an example to a row.


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """An example in one training pass: laid out, and its blocks drawn. A `Row`.

    Attributes:
        example: what it is made of.
        prompt: the tokens of block 0, some of them dropped.
        blocks: of the response.
        registers: of each masked block.
    """

    example: Example
    prompt: PromptRow
    blocks: Blocks
    registers: int

    @property
    def length(self) -> RowShape:
        """How many tokens it has in each stream."""
        blocks = self.blocks
        response = int((blocks.block != ABSENT).sum()) + self.registers * len(blocks.masked_blocks)
        text, image = len(self.prompt.ids), len(self.prompt.codes)
        if self.example.kind == "text":
            return RowShape(text + response, image)
        return RowShape(text, image + response)

    @property
    def views(self) -> tuple[Views, ...]:
        """The views of its images, where they may be several."""
        return self.example.views

    @property
    def kinds(self) -> frozenset[Kind]:
        """What it predicts."""
        return frozenset({self.example.kind})

    @staticmethod
    def batch(
        rows: "list[TrainingRow]", shape: GroupShape, settings: config.Config
    ) -> Corrupted | None:
        """Returns rows as one batch, `data.packing` of them in each row of it.

        Returns None where they do not fit `shape` together.
        """
        per_row, model = settings.data.packing, settings.model
        lengths = [row.length for row in rows]
        shared = deal(lengths, per_row) if per_row > 1 else _alone(rows)
        fullest = longest(lengths, shared)
        tokens = next((room for room in shape.rows if room.holds(fullest)), None)
        if tokens is None:
            return None
        if per_row > 1 or shape.views:
            rows, pixels = _see_together(rows, shared, shape.views, model.vision)
        else:
            pixels = stack_images([row.example.pixels for row in rows])
        return stack(
            [corrupt(row, model) for row in rows],
            tokens,
            model,
            full_attention=settings.diffusion.attention != "step_causal",
            shared=shared if per_row > 1 else None,
            pixels=pixels,
            predicts=shape.predicts,
        )


def make_row(example: Example, settings: config.Config, rng: np.random.Generator) -> TrainingRow:
    """Returns the row of an example: what is given, its blocks, and what is dropped, at random."""
    given = given_of(example, settings, rng)
    blocks = _blocks(example, given, settings, rng)
    model, attention = settings.model, settings.diffusion.attention
    codes = model.codes_per_token
    if settings.diffusion.partial_cells:
        blocks = diffusion.partly_known(rng, blocks, example.kind, codes, settings.diffusion)
    if settings.data.edit_area_weight > 1:  # then the rows of a batch all have weights by code
        weight = example.code_weight
        weight = np.ones((len(example.response), codes)) if weight is None else weight
        blocks = dataclasses.replace(blocks, code_weight=weight)
    prompt = prompt_row(
        example.parts,
        text_mask_id=model.text_mask_id,
        codes_per_token=codes,
        drop_prompt=rng.random() < settings.data.prompt_drop,
        drop_source=rng.random() < settings.data.source_drop,
    )
    length = prompt.length + _room_after(example, settings.data, rng)
    registers = 0 if attention == "full" else model.num_registers
    return TrainingRow(example, dataclasses.replace(prompt, length=length), blocks, registers)


def _room_after(example: Example, data: config.Data, rng: np.random.Generator) -> int:
    """Returns how many tokens longer the text may be that a sampler writes, in whole text blocks.

    They are masked and in no block, so that all they move is the registers. Any doubling of the
    length, up to `data.sampled_answer_len`, is as likely as any other. An image, and a text that
    something follows (a box), are as long as they are; then nothing is drawn.
    """
    length, block, longest = len(example.response), data.text_block_len, data.sampled_answer_len
    is_open = example.kind == "text" and isinstance(example.parts[-1], Response)
    if not is_open or longest < length + block:
        return 0
    drawn = length * ((longest + block) / length) ** rng.random()
    return int(min(drawn, longest) - length) // block * block


def given_of(
    example: Example, settings: config.Config, rng: np.random.Generator
) -> Bool[np.ndarray, " l"]:
    """With probability `given`, a random rectangle or set of spans is shown as given."""
    given = example.given
    if given.any() or rng.random() >= settings.data.given:
        return given
    if example.kind == "image":
        side = settings.model.grid_size
        (y0, y1), (x0, x1) = (np.sort(rng.integers(0, side + 1, 2)) for _ in range(2))
        shown = np.zeros((side, side), bool)
        shown[y0:y1, x0:x1] = True
        shown = shown.reshape(-1) ^ (rng.random() < 0.5)
    else:
        # A span of the part that is decoded; a prefix or a suffix are spans too.
        start, stop = np.sort(rng.integers(0, example.reach + 1, 2))
        shown = np.zeros(len(given), bool)
        shown[start:stop] = True
    return given if shown[: example.reach].all() else shown


def _blocks(
    example: Example,
    given: Bool[np.ndarray, " l"],
    settings: config.Config,
    rng: np.random.Generator,
) -> Blocks:
    if settings.diffusion.blocks == "uniform" or settings.diffusion.attention == "full":
        return diffusion.uniform_blocks(rng, given, settings.diffusion)
    if example.kind == "text":
        steps = int(rng.choice(settings.diffusion.plan_text_steps))
        return diffusion.text_schedule_blocks(
            rng, example.reach, settings.data.text_block_len, steps, given, settings.diffusion
        )
    side, sampling = settings.model.grid_size, settings.sampling
    cells = orders.order(sampling.order, side, side, int(rng.integers(ORDER_SEEDS)))
    cells = cells[~given[cells]]
    steps = int(rng.choice(settings.diffusion.plan_steps))
    sizes = orders.counts(sampling.schedule, steps, len(cells), sampling.shift)
    merge = settings.diffusion.merge_cells
    merge = settings.model.num_registers if merge < 0 else merge
    return diffusion.schedule_blocks(rng, cells, sizes, given, settings.diffusion, merge)


# ---------------------------------------------------------------------------------------------
# From rows to a batch.


def corrupt(row: TrainingRow, model: config.Model) -> CorruptedRow:
    """Returns the masked tokens of a row; see `diffusion.corrupt`."""
    example = row.example
    return diffusion.corrupt(
        row.prompt,
        example.response,
        example.kind,
        row.blocks,
        model,
        full_attention=row.registers == 0,
    )


def _see_together(
    rows: list[TrainingRow], shared: Shared, most: int, vision: config.Vision
) -> tuple[list[TrainingRow], SeenBatch | None]:
    """Returns rows with their features numbered as in the stacked views, and those views.

    Args:
        most: views of an example, filled up with blanks; more where an example has more.
    """
    pixels = [row.example.pixels for row in rows]
    views = [
        row.views or (() if image is None else (image[None],))
        for row, image in zip(rows, pixels, strict=True)
    ]
    most = max(most, *(sum(map(len, own)) for own in views))
    seen = [with_blanks(own, most, vision) for own in views]
    numbered = list(rows)
    for members in shared:
        count = most * len(members)
        for place, i in enumerate(members):
            feature = stacked_features(
                rows[i].prompt.feature,
                tuple(map(len, views[i])),
                count,
                vision.num_tokens,
                newline=vision.newline,
            )
            # After the features of all views comes the newline that the whole row shares.
            of_view = (feature >= 0) & (feature < count * vision.num_tokens)
            feature = np.where(of_view, feature + place * most * vision.num_tokens, feature)
            prompt = dataclasses.replace(rows[i].prompt, feature=feature)
            numbered[i] = dataclasses.replace(rows[i], prompt=prompt)
    return numbered, stack_views([tuple(v for i in members for v in seen[i]) for members in shared])


def with_blanks(views: tuple[Views, ...], most: int, vision: config.Vision) -> tuple[Views, ...]:
    """Returns the views of an example and as many blank ones as make `most`."""
    missing = most - sum(map(len, views))
    if not missing:
        return views
    like = views[0] if views else np.zeros((0, vision.image_size, vision.image_size, 3), np.uint8)
    return (*views, np.zeros((missing, *like.shape[1:]), like.dtype))


def stack(
    rows: Sequence[CorruptedRow],
    shape: RowShape,
    model: config.Model,
    *,
    full_attention: bool = False,
    shared: Shared | None = None,
    pixels: SeenBatch | None = None,
    predicts: Predicts | None = None,
) -> Corrupted:
    """Sorts each row by block, pads it to `shape` and stacks the rows.

    Args:
        full_attention: put every token into block 0.
        shared: which of `rows` share each row of the batch, as segments; by default each has
            its own.
        pixels: what the vision tower sees.
        predicts: the streams that hold responses; by default those of the rows.

    Raises:
        ValueError: a row is longer than `shape`.
    """
    in_row = shared or _alone(rows)

    def stream(side: str, length: int, pad_token: int):
        if not length:
            return None, None, None
        tokens = [getattr(row, side) for row in rows]
        padded = [
            _sorted_and_padded([tokens[i] for i in members], length, pad_token)
            for members in in_row
        ]
        made = {name: np.stack([row[name] for row in padded]) for name in padded[0]}
        segment = None if shared is None else made["segment"]
        layout = make_layout(made["position"], made["block"], made["last_clean"], segment)
        layout = without_blocks(layout) if full_attention else layout
        return Stream(made["tokens"], made["index"], layout), made["target"], made["weight"]

    def total(side: str):
        each = [getattr(row, f"{side}_total") for row in rows]
        return np.array([sum(each[i] for i in members) for members in in_row], np.float32)

    understanding, text_target, text_weight = stream(
        "text", shape.understanding, model.end_of_text_id
    )
    generation, image_target, image_weight = stream("image", shape.generation, model.image_mask_id)
    found: set[Predicts] = {row.predicts for row in rows}
    return Corrupted(
        understanding,
        generation,
        pixels,
        text_target,
        text_weight,
        image_target,
        image_weight,
        total("text"),
        total("image"),
        predicts or (found.pop() if len(found) == 1 else "both"),
    )


def _sorted_and_padded(members: list[Tokens], length: int, pad_token: int) -> dict[str, np.ndarray]:
    """Returns one stream of one row of a batch: fields of `Tokens`, and whose segment each is."""
    stream = functools.reduce(operator.add, members)
    segment = np.repeat(np.arange(len(members)), [len(member.block) for member in members])
    count = len(stream.block)
    if count > length:
        raise ValueError(
            f"a row has {count} tokens and its group holds {length}: raise data.max_prompt_len or"
            " data.max_answer_len."
        )
    by_block = sort_by_block(stream.block, segment)

    def padded(values, fill):
        missing = ((0, length - count),) + ((0, 0),) * (values.ndim - 1)
        dtype = np.float32 if values.dtype.kind == "f" else np.int32
        return np.pad(values[by_block], missing, constant_values=fill).astype(dtype)

    columns = vars(stream) | {"segment": segment}
    fills = {"tokens": pad_token, "index": NO_CELL, "block": PAD_BLOCK, "segment": len(members)}
    return {name: padded(values, fills.get(name, 0)) for name, values in columns.items()}


# ---------------------------------------------------------------------------------------------
# Which examples share a row, and how long rows are.


def _alone(rows: Sequence) -> Shared:
    return [[i] for i in range(len(rows))]


def deal(lengths: list[RowShape], per_row: int) -> Shared:
    """Returns rows of `per_row` examples each, about equally long: the longest are dealt first.

    Raises:
        ValueError: the examples do not make whole rows.
    """
    if len(lengths) % per_row:
        raise ValueError(
            f"{len(lengths)} examples do not make rows of {per_row}: their number must be a"
            " multiple of data.packing."
        )
    rows: list[list[int]] = [[] for _ in range(len(lengths) // per_row)]
    filled = [0] * len(rows)
    tokens = [shape.understanding + shape.generation for shape in lengths]
    for example in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        free = [row for row in range(len(rows)) if len(rows[row]) < per_row]
        emptiest = min(free, key=lambda row: (filled[row], row))
        rows[emptiest].append(example)
        filled[emptiest] += tokens[example]
    return rows


def longest(lengths: list[RowShape], shared: Shared) -> RowShape:
    """Returns the tokens that the fullest row has in each stream."""
    return RowShape(
        max(sum(lengths[i].understanding for i in row) for row in shared),
        max(sum(lengths[i].generation for i in row) for row in shared),
    )


def buckets(
    lengths: list[RowShape], batch_size: int, per_row: int, count: int, multiple: int
) -> tuple[RowShape, ...]:
    """Returns at most `count` static shapes, each of which holds its share of the batches.

    Batches are made of the lengths given, one after another; the last shape holds all of them.

    Args:
        lengths: of examples that stand for all; taken again from the start to fill a batch.
        batch_size: examples of a batch.
        per_row: examples of a row.
        multiple: tokens; shapes are rounded up to this.
    """
    number = -(-len(lengths) // batch_size)
    lengths = [lengths[i % len(lengths)] for i in range(number * batch_size)]
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    fullest = [longest(batch, deal(batch, per_row)) for batch in batches]
    fullest.sort(key=lambda shape: shape.understanding + shape.generation)
    ends = (int(np.ceil(share * len(fullest))) for share in np.arange(1, count + 1) / count)
    return tuple(dict.fromkeys(longest_of(fullest[:end], multiple) for end in ends))


def longest_of(shapes: Iterable[RowShape], multiple: int) -> RowShape:
    """Returns the shape that holds each of these, rounded up."""
    counts = zip(*map(dataclasses.astuple, shapes), strict=True)
    return RowShape(*(-(-max(each) // multiple) * multiple for each in counts))
