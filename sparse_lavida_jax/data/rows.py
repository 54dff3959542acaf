# SPDX-License-Identifier: Apache-2.0
"""From an example to a row of a training pass: what is given, its blocks, what is dropped.

Every random choice comes from the generator of the row.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.diffusion import Blocks
from sparse_lavida_jax.sequence import prompt_row

ORDER_SEEDS = 512  # training draws the seed of an unmasking order below this

Row = tuple  # the understanding and the generation tokens of a row, as `diffusion.corrupt` has them


def laid_out(
    example: Example, settings: config.Config, rng: np.random.Generator
) -> tuple[Row, Blocks]:
    """Returns the row of an example, neither sorted nor padded, and the blocks of its response."""
    given = given_of(example, settings, rng)
    blocks = _blocks(example, given, settings, rng)
    if settings.diffusion.partial_cells:
        codes = settings.model.codes_per_token
        blocks = diffusion.partly_known(rng, blocks, example.kind, codes, settings.diffusion)
    if settings.data.edit_area_weight > 1:  # then the rows of a batch all have weights by code
        weight = example.code_weight
        if weight is None:
            weight = np.ones((len(example.response), settings.model.codes_per_token))
        blocks = dataclasses.replace(blocks, code_weight=weight)
    prompt = prompt_row(
        example.parts,
        text_mask_id=settings.model.text_mask_id,
        codes_per_token=settings.model.codes_per_token,
        drop_prompt=rng.random() < settings.data.prompt_drop,
        drop_source=rng.random() < settings.data.source_drop,
    )
    row = diffusion.corrupt(
        prompt,
        example.response,
        example.kind,
        blocks,
        settings.model,
        full_attention=settings.diffusion.attention == "full",
    )
    return row, blocks


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
