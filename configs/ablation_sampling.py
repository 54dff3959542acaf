# SPDX-License-Identifier: Apache-2.0
r"""What do sampling settings change? One model per seed; its orders, registers and guidance.

    python -m benchmarks.ablation --config=configs/ablation_sampling.py

Training used only stratified orders. Each image has an order from its own seed.
"""

import ablation
import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ablation.get_config("ablation_sampling")
    c.sampling.order_seed = -1
    return c


def get_ablation() -> dict:
    guided = dict(guidance=1.0)
    untruncated = dict(preset="none", text=dict(preset="sparse"))
    sampled = {
        "stratified": dict(),
        "halton": dict(order="halton"),
        "random": dict(order="random"),
        "stratified_untruncated": untruncated,
        "confidence_untruncated": untruncated | dict(order="confidence"),
        "registers_fall": dict(registers_end=1),
        "guided": guided,
        "guided_first_half": guided | dict(guidance_interval=(0.0, 0.5)),
        "guided_second_half": guided | dict(guidance_interval=(0.625, 1.0)),  # steps 5 to 8
    }
    return dict(
        question="Orders, registers that fall, intervals of guidance",
        tasks=("draw",),
        ways=dict(sparse=dict(sampled=sampled)),
    )
