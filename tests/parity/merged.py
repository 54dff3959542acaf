# SPDX-License-Identifier: Apache-2.0
"""Converts between the released code's one sequence with a boolean mask and our two streams.

The recorded tensors are merged: [b L e], generation tokens zero-padded to the understanding width.
Full attention throughout: every token is in block 0, padding of the release included.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax.models import stack
from sparse_lavida_jax.sequence import cells_from_codes
from sparse_lavida_jax.tags import NO_CELL, NO_FEATURE, Stream, make_tags
from sparse_lavida_jax.visibility import PAD_BLOCK

UNDERSTANDING, GENERATION = "understanding", "generation"


def places(modality):
    """Returns, for both streams, each row's positions in the merged sequence, padded with -1."""
    found = {}
    for name, wanted in ((UNDERSTANDING, False), (GENERATION, True)):
        rows = [np.flatnonzero(row == wanted) for row in np.asarray(modality)]
        longest = max(len(row) for row in rows)
        if longest:
            found[name] = np.stack(
                [np.pad(row, (0, longest - len(row)), constant_values=-1) for row in rows]
            )
    return found


def layouts(found):
    return {
        name: make_tags(jnp.maximum(at, 0), jnp.where(at < 0, PAD_BLOCK, 0), 0)
        for name, at in found.items()
    }


def take(merged, found, widths):
    """Splits a merged [b L e] into streams, cut to their widths."""
    return {
        name: jnp.take_along_axis(
            jnp.asarray(merged)[..., : widths[name]], jnp.maximum(at, 0)[..., None], axis=1
        )
        for name, at in found.items()
    }


def merge(hidden, found, length, width):
    """Puts streams back into one [b L width], zero-padded."""
    batch = next(iter(found.values())).shape[0]
    merged = np.zeros((batch, length, width), np.float32)
    for name, values in hidden.items():
        for row, at in enumerate(found[name]):
            inside = at >= 0
            merged[row, at[inside], : values.shape[-1]] = np.asarray(values)[row, inside]
    return merged


def widths(settings):
    return {UNDERSTANDING: settings.width, GENERATION: settings.generation_width}


@jax.jit
def after_layers(model, x, tags):
    """Returns both residual streams after every layer."""
    settings, after = model.settings, []
    for depth in range(1, settings.num_layers + 1):
        joint = min(depth, settings.num_joint_layers)
        first = [
            jax.tree.map(lambda leaf, n=n: leaf[:n], layers)
            for layers, n in ((model.joint_layers, joint), (model.split_layers, depth - joint))
        ]
        few = dataclasses.replace(settings, num_layers=depth, dual_tower_layers=joint - 1)
        after.append(stack.run_layers(few, *first, x, tags, wanted="both")[0])
    return after


def final(model, x, tags):
    """Returns the streams after the last layer and the final norm."""
    hidden = after_layers(model, x, tags)[-1]
    return {name: model.final_norm(h, model.settings.width) for name, h in hidden.items()}


def text_stream(ids, feature=None, at=None):
    """An understanding stream of ids [b s]; negative ids are vision features `feature` [b s]."""
    ids = np.asarray(ids, np.int32)
    index = np.full_like(ids, NO_FEATURE) if feature is None else np.asarray(feature, np.int32)
    at = np.broadcast_to(np.arange(ids.shape[1]), ids.shape) if at is None else at
    tags = make_tags(np.maximum(at, 0), np.where(at < 0, PAD_BLOCK, 0), 0)
    return jax.tree.map(jnp.asarray, Stream(np.maximum(ids, 0), index, tags))


def image_stream(codes, grid, side, at):
    """A generation stream of codes [b n] on a grid (rows, columns); cells have `side` x `side`."""
    rows, columns = grid
    grids = np.asarray(codes, np.int32).reshape(-1, rows, columns)
    cells = cells_from_codes(grids, side)
    index = np.broadcast_to(np.arange(cells.shape[1]), cells.shape[:2]).astype(np.int32)
    tags = make_tags(np.maximum(at, 0), np.where(at < 0, PAD_BLOCK, 0), 0)
    return jax.tree.map(jnp.asarray, Stream(cells, np.where(at < 0, NO_CELL, index), tags))


def codes_of(cell_values, grid, side):
    """Spreads [b l g v] values of cells to [b n v] in the raster order of the codes."""
    rows, columns = grid
    cells = np.asarray(cell_values)
    b, _, _, v = cells.shape
    blocks = cells.reshape(b, rows // side, columns // side, side, side, v)
    return blocks.transpose(0, 1, 3, 2, 4, 5).reshape(b, rows * columns, v)
