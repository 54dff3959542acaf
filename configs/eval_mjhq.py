# SPDX-License-Identifier: Apache-2.0
r"""MJHQ-30K: FID, PickScore, HPS v2 and HPS v3 of 30,000 images (table 2 of the paper).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_mjhq.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/mjhq

Sampling settings are those of the checkpoint: conversion writes the released ones (spec Sec. 7.5).
The encoders and the model that judge are other projects': docs/evaluation.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_mjhq"
    c.evaluate = dict(
        benchmark="mjhq",
        num_images=1,
    )
    return c
