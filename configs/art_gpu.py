# SPDX-License-Identifier: Apache-2.0
r"""A larger model of real art for one GPU: 128x128 pixels, 16x16 cells, 33 M parameters, bfloat16.

    python -m sparse_lavida_jax.training.vision_tower --config=configs/art_gpu.py \
        --out=runs/art_gpu.safetensors
    python -m sparse_lavida_jax.main --config=configs/art_gpu.py
    timeout -s TERM 570 python -m sparse_lavida_jax.main --config=configs/art_gpu.py  # a piece
    python -m sparse_lavida_jax.main --config=configs/art_gpu.py:tiny     # the same on a CPU

It scores itself in `report.md`. SIGTERM saves it, and the same line goes on: the second line may be
typed until the run is finished.

It was never run on a GPU; compiled for an H200, its 6,000 steps are predicted to take 22 minutes
(`benchmarks.aot_training`). The layers are those of `configs/scenes_gpu.py`. World, tasks and
lessons are those of `configs/art.py`, with all 120 things; the image tokenizer is the same, and the
text tokenizer has places for larger images. `tiny` has one lesson.
"""

import art
import ml_collections
import scenes_gpu

STEPS = 6_000
UNTIL = dict(name=0.04, look=0.1, parts=2 / 3)  # of the steps: where each lesson ends


def get_config(size: str = "large") -> ml_collections.ConfigDict:
    if size not in ("large", "tiny"):
        raise ValueError(f"art_gpu has no size {size!r}: choose large or tiny.")
    c = art.get_config()
    c.name = "art_gpu"

    c.model.update(scenes_gpu.LARGE)
    c.model.update(grid_size=16, num_registers=8)
    c.model.vision.image_size = 128
    # Four examples share a row, each a segment of its own.
    c.data.update(things=0, packing=4, shapes="run")
    c.diffusion.update(plan_steps=(12, 16, 24, 32))
    c.sampling.update(num_steps=24)
    c.optimizer.update(learning_rate=3e-3, warmup_steps=200, final_fraction=0.03)
    c.train.update(
        train_steps=STEPS,
        vision_from="runs/art_gpu.safetensors",
        batch_size=256,
        checkpoint_seconds=120.0,
        keep_states=1,
        eval_every=0,
        eval_prompts=100,
        model_dtype="bfloat16",
        model_file_mb=14,
    )

    if size == "tiny":
        c.name = "art_gpu_tiny"
        c.data.lessons = dict(name=c.data.lessons.name)
        c.data.tasks = dict(name=1.0, draw=1.0)
        c.model.update(scenes_gpu.TINY)
        c.model.vision.update(scenes_gpu.TINY_VISION)
        c.train.update(scenes_gpu.TINY_RUN, vision_from="")
    for name, lesson in c.data.lessons.items():
        lesson.until = max(1, round(UNTIL[name] * c.train.train_steps))
    return c
