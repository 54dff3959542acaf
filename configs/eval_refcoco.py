# SPDX-License-Identifier: Apache-2.0
r"""RefCOCO: P@0.5 of boxes found in one step (table in the paper's supplement).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_refcoco.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/refcoco

Validation; the others with --config.evaluate.split=refcoco/testA and refcoco/testB. Prompt and step
are those of the released evaluation (spec Sec. 8).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_refcoco"
    c.evaluate = dict(
        benchmark="refcoco",
        split="refcoco/val",
        batch_size=16,
    )
    c.sampling = dict(text_steps=1, text_step_ratio=0.0, text_commit="count")
    return c
