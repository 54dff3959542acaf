# SPDX-License-Identifier: Apache-2.0
"""Which rows share a batch, and the shapes that batches are padded to."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Literal

from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.prompts import SampleInput, lengths_of

# How batches are padded:
# fit: no more than needed;
# full: to full batches and multiples of `LENGTHS[-1]`, so that evaluations use few programs;
# served: each row separately to one of `LENGTHS`, so that a server uses few programs and the
#   result of a row does not depend on the others.
Padding = Literal["fit", "full", "served"]
LENGTHS = (32, 64, 128)  # tokens; longer prompts are padded to multiples of the last one
MOST_TOKENS = 2**19  # of the prompts of a batch in a record
CHARACTERS = 4  # per token, roughly

# Tasks with independent rows. Of the others, the phrases of "ground" share an image, "reflect"
# takes a varying number of attempts, and gaps differ in number.
SHARING = ("generate", "edit", "inpaint", "outpaint", "ask", "reason", "caption")


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shapes that a batch is padded to; they and the request determine the exact bits."""

    rows: int
    prompt_len: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Examples that are decoded together: their indices, their bucket, and its other shapes."""

    members: list[int]
    shape: Hashable
    bucket: Bucket

    @property
    def filled(self) -> list[int]:
        """The index of the example in each row: the last one fills the batch up."""
        return self.members + [self.members[-1]] * (self.bucket.rows - len(self.members))


def check(bucket: Bucket, most: int) -> None:
    """Refuses a bucket that no batch needs: a hostile record may name any.

    Args:
        most: tokens of the longest prompt of the model.

    Raises:
        RequestError: the bucket is larger.
    """
    longest, padded = _to_multiple(most), max(bucket.prompt_len)
    if padded > longest or bucket.rows * sum(bucket.prompt_len) > MOST_TOKENS:
        raise RequestError(
            f"the record pads prompts to {padded} tokens in {bucket.rows} rows, which no image of"
            f" this model needs: {longest} tokens, and {MOST_TOKENS} in all rows, are the most."
        )


def batching_key(request: Request) -> Hashable:
    """Returns what requests must agree in to be rows of one batch.

    Words, seed and scales may differ. But whether a scale is 0 decides which program runs, long
    words would make short ones wait, and masks must be the same.
    """
    scales = request.temperature, request.guidance, request.guidance_edit, request.guidance_image
    how = request.sampling
    characters = len(request.words) + sum(len(q) + len(a) for q, a in request.earlier)
    # The order of a row decides how many cells the codes of a step are spread over.
    by_seed = how.grid == "code" and how.order_seed < 0
    return (
        request.task,
        how,
        _few((1 + characters // CHARACTERS, 0))[0],
        tuple(scale > 0 for scale in scales),
        request.size,
        request.box,
        request.max_new_tokens,
        request.best_of > 1,
        "told" if isinstance(request.layout, str) else request.layout,
        None if request.mask is None else request.mask.tobytes(),
        tuple(image.pixels.shape for image in request.images),
        request.seed if by_seed else None,
    )


def chunks(
    inputs: Sequence[SampleInput], most: int, padding: Padding, bucket: Bucket | None = None
) -> list[Chunk]:
    """Returns which examples are decoded together: those of one shape, at most `most` of them.

    Args:
        bucket: for all of them; overrides `padding`.
    """
    apart, shapes = padding == "served", dict[tuple[Hashable, bytes | None], list[int]]()
    for number, one in enumerate(inputs):
        # Rows of a batch have the same given tokens, though no program depends on where they are.
        given = one.example.given.tobytes() if apart else None
        shape = _shape(one, bucket) if apart else (len(one.example.response), one.example.grid)
        shapes.setdefault((shape, given), []).append(number)
    found = []
    for (shape, _), members in shapes.items():
        padded = bucket or _bucket([inputs[i] for i in members] if apart else inputs, most, padding)
        starts = range(0, len(members), padded.rows)
        found += [Chunk(members[i : i + padded.rows], shape, padded) for i in starts]
    return found


def _shape(one: SampleInput, bucket: Bucket | None) -> Hashable:
    """Returns the shapes that rows have in common, with all that their batch is padded to."""
    example = one.example
    lengths = bucket.prompt_len if bucket else lengths_of([one])
    given = int(example.given.sum()) if example.modality == "image" else example.given.tobytes()
    views = tuple(view.shape for view in example.shown)
    return len(example.response), example.grid, _few(lengths), given, views


def _bucket(inputs: Sequence[SampleInput], most: int, padding: Padding) -> Bucket:
    """Returns shapes large enough for some examples; the rows are a power of two, or `most`."""
    rows = most if padding == "full" else min(most, 1 << (len(inputs) - 1).bit_length())
    return Bucket(rows, padded(lengths_of(inputs), padding))


def padded(lengths: tuple[int, int], padding: Padding) -> tuple[int, int]:
    """Returns what a batch pads prompts to, whose streams have these `lengths_of`."""
    if padding == "fit":
        return lengths
    if padding == "served":
        return _few(lengths)
    understanding, generation = (_to_multiple(length) for length in lengths)
    return understanding, generation


def sizes(most: int) -> list[int]:
    """Returns the numbers of rows that batches are filled up to: powers of two, and `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]


def _few(lengths: tuple[int, int]) -> tuple[int, int]:
    understanding, generation = (
        next((one for one in (0, *LENGTHS) if one >= length), _to_multiple(length))
        for length in lengths
    )
    return understanding, generation


def _to_multiple(length: int) -> int:
    return -(-length // LENGTHS[-1]) * LENGTHS[-1]
