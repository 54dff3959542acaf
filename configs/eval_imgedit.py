# SPDX-License-Identifier: Apache-2.0
r"""ImgEdit: 737 edits of nine types (table 3 of the paper).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_imgedit.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/imgedit

Sampling settings are those of the checkpoint: conversion writes the released ones (spec Sec. 7.5).
The judge is GPT-4o: docs/evaluation.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_imgedit"
    c.evaluate = dict(
        benchmark="imgedit",
    )
    return c
