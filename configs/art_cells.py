# SPDX-License-Identifier: Apache-2.0
r"""The image tokenizer of real art: 12x12 cells of 2x2 codes, for 96x96 pixels.

    python -m sparse_lavida_jax.main --config=configs/art_cells.py
    python -m sparse_lavida_jax.main --config=configs/art_cells.py:further

The codes are fitted; the network that paints them is trained. The result is the bundled tokenizer
"art" (`--config.data.image_codec=art`), for models with `codes_per_token=4`. `further` goes on from
the bundled one, mostly with the things that `configs/art.py` teaches: its codes stay.
"""

import ml_collections

VARIANTS = ("whole", "further")


def get_config(variant: str = "whole") -> ml_collections.ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"art_cells has no variant {variant!r}: choose {', '.join(VARIANTS)}.")
    c = ml_collections.ConfigDict()
    c.name = "art_cells"
    c.seed = 0
    c.data = dict(source="art")
    c.vq = dict(kind="cells", codebook_size=1024, latent_channels=96, layers_per_block=4)
    c.optimizer = dict(
        learning_rate=1e-2, final_fraction=0.02, warmup_steps=30, b1=0.9, b2=0.99, clip_norm=1.0
    )
    c.train = dict(stage="vq", train_steps=4000, batch_size=8)
    if variant == "further":
        c.data.things = 40
        c.optimizer.learning_rate = 6e-3
        c.train.init_from = "art"
        c.train.train_steps = 5000
    return c
