# SPDX-License-Identifier: Apache-2.0
r"""The bundled model "scenes": `configs/scenes.py` trained longer, and more on what it answers.

    python -m sparse_lavida_jax.main --config=configs/scenes_long.py

About 90 minutes on one CPU core. `runs/scenes_long/model` in float16 is what lies in
`sparse_lavida_jax/assets/models/scenes`.
"""

import ml_collections
import scenes


def get_config() -> ml_collections.ConfigDict:
    c = scenes.get_config()
    c.name = "scenes_long"
    c.data.tasks = dict(
        plan=3.0,
        draw=5.5,
        edit=2.5,
        edit_plan=2.0,
        fill_plan=0.3,
        answer=3.2,
        point=1.8,
        detect=1.5,
        arithmetic=0.6,
        caption=0.5,
        constrained_caption=0.2,
        infill=0.3,
        reflect=0.8,
        inpaint=0.3,
        outpaint=0.3,
    )
    c.optimizer.warmup_steps = 200
    c.optimizer.ema = 0.9995
    c.train.train_steps = 28_000
    c.train.seconds = 0.0
    c.train.picture_seconds = 900.0
    c.train.checkpoint_seconds = 300.0
    return c
