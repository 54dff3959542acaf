# SPDX-License-Identifier: Apache-2.0
r"""GenEval: 553 prompts, four images each (table 1 of the paper).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_geneval.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/geneval

Sampling settings are those of the checkpoint: conversion writes the released ones (spec Sec. 7.5).
The prefix is that of the released evaluation (spec Sec. 7.5). The detector that judges is another
project's: docs/evaluation.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_geneval"
    c.evaluate = dict(
        benchmark="geneval",
        num_images=4,
        prefix="a realistic image, 4k. ",
    )
    return c
