# SPDX-License-Identifier: Apache-2.0
r"""The generation branch of LaViDa-O alone, as stage s2-1024 of the release trains it.

    python -m sparse_lavida_jax.bench.training --plan --config=configs/lavida_o_branch.py
    python -m sparse_lavida_jax.main --config=configs/lavida_o_branch.py

The understanding branch is frozen, in bfloat16 (spec Sec. 9.5). Stage s2-256 has a learning rate of
1e-4.
"""

import lavida_o
import ml_collections

BRANCH = r"generation|^image_(embedding|head)/"
RATE = 5e-6


def get_config() -> ml_collections.ConfigDict:
    c = lavida_o.get_config()
    c.name = "lavida_o_branch"
    c.model.remat = "layer"
    c.data = dict(
        source="prepared",
        folder="prepared",
        text_block_len=32,
        max_answer_len=256,
        source_drop=0.5,  # spec Sec. 9.2
    )
    c.diffusion = dict(num_masked_blocks=8, plan_steps=(16, 32, 64), plan_text_steps=(8, 16, 32))
    c.optimizer = dict(
        learning_rate=RATE,
        final_fraction=0.1,
        warmup_steps=3000,
        b1=0.9,
        b2=0.999,
        groups=((BRANCH, RATE), ("", 0.0)),
        frozen_dtype="bfloat16",
    )
    c.train = dict(
        init_from="models/lavida-o",
        train_steps=100_000,
        batch_size=1,
        loss_chunk=512,
        picture_seconds=0.0,
    )
    return c
