# SPDX-License-Identifier: Apache-2.0
"""Who may attend to whom: the one rule behind training, sampling and kernels.

Paper: Sec. 3.3 "Step-Causal Attention Mask" and Algorithm 1 (Sec. 7.3).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

AnyArray = Array | np.ndarray  # on a device, or on the host

# Tags of padding and empty cache slots. No horizon reaches the block, so as keys they are seen
# by nothing but padding; attention writes 0 where a *query* carries it.
PAD_BLOCK = 2**30
PAD_HORIZON = -1


def visible(
    query_block: Int[AnyArray, "..."],
    query_horizon: Int[AnyArray, "..."],
    key_block: Int[AnyArray, "..."],
    query_segment: Int[AnyArray, "..."] | None = None,
    key_segment: Int[AnyArray, "..."] | None = None,
) -> Bool[AnyArray, "..."]:
    """Returns where a query may attend to a key; arguments broadcast against each other.

    A token sees every block up to its horizon, and its own block. With `M` clean blocks the
    horizon is `min(block, M)`: prompt and clean tokens look back as far as themselves, masked
    tokens and registers as far as the last clean block. These two comparisons are all three
    branches of Algorithm 1. (Where a row holds several steps, each masked block has an M of
    its own: `diffusion.Blocks.horizons`.)

    Prompt 0, clean 1 and 2, masked 3 and 4 (`M` = 2), keys across:

        block  0 1 2 3 4
            0  x . . . .
            1  x x . . .
            2  x x x . .
            3  x x x x .
            4  x x x . x

    Tokens of different segments (several examples packed into one row) never see each other.
    Integer comparisons only, so that a Pallas kernel can trace this same function on a tile.
    """
    sees = (key_block <= query_horizon) | (key_block == query_block)
    if query_segment is not None and key_segment is not None:
        sees = sees & (query_segment == key_segment)
    return sees


def is_padding(block: Int[AnyArray, "..."]) -> Bool[AnyArray, "..."]:
    """Returns where a token is padding: its attention output is exactly 0."""
    return block == jnp.int32(PAD_BLOCK)
