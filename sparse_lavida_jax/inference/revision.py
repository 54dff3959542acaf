# SPDX-License-Identifier: Apache-2.0
"""Draws cells of finished images again, with all other cells known.

A step sees only what earlier steps decoded, so the first cells are drawn with little to agree with.
A revision is a plan of one step: it masks some cells of a finished image, the others are given, as
in inpainting, and it takes the most probable codes. Its cells are drawn independently of each
other, so they are no neighbours: every other one, as on a chequerboard. Remasking samplers
(arXiv:2503.00307) revise between the steps of a plan; here the plan ends first. A revised image is
not proved by one pass.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference.batch_shapes import Bucket
from sparse_lavida_jax.inference.engine import SampleOutput
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.sampling.prompts import rounded_up
from sparse_lavida_jax.tags import FIRST_BLOCK

QUARTERS = (0, 0), (1, 1), (0, 1), (1, 0)  # odd row, odd column


def revised(
    sample: Callable[..., SampleOutput],
    examples: Sequence[Example],
    requests: Sequence[RowRequest],
    sampling: config.Sampling,
    drawn: SampleOutput,
) -> SampleOutput:
    """Returns images after `sampling.revisions`, with the tokens that they passed.

    Args:
        sample: `Engine.sample`, after the numbers of the examples, with all other arguments.
        drawn: the images.
    """
    once = dataclasses.replace(sampling, num_steps=1, merge_cells=0, temperature=0.0)
    greedy = [dataclasses.replace(one, temperature=0.0) for one in requests]
    responses, tokens = [*drawn.responses], [*drawn.tokens]
    for number in range(sampling.revisions):
        again = [
            (at >= FIRST_BLOCK) & chosen(_grid(one), number, sampling.revisions)
            for one, at in zip(examples, drawn.decoded_at, strict=True)
        ]
        groups: dict[tuple[Bucket, int], list[int]] = {}
        for row, cells in enumerate(again):
            if cells.any():
                groups.setdefault((drawn.buckets[row], len(cells)), []).append(row)
        for (bucket, of_image), rows in groups.items():
            words, cells = bucket.prompt_len
            # The same for every revision of an image of this bucket, whatever shares its batch.
            most = rounded_up(cells + of_image)
            padded = dataclasses.replace(bucket, prompt_len=(words, most))
            shown = [
                dataclasses.replace(examples[i], response=responses[i], given=~again[i])
                for i in rows
            ]
            how = {"stage": "revision", "bucket": padded}
            found = sample(rows, shown, [greedy[i] for i in rows], once, **how)
            for row, codes, passed in zip(rows, found.responses, found.tokens, strict=True):
                responses[row], tokens[row] = codes, tokens[row] + passed
    return dataclasses.replace(drawn, responses=responses, tokens=tokens)


def chosen(grid: tuple[int, int], number: int, revisions: int) -> Bool[np.ndarray, " l"]:
    """Returns the cells that a revision draws again, in raster order, unless they are given.

    In turn those with an even sum of row and column, which see all four neighbours, and the
    others. Four revisions or more take a quarter of the cells each, which see all eight neighbours:
    even rows and columns, odd ones, even rows with odd columns, and the rest.

    Args:
        grid: rows and columns of cells.
        number: of the revision: 0, 1, ...
        revisions: how many there are.
    """
    row, column = np.indices(grid).reshape(2, -1) % 2
    if revisions < len(QUARTERS):
        return (row + column) % 2 == number % 2
    return (row == QUARTERS[number % 4][0]) & (column == QUARTERS[number % 4][1])


def _grid(example: Example) -> tuple[int, int]:
    side = math.isqrt(len(example.response))
    return example.grid or (side, side)
