# SPDX-License-Identifier: Apache-2.0
r"""DocVQA, val: 5349 questions (table 5 of the paper); test with evaluate.split=test.

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_docvqa.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/docvqa

Room for an answer as in lmms-eval. Temperature 0 and one token a step, as the base model was
evaluated (spec Sec. 6).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_docvqa"
    c.evaluate = dict(
        benchmark="docvqa",
        split="val",
        max_new_tokens=32,
    )
    c.sampling = dict(text_temperature=0.0, text_step_ratio=1.0)
    return c
