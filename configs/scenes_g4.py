# SPDX-License-Identifier: Apache-2.0
r"""`configs/scenes.py` with 2x2 token compression: four codes per cell, with a layout first.

    python -m sparse_lavida_jax.main --config=configs/scenes_vq_g4.py  # its image tokenizer
    python -m sparse_lavida_jax.main --config=configs/scenes_g4.py

The four codes of a cell are drawn independently given the same state, so the contents of a cell
have to be decided before: the layout does that.
"""

import ml_collections
import scenes


def get_config() -> ml_collections.ConfigDict:
    c = scenes.get_config()
    c.name = "scenes_g4"
    c.model.codes_per_token = 4
    c.model.codebook_size = 256
    c.data.image_codec = "runs/scenes_vq_g4"
    return c
