# SPDX-License-Identifier: Apache-2.0
r"""Does sparse training cost quality? Every task that the paper's tables 1 to 3 have, in miniature.

    python -m sparse_lavida_jax.bench.ablation --config=configs/ablation_quality.py

The two ways of `configs/scenes_long.py` and `configs/scenes_dense.py`, shorter. Full attention
masks uniformly, as LaViDa-O does; "sparse_uniform" does too, and so tells attention from masking.
"""

import ml_collections
import scenes_long


def get_config() -> ml_collections.ConfigDict:
    c = scenes_long.get_config()
    c.name = "ablation_quality"
    c.train.train_steps = 12_000
    c.train.picture_seconds = 0.0
    c.train.eval_prompts = 0
    return c


def get_ablation() -> dict:
    return dict(
        question="Is a model that is trained and sampled sparsely as good as a dense one?",
        tasks=("draw", "edit", "answer", "point", "infill"),
        ways=dict(
            sparse=dict(),
            sparse_uniform=dict(changes=dict(diffusion=dict(blocks="uniform"))),
            dense=dict(changes=dict(diffusion=dict(attention="full"))),
        ),
    )
