# SPDX-License-Identifier: Apache-2.0
r"""The bundled model "scenes": `configs/scenes.py` trained longer.

    python -m sparse_lavida_jax.main --config=configs/scenes_long.py

`runs/scenes_long/model` is what lies in `sparse_lavida_jax/assets/models/scenes`.
"""

import ml_collections
import scenes


def get_config() -> ml_collections.ConfigDict:
    c = scenes.get_config()
    c.name = "scenes_long"
    c.train.seconds = 90 * 60.0
    c.train.picture_seconds = 600.0
    c.train.eval_prompts = 200
    c.optimizer.warmup_steps = 200
    c.optimizer.ema = 0.9995
    return c
