# SPDX-License-Identifier: Apache-2.0
"""Several short examples in one row, and rows of a few static lengths, so that little is padding.

Each example of a row is a segment that sees itself alone (`visibility.visible`), so a packed batch
has the losses and gradients of its examples in rows of their own. Packing comes last on the host:
what training leaves out of a sequence is gone by then.

The number of examples of a row is fixed (`data.packing`), which keeps the number of rows and of
images static; which examples meet is chosen so that all rows end up about as long.
"""

import dataclasses

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data.rows import Row
from sparse_lavida_jax.diffusion import RowShape
from sparse_lavida_jax.sequence import SeenBatch, Views, stack_views, stacked_features

Shared = list[list[int]]  # the examples of every row


@dataclasses.dataclass(frozen=True)
class Packed:
    """What a batch is made of (`diffusion.batch_rows`).

    Attributes:
        rows: the examples; their vision features are numbered as in `pixels`.
        shared: which of them share each row; None where each has its own.
        shape: of the rows.
        pixels: the views of every row, or None.
    """

    rows: list[Row]
    shared: Shared | None
    shape: RowShape
    pixels: SeenBatch | None


def pack(
    rows: list[Row],
    views: list[tuple[Views, ...]],
    settings: config.Config,
    shapes: tuple[RowShape, ...],
) -> Packed | None:
    """Returns examples in shared rows of the smallest shape that holds them, or None.

    Args:
        rows: the examples; features number the views of each as `Denoiser.see` would, alone.
        views: what the vision tower sees of each example.
        shapes: `buckets`.
    """
    lengths = [length_of(row) for row in rows]
    shared = deal(lengths, settings.data.packing)
    shape = smallest(shapes, longest(lengths, shared))
    if shape is None:
        return None
    per_row, vision = settings.data.packing, settings.model.vision
    if per_row == 1:
        shared = [[i] for i in range(len(rows))]  # as they came
    each = max(sum(map(len, own)) for own in views)
    most = each * per_row
    seen = [with_blanks(own, each, vision) for own in views]
    pixels = stack_views([tuple(view for i in row for view in seen[i]) for row in shared])
    numbered = list(rows)
    for row in shared:
        for place, i in enumerate(row):
            text, image = rows[i]
            index = stacked_features(
                text.index,
                tuple(map(len, views[i])),
                most,
                vision.num_tokens,
                newline=vision.newline,
            )
            # Behind the features of all views is the newline that the whole row shares.
            of_view = (index >= 0) & (index < most * vision.num_tokens)
            index = np.where(of_view, index + place * each * vision.num_tokens, index)
            numbered[i] = (dataclasses.replace(text, index=index), image)
    return Packed(numbered, None if per_row == 1 else shared, shape, pixels)


def check_shared(what: str, examples: int, processes: int, data: config.Data) -> None:
    """Refuses batches that processes cannot share.

    Args:
        what: says where the number of examples comes from.
        examples: of a batch, over all processes.

    Raises:
        ConfigError: they do not divide, or each process would choose a shape of its own.
    """
    if examples % (processes * data.packing):
        rows = f" in rows of data.packing={data.packing}" if data.packing > 1 else ""
        raise config.ConfigError(
            f"{what}: {examples} examples do not divide over {processes} processes{rows}: change"
            " train.batch_size."
        )
    if processes > 1 and data.length_buckets > 1:
        raise config.ConfigError(
            f"data.length_buckets={data.length_buckets}: of {processes} processes each would choose"
            " a length of its own for one batch. Set it to 1."
        )


def length_of(row: Row) -> RowShape:
    """Returns the tokens of an example."""
    return RowShape(*(len(stream.block) for stream in row))


def with_blanks(views: tuple[Views, ...], most: int, vision: config.Vision) -> tuple[Views, ...]:
    """Returns the views of an example and as many blank ones as make `most`."""
    missing = most - sum(map(len, views))
    if not missing:
        return views
    like = views[0] if views else np.zeros((0, vision.image_size, vision.image_size, 3), np.uint8)
    return (*views, np.zeros((missing, *like.shape[1:]), like.dtype))


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
    rows: Shared = [[] for _ in range(len(lengths) // per_row)]
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
    found: list[RowShape] = []
    for share in np.arange(1, count + 1) / count:
        shape = longest_of(fullest[: int(np.ceil(share * len(fullest)))], multiple)
        if shape not in found:
            found.append(shape)
    return tuple(found)


def longest_of(shapes: list[RowShape], multiple: int) -> RowShape:
    """Returns the shape that holds each of these, rounded up."""
    return RowShape(
        *(
            -(-max(getattr(shape, field.name) for shape in shapes) // multiple) * multiple
            for field in dataclasses.fields(RowShape)
        )
    )


def smallest(shapes: tuple[RowShape, ...], tokens: RowShape) -> RowShape | None:
    """Returns the first of the shapes that holds so many tokens; None where none does."""
    for shape in shapes:
        if tokens.understanding <= shape.understanding and tokens.generation <= shape.generation:
            return shape
    return None
