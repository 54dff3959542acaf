# SPDX-License-Identifier: Apache-2.0
r"""Only the generation branch of LaViDa-O, trained as in stage s2-1024 of the release.

    sparse-lavida fits configs/lavida_o_branch.py
    python -m sparse_lavida_jax.main --config=configs/lavida_o_branch.py

The understanding branch is frozen, in bfloat16 (spec Sec. 9.5). Stage s2-256 has a learning rate of
1e-4.
"""

import lavida_o
import ml_collections

BRANCH = r"generation|^image_(embedding|head)/"
RATE = 5e-6


def get_config(assignment: str = "plan") -> ml_collections.ConfigDict:
    c = lavida_o.for_training("lavida_o_branch", assignment)
    c.optimizer = dict(
        learning_rate=RATE,
        final_fraction=0.1,
        warmup_steps=3000,
        b1=0.9,
        b2=0.999,
        groups=((BRANCH, RATE), ("", 0.0)),
        frozen_dtype="bfloat16",
    )
    c.train.update(train_steps=100_000, batch_size=1)
    return c
