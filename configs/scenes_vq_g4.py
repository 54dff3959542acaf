# SPDX-License-Identifier: Apache-2.0
r"""The image tokenizer of the scenes with four codes per cell, for `configs/scenes_g4.py`.

    python -m sparse_lavida_jax.main --config=configs/scenes_vq_g4.py

Takes about six minutes of CPU time.
"""

import ml_collections
import scenes_vq_g1


def get_config() -> ml_collections.ConfigDict:
    c = scenes_vq_g1.get_config()
    c.name = "scenes_vq_g4"

    c.vq.channels = (8, 16, 24, 32)  # factor 8: 12x12 codes
    c.vq.codebook_size = 256
    return c
