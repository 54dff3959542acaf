# SPDX-License-Identifier: Apache-2.0
r"""The image tokenizer of the scenes with one code per cell, as the bundled model has it.

    python -m sparse_lavida_jax.main --config=configs/scenes_vq_g1.py

Takes about six minutes of CPU time.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "scenes_vq_g1"
    c.seed = 0

    c.vq = dict(
        channels=(8, 16, 16, 24, 32),  # factor 16: 6x6 codes
        latent_channels=16,
        codebook_size=64,
        norm="pixel",
        norm_groups=1,
        upsampling="shuffle",
    )

    c.optimizer = dict(
        learning_rate=1e-2, final_fraction=0.02, warmup_steps=30, b1=0.9, b2=0.99, clip_norm=1.0
    )
    c.train = dict(stage="vq", train_steps=1500, batch_size=2)
    return c
