# SPDX-License-Identifier: Apache-2.0
r"""The image tokenizer of real art: 12x12 cells of four codes that add up, for 96x96 pixels.

    python -m sparse_lavida_jax.main --config=configs/art_cells.py

It is fitted, not trained: there are no steps. The result is the bundled tokenizer "art"
(`--config.data.image_codec=art`), for models with `codes_per_token=4`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "art_cells"
    c.seed = 0
    c.data = dict(source="art")
    c.vq = dict(kind="cells", codebook_size=1024)
    c.train = dict(stage="vq")
    return c
