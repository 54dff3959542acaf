# SPDX-License-Identifier: Apache-2.0
r"""The bundled model "scenes": `configs/scenes.py` trained longer, and more on questions.

    python -m sparse_lavida_jax.main --config=configs/scenes_long.py

It took 277 minutes on one CPU core of a machine under other load. `runs/scenes_long/model` was
copied to `sparse_lavida_jax/assets/models/scenes`.
"""

import ml_collections
import scenes


def get_config() -> ml_collections.ConfigDict:
    c = scenes.get_config("schedule")
    c.name = "scenes_long"
    # With more heads it learns in half the steps to find in an image what a text names.
    c.model.num_heads = 6
    c.model.head_dim = 16
    # Seeing is taught before drawing: a model that learns all tasks at once draws well but never
    # learns to find in an image what a text names (28,000 steps: 86 % drawn, 4 % found; with five
    # such tasks at once, none after 3,500). From `locate` alone it learns that in 1,000 steps, and
    # 500 steps of the second lesson are enough for 20 % of the boxes.
    c.data.lessons = dict(
        find=dict(until=2000, tasks=dict(locate=1.0)),
        look=dict(until=5000, tasks=dict(locate=2.0, point=2.0, answer=2.0, name=1.0, detect=1.0)),
    )
    c.data.tasks = dict(
        locate=1.0,
        name=0.5,
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
    c.train.train_steps = 34_000
    c.train.seconds = 0.0
    c.train.image_seconds = 900.0
    c.train.checkpoint_seconds = 300.0
    return c
