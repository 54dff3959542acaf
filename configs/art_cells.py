# SPDX-License-Identifier: Apache-2.0
r"""The image tokenizer of real art: 12x12 cells of 2x2 codes, for 96x96 pixels.

    python -m sparse_lavida_jax.main --config=configs/art_cells.py

The codes are fitted; the network that paints them is trained. The result is the bundled tokenizer
"art" (`--config.data.image_codec=art`), for models with `codes_per_token=4`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "art_cells"
    c.seed = 0
    c.data = dict(source="art")
    c.vq = dict(kind="cells", codebook_size=1024, latent_channels=96, layers_per_block=4)
    c.optimizer = dict(
        learning_rate=1e-2, final_fraction=0.02, warmup_steps=30, b1=0.9, b2=0.99, clip_norm=1.0
    )
    c.train = dict(stage="vq", train_steps=4000, batch_size=8)
    return c
