# SPDX-License-Identifier: Apache-2.0
r"""What does the way of sampling change? One model a seed; its orders, registers, guidance.

    python -m sparse_lavida_jax.bench.ablation --config=configs/ablation_sampling.py

A quarter of an hour a seed on a CPU core.
"""

import ablation
import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ablation.get_config("ablation_sampling")


def get_ablation() -> dict:
    guided = dict(guidance=1.0)
    sampled = {
        "stratified": dict(),
        "halton": dict(order="halton"),
        "random": dict(order="random"),
        "confidence_untruncated": dict(order="confidence", preset="none"),
        "registers_fall": dict(registers_end=1),
        "guided": guided,
        "guided_first_half": guided | dict(guidance_interval=(0.0, 0.5)),
        "guided_second_half": guided | dict(guidance_interval=(0.5, 1.0)),
    }
    return dict(
        question="Orders, registers that fall, intervals of guidance",
        tasks=("draw",),
        ways=dict(sparse=dict(sampled=sampled)),
    )
