# SPDX-License-Identifier: Apache-2.0
r"""A small decoder for the previews of an image tokenizer, trained on the exact one's outputs.

    python -m sparse_lavida_jax.main --config=configs/preview.py \
        --config.data.source=art --config.data.image_codec=art
    python -m sparse_lavida_jax.main --config=configs/preview.py \
        --config.data.source=prepared --config.data.folder=images \
        --config.data.image_codec=prepared

The second learns from a folder of images. The result is `vq` in the run's folder: the image
tokenizer as it was, with `preview.safetensors`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "preview"
    c.seed = 0
    c.data = dict(source="scenes", image_codec="scenes")
    c.optimizer = dict(
        learning_rate=1e-2, final_fraction=0.02, warmup_steps=30, b1=0.9, b2=0.99, clip_norm=1.0
    )
    c.train = dict(stage="preview", train_steps=1000, batch_size=8)
    return c
