# SPDX-License-Identifier: Apache-2.0
r"""The image tokenizer of real art: 12x12 codes for 96x96 pixels, each encoded from its cell alone.

python -m sparse_lavida_jax.main --config=configs/art_vq.py
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "art_vq"
    c.seed = 0
    c.data = dict(source="art")

    c.vq = dict(
        channels=(8, 24, 64, 96),  # factor 8: 12x12 codes
        latent_channels=24,
        codebook_size=1024,
        norm="pixel",
        norm_groups=1,
        upsampling="shuffle",
        cells_alone=True,
        codebook_start="means",
    )

    c.optimizer = dict(
        learning_rate=1e-2, final_fraction=0.02, warmup_steps=30, b1=0.9, b2=0.99, clip_norm=1.0
    )
    c.train = dict(stage="vq", train_steps=1200, batch_size=4)
    return c
