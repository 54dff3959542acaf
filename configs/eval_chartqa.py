# SPDX-License-Identifier: Apache-2.0
r"""ChartQA, test: 2500 questions (table 5 of the paper).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_chartqa.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/chartqa

Room for an answer as in lmms-eval. Temperature 0 and one token a step, as the base model was
evaluated (spec Sec. 6).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_chartqa"
    c.evaluate = dict(
        benchmark="chartqa",
        split="test",
        max_new_tokens=16,
    )
    c.sampling = dict(text_temperature=0.0, text_step_ratio=1.0)
    return c
