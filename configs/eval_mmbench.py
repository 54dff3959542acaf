# SPDX-License-Identifier: Apache-2.0
r"""MMBench, dev, English: 1164 questions in every order (table 5 of the paper).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_mmbench.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/mmbench

Room for an answer: ours; lmms-eval gives 1024 tokens for what is one letter. Temperature 0 and one
token a step, as the base model was evaluated (spec Sec. 6).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_mmbench"
    c.evaluate = dict(
        benchmark="mmbench",
        split="MMBench_DEV_EN",
        max_new_tokens=32,
    )
    c.sampling = dict(text_temperature=0.0, text_step_ratio=1.0)
    return c
