# SPDX-License-Identifier: Apache-2.0
r"""DPG-Bench: 1065 long prompts, four images each (table 2 of the paper).

    python -m sparse_lavida_jax.main --mode=evaluate --config=configs/eval_dpg.py \
        --checkpoint=models/lavida-o --config.evaluate.data=benchmarks/dpg

Sampling settings are those of the checkpoint: conversion writes the released ones (spec Sec. 7.5).
The model that judges is another project's: docs/evaluation.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "eval_dpg"
    c.evaluate = dict(
        benchmark="dpg",
        num_images=4,
    )
    return c
