# SPDX-License-Identifier: Apache-2.0
"""The tags that attention is measured on are these and no others."""

import numpy as np
import pytest

from sparse_lavida_jax.kernels import shapes, tables
from sparse_lavida_jax.visibility import PAD_BLOCK

# The first 16 digits of the SHA-256, and the share of 128x128 tiles that anybody sees.
PINNED = {
    "t2i_1536": ("bf9eab299ddc9b1f", 0.549),
    "edit_3456": ("defc1146389322b0", 0.705),
    "single_8152": ("404fcad166a48a27", 0.606),
    "packed_8192": ("9853644fa2cc964f", 0.112),
    "decode_early": ("59a726ceb1051435", 0.25),
    "decode_mid": ("d9f4c72b40995ea9", 0.333),
    "decode_late": ("a0d9182d8bb4b962", 0.667),
    "full_8192": ("3a3ed164e42500a1", 1.0),
}


def test_every_shape_is_pinned():
    assert set(PINNED) == set(shapes.names())


@pytest.mark.parametrize("name", PINNED)
def test_tags_are_frozen_sorted_and_as_dense_as_they_were(name):
    tags = shapes.tags(name)
    digest, share = PINNED[name]
    assert tags.sha256.startswith(digest)
    if tags.query_segment is None:
        assert (np.diff(tags.key_block[tags.key_block != PAD_BLOCK]) >= 0).all()
    row = tuple(
        None if values is None else values[None]
        for values in (
            tags.query_block, tags.query_horizon, tags.key_block, tags.query_segment,
            tags.key_segment,
        )
    )  # fmt: skip
    made = tables.make_tables(*row, sizes=tables.TileSizes(128, 128, 128))
    assert float(tables.active_share(made)) == pytest.approx(share, abs=1e-3)


def test_an_unknown_shape_lists_the_known_ones():
    with pytest.raises(ValueError, match="choose one of t2i_1536, edit_3456"):
        shapes.tags("square")
