# SPDX-License-Identifier: Apache-2.0
"""The tags of the attention benchmark never change."""

import pathlib

import numpy as np
import pytest
import tiny

from sparse_lavida_jax import config, sequence
from sparse_lavida_jax.data import batch as making
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.kernels import shapes, tile_lists
from sparse_lavida_jax.mixture.record_batches import MixtureBatches
from sparse_lavida_jax.tags import concatenate
from sparse_lavida_jax.visibility import PAD_BLOCK

CHECKOUT = pathlib.Path(__file__).parents[2]

# The share of 128x128 tiles with a visible pair, and the SHA-256 of the tags.
FROZEN = {
    "t2i_1536": (
        0.549,
        "bf9eab299ddc9b1f86da9f2080581ae5ef35930c190c4ea3119ec852343bbe56",
    ),
    "edit_3456": (
        0.705,
        "defc1146389322b052cc3aaaff292b5db7c85d5dca1a51a4b3b738b21a44793e",
    ),
    "single_8152": (
        0.606,
        "404fcad166a48a270c758b8d177ca542c451f56117e04fa3366ef8bf7bc78561",
    ),
    "packed_8192": (
        0.132,
        "e0341b68838b6c88f640757244a6f6365b5bbb5d356a023e7778ef6f19090bd4",
    ),
    "decode_early": (
        0.25,
        "59a726ceb1051435eb9bf2600e6d43933f08025cad8c38f21e70546e7a589b94",
    ),
    "decode_mid": (
        0.333,
        "d9f4c72b40995ea93d12bc2e4b3f550cfb677af2e9bc27f6ed7d7b5ada95d0ca",
    ),
    "decode_late": (
        0.667,
        "a0d9182d8bb4b9621cdbc1239ffae50d5d8d51245060c642fe60284807d935d8",
    ),
    "full_8192": (
        1.0,
        "3a3ed164e42500a1c5b2d0093f0a813d27dc50d038f330cc100a7e70ece2e6e4",
    ),
}
SEED = 19  # the first with rows of 8,192 tokens


def test_every_shape_is_frozen():
    assert set(FROZEN) == set(shapes.names())


@pytest.mark.parametrize("name", FROZEN)
def test_tags_are_frozen_sorted_and_as_dense_as_they_were(name):
    tags, (expected, digest) = shapes.tags(name), FROZEN[name]
    assert tags.sha256 == digest
    if tags.query_segment is None:
        assert (np.diff(tags.key_block[tags.key_block != PAD_BLOCK]) >= 0).all()
    row = tuple(
        None if values is None else values[None]
        for values in (
            tags.query_block, tags.query_horizon, tags.key_block, tags.query_segment,
            tags.key_segment,
        )
    )  # fmt: skip
    sizes = tile_lists.TileSizes(128, 128, 128)
    share = tiny.quick_jit(
        lambda *row: tile_lists.active_share(tile_lists.make_tables(*row, sizes=sizes))
    )
    assert float(share(*row)) == pytest.approx(expected, abs=1e-3)


def test_the_packed_row_is_what_training_makes():
    """The first of four rows of six text-to-image examples, prompts of 32 to 256 tokens.

    In a joint layer all prompts precede all images; sorting makes each segment contiguous, as
    required by cuDNN's packed rows.
    """
    settings = config.read(CHECKOUT / "configs" / "sft_1024.py:schedule")
    rng, examples, cells = np.random.default_rng(SEED), 24, settings.model.grid_size**2
    rows = [making.make_row(image(rng, cells), settings, rng) for _ in range(examples)]
    lengths = [row.length for row in rows]
    shared = making.deal(lengths, 6)
    shape = making.longest_of([making.longest(lengths, shared)], MixtureBatches.multiple)
    corrupted = [row.tokens for row in rows]
    batch = making.stack(corrupted, shape, settings.model, shared=shared)
    assert batch.understanding is not None and batch.generation is not None
    joint = concatenate(batch.understanding.tags, batch.generation.tags)
    by_block = np.lexsort((np.asarray(joint.block[0]), np.asarray(joint.segment[0])))
    frozen = shapes.tags("packed_8192")
    for found, expected in (
        (joint.block, frozen.key_block),
        (joint.horizon, frozen.query_horizon),
        (joint.segment, frozen.key_segment),
    ):
        np.testing.assert_array_equal(found[0][by_block], expected)


def image(rng, cells) -> Example:
    """A text-to-image example; its words and cells do not affect the tags."""
    prompt = sequence.Text(np.zeros(int(rng.integers(32, 257)), np.int32))
    return Example(
        parts=(prompt, sequence.Response(cells)),
        response=np.zeros((cells, 4), np.int32),
        given=np.zeros(cells, bool),
        modality="image",
        pixels=None,
        reach=0,
    )


def test_an_unknown_shape_lists_the_known_ones():
    with pytest.raises(ValueError, match="choose one of t2i_1536, edit_3456"):
        shapes.tags("square")
