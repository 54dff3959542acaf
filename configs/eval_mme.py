# SPDX-License-Identifier: Apache-2.0
r"""MME: 2374 questions to be answered yes or no (table 5 of the paper has cognition).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_mme.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/mme

Room for an answer as in lmms-eval. Temperature 0 and one token a step, as the base model was
evaluated (spec Sec. 6).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_mme"
    c.evaluate = dict(
        benchmark="mme",
        max_new_tokens=16,
    )
    c.sampling = dict(text_temperature=0.0, text_step_ratio=1.0)
    return c
