# SPDX-License-Identifier: Apache-2.0
r"""MathVista, testmini: 1000 questions (table 4 of the paper).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_mathvista.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/mathvista

Room for 1024 tokens in blocks of 32, as in the paper; how many tokens a step it takes the paper
does not say. Temperature 0 and one token a step, as the base model was evaluated (spec Sec. 6).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_mathvista"
    c.evaluate = dict(
        benchmark="mathvista",
        split="testmini",
        max_new_tokens=1024,
    )
    c.sampling = dict(text_temperature=0.0, text_step_ratio=1.0)
    return c
