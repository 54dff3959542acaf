# SPDX-License-Identifier: Apache-2.0
r"""A model of the bundled world for one large GPU: 29 M parameters, heads of 64, bfloat16 products.

    python -m sparse_lavida_jax.main --config=configs/scenes_gpu.py \
        --compilation_cache=/tmp/programs
    python -m sparse_lavida_jax.main --config=configs/scenes_gpu.py:16000   # planned steps

Sized for 25 minutes of an H200. A batch has 512 examples, four of them in a row, each a segment of
its own; a row of text is thus about as long as four tiles of the attention kernel, and about a
sixth of it is padding. The lessons are those of `configs/scenes_long.py`, as shares of the planned steps. SIGTERM
saves the state, and the same command goes on: the run may be cut into pieces
(`timeout -s TERM 570 ...`).

The parameters are 58 MB in bfloat16, in which all products are computed anyway.
"""

import ml_collections
import scenes_long

STEPS = 20_000
LONG = 44_000  # steps of `configs/scenes_long.py`, of 16 examples


def get_config(steps: str = "") -> ml_collections.ConfigDict:
    c = scenes_long.get_config()
    c.name = "scenes_gpu"
    planned = int(steps or STEPS)

    c.model.update(
        width=512,
        mlp_hidden=1280,
        num_layers=6,
        dual_tower_layers=3,
        num_heads=8,
        head_dim=64,
        generation_width=320,
        generation_mlp_hidden=896,
        compute_dtype="bfloat16",
        unroll_layers=False,
        vision=dict(
            image_size=96,
            patch_size=16,
            width=256,
            num_layers=2,
            num_heads=4,
            mlp_hidden=512,
            pool=1,
        ),
    )
    for lesson in c.data.lessons.values():
        lesson.until = max(1, round(lesson.until * planned / LONG))
    c.data.update(packing=4, repeats=4, shapes="run", workers=-1)

    # Not tuned: width 512 in place of 96 asks for a lower rate, 32 times the examples for a higher.
    c.optimizer.update(learning_rate=1.5e-3, warmup_steps=200, b2=0.99, ema=0.999)
    c.train.update(
        train_steps=planned,
        batch_size=512,
        seconds=1500.0,
        checkpoint_seconds=120.0,
        keep_states=1,
        eval_every=0,
        eval_prompts=0,
        log_every=20,
    )
    return c
