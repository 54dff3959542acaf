# SPDX-License-Identifier: Apache-2.0
r"""MathVerse, testmini: 3940 questions (table 5 of the paper).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_mathverse.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/mathverse

Room as for MathVista: ours, the paper does not say. Temperature 0 and one token a step, as the base
model was evaluated (spec Sec. 6).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_mathverse"
    c.evaluate = dict(
        benchmark="mathverse",
        max_new_tokens=1024,
    )
    c.sampling = dict(text_temperature=0.0, text_step_ratio=1.0)
    return c
