# SPDX-License-Identifier: Apache-2.0
r"""Shared settings of the ablations: the model of `configs/scenes.py`, only images, laid out first.

    python -m sparse_lavida_jax.main --config=configs/ablation.py

`configs/ablation_*.py` modify it and are run by `benchmarks.ablation`.
"""

import ml_collections
import scenes


def get_config(name: str = "ablation") -> ml_collections.ConfigDict:
    c = scenes.get_config()
    c.name = name
    # As when the ablations were measured: without what has since made models learn to look.
    c.model.num_heads = 3
    c.model.head_dim = 32
    c.model.neighbour_heads = ()
    c.diffusion = dict(blocks="schedule", num_masked_blocks=4, plan_steps=(6, 8, 12, 18))
    c.sampling.layout_temperature = -1.0
    c.data.sampled_answer_len = 0
    c.data.edit_keeps = 0.0
    c.data.lessons = {}
    c.data.tasks = dict(layout=2.0, draw=4.0)
    c.diffusion.merge_cells = c.model.num_registers  # whatever number an ablation sets
    c.train = dict(
        train_steps=2000,
        batch_size=16,
        checkpoint_seconds=300.0,
        image_seconds=0.0,
        log_every=100,
        eval_prompts=0,
    )
    return c
