# SPDX-License-Identifier: Apache-2.0
r"""The dense baseline of the bundled model: trained and sampled with full attention.

    python -m sparse_lavida_jax.main --config=configs/scenes_dense.py

Size, data and seed are those of `configs/scenes_long.py`, without blocks, registers or cache:
LaViDa-O's own method at this scale. A dense step takes at most 1.6 times less CPU time (1.3 times
fewer operations), so that each lesson and the whole run have 1.6 times as many steps.
"""

import ml_collections
import scenes_long

STEPS = 1.6  # relative to the sparse model


def get_config() -> ml_collections.ConfigDict:
    c = scenes_long.get_config()
    c.name = "scenes_dense"
    c.diffusion.attention = "full"
    c.model.trained_attention = "full"
    c.train.train_steps = int(STEPS * c.train.train_steps)
    for lesson in c.data.lessons.values():
        lesson.until = int(STEPS * lesson.until)
    return c
