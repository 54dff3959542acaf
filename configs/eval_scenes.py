# SPDX-License-Identifier: Apache-2.0
"""Exact scores of a small model on the scenes, its held-out combinations among them.

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_scenes.py

Of the bundled model; another one with --checkpoint. Prompts are ours, and training never saw them.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_scenes"
    c.evaluate = dict(
        benchmark="scenes",
        checkpoint="scenes",
        limit=100,
        batch_size=32,
    )
    return c
