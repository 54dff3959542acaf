# SPDX-License-Identifier: Apache-2.0
"""Draws cells of finished images again, with all other cells known.

A step sees only what earlier steps decoded, so the first cells are drawn with little to agree with.
A revision is a plan of one step: it masks some cells of a finished image, the others are given, as
in inpainting, and it takes the most probable codes. Remasking samplers (arXiv:2503.00307) do so
between the steps of a plan; here the plan ends first. A revised image is not proved by one pass.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.inference.batch_shapes import Bucket
from sparse_lavida_jax.inference.engine import SampleOutput
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.sampling.prompts import rounded_up
from sparse_lavida_jax.tags import FIRST_BLOCK


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
        drawn: the images. One whose cells were all decoded in one step stays as it is.
    """
    once = dataclasses.replace(sampling, num_steps=1, merge_cells=0, temperature=0.0)
    greedy = [dataclasses.replace(one, temperature=0.0) for one in requests]
    responses, tokens = [*drawn.responses], [*drawn.tokens]
    for number in range(sampling.revisions):
        again = [redrawn(at, number) for at in drawn.decoded_at]
        groups: dict[Bucket, list[int]] = {}
        for row, cells in enumerate(again):
            if cells.any():
                groups.setdefault(drawn.buckets[row], []).append(row)
        for bucket, rows in groups.items():
            words, cells = bucket.prompt_len
            # The same for every revision of an image of this bucket, whatever shares its batch.
            most = rounded_up(cells + len(again[rows[0]]))
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


def redrawn(decoded_at: Int[np.ndarray, " l"], number: int) -> Bool[np.ndarray, " l"]:
    """Returns the cells that a revision draws again: none that are given.

    In turn those from before the last step, which did not see its cells, and those of the last one.

    Args:
        decoded_at: the block of each cell (`SampleOutput`).
        number: 0, 1, ...
    """
    last = decoded_at == decoded_at.max()
    earlier = (decoded_at >= FIRST_BLOCK) & ~last
    if not earlier.any():
        return earlier
    return last if number % 2 else earlier
