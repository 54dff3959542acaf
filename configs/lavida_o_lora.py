# SPDX-License-Identifier: Apache-2.0
r"""LoRA of LaViDa-O on one GPU: a frozen base in bfloat16, adapters beside the matrices of layers.

    python -m sparse_lavida_jax.bench.training --plan --config=configs/lavida_o_lora.py
    python -m sparse_lavida_jax.main --config=configs/lavida_o_lora.py

The base is a converted release (`--mode=convert`). Rank, alpha and learning rate are ours.
"""

import lavida_o
import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = lavida_o.get_config()
    c.name = "lavida_o_lora"
    c.model.remat = "layer"
    c.data = dict(
        source="prepared",
        folder="prepared",
        text_block_len=32,
        max_answer_len=256,
        source_drop=0.5,  # spec Sec. 9.2
    )
    c.diffusion = dict(num_masked_blocks=8, plan_steps=(16, 32, 64), plan_text_steps=(8, 16, 32))
    c.lora = dict(rank=16, alpha=32.0)
    c.optimizer = dict(learning_rate=1e-4, warmup_steps=100, frozen_dtype="bfloat16")
    c.train = dict(init_from="models/lavida-o", batch_size=1, loss_chunk=512, picture_seconds=0.0)
    return c
