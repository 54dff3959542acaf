# SPDX-License-Identifier: Apache-2.0
r"""A larger model of the bundled world for one GPU: 28.9 M parameters, heads of 64, bfloat16.

    python -m sparse_lavida_jax.main --config=configs/scenes_gpu.py
    timeout -s TERM 570 python -m sparse_lavida_jax.main --config=configs/scenes_gpu.py  # a piece
    python -m sparse_lavida_jax.main --config=configs/scenes_gpu.py:tiny     # the same on a CPU
    python -m sparse_lavida_jax.main --config=configs/scenes_gpu.py:twin     # to choose a rate

It ends after 25 minutes of training or 20,000 steps, and scores itself in `report.md`. SIGTERM
saves it, and the same line goes on: the second line may be typed until the run is finished.

It was never run on a GPU. Learning rate and lessons were chosen by short runs of `twin`, three
seeds each (docs/training.md); the number of steps is a guess. The lessons are those of
`configs/scenes.py`, as fractions of 5,845 steps, as in those runs; the tasks after them are those
of `configs/scenes_long.py`. `tiny` has one lesson.
"""

import ml_collections
import scenes
import scenes_long

STEPS = 20_000
LESSON_STEPS = 5_845  # of which the lessons of `configs/scenes.py` are fractions
LARGE = dict(
    width=512,
    mlp_hidden=1280,
    num_layers=6,
    dual_tower_layers=3,
    num_heads=8,
    head_dim=64,  # the GPU kernel takes 64 and 128
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
TINY = dict(
    width=64, mlp_hidden=96, num_layers=2, dual_tower_layers=1, head_dim=16,
    generation_width=48, generation_mlp_hidden=64,
)  # fmt: skip
TINY_VISION = dict(width=32, num_layers=1, mlp_hidden=48)
TINY_RUN = dict(
    train_steps=40, batch_size=16, seconds=0.0, log_every=5, eval_tasks=(), eval_prompts=0
)


def get_config(size: str = "large") -> ml_collections.ConfigDict:
    if size not in ("large", "twin", "tiny"):
        raise ValueError(f"scenes_gpu has no size {size!r}: choose large, twin or tiny.")
    c = scenes_long.get_config()
    c.name = "scenes_gpu"
    c.data.lessons = scenes.get_config().data.lessons

    c.model.update(LARGE)
    # Four examples share a row, each a segment of its own: about four tiles of the kernel.
    c.data.update(packing=4, shapes="run")
    c.optimizer.update(learning_rate=3e-3, warmup_steps=200, b2=0.99, ema=0.999)
    c.train.update(
        train_steps=STEPS,
        batch_size=512,
        seconds=1500.0,
        checkpoint_seconds=120.0,
        keep_states=1,
        eval_every=0,
        eval_prompts=100,
        model_dtype="bfloat16",
        model_file_mb=14,
    )

    if size == "tiny":
        c.name = "scenes_gpu_tiny"
        c.data.lessons = dict(name=c.data.lessons.name)
        c.data.tasks = dict(name_some=1.0, draw=1.0)
        c.model.update(TINY)
        c.model.vision.update(TINY_VISION)
        c.train.update(TINY_RUN)
    if size == "twin":
        c.name = "scenes_gpu_twin"
        c.data.update(packing=1, shapes="lesson")
        c.model.update(
            width=96, mlp_hidden=256, num_layers=4, dual_tower_layers=2, head_dim=16,
            generation_width=64, generation_mlp_hidden=192, compute_dtype="float32",
        )  # fmt: skip
        c.model.vision.update(width=96, num_layers=1, num_heads=3, mlp_hidden=192)
        c.train.update(train_steps=200, batch_size=32, seconds=0.0, log_every=10)
        c.optimizer.warmup_steps = 20
    for lesson in c.data.lessons.values():
        lesson.until = max(1, round(lesson.until * c.train.train_steps / LESSON_STEPS))
    return c
