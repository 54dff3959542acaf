# SPDX-License-Identifier: Apache-2.0
r"""The dense baseline of the bundled model: trained and sampled with full attention.

    python -m sparse_lavida_jax.main --config=configs/scenes_dense.py

Size, data, steps and seed are those of `configs/scenes_long.py`, without blocks, registers or
cache: LaViDa-O's own method at this scale.
"""

import ml_collections
import scenes_long


def get_config() -> ml_collections.ConfigDict:
    c = scenes_long.get_config()
    c.name = "scenes_dense"
    c.diffusion.attention = "full"
    c.model.trained_attention = "full"
    return c
