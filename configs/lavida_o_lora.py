# SPDX-License-Identifier: Apache-2.0
r"""LoRA of LaViDa-O on one GPU: a frozen base in bfloat16, with adapters in the layers' matrices.

    sparse-lavida fits configs/lavida_o_lora.py
    python -m sparse_lavida_jax.main --config=configs/lavida_o_lora.py

The base is a converted release (`--mode=convert`). Rank, alpha and learning rate are ours.
`configs/lavida_o_lora.py:paper` assigns blocks as in the paper (docs/api/training.md).
"""

import lavida_o
import ml_collections


def get_config(assignment: str = "plan") -> ml_collections.ConfigDict:
    c = lavida_o.for_training("lavida_o_lora", assignment)
    c.lora = dict(rank=16, alpha=32.0)
    c.optimizer = dict(learning_rate=1e-4, warmup_steps=100, frozen_dtype="bfloat16")
    c.train.batch_size = 1
    return c
