# SPDX-License-Identifier: Apache-2.0
r"""How should masked tokens be assigned to blocks? Uniformly, as in the paper, or by a schedule.

    python -m benchmarks.ablation --config=configs/ablation_blocks.py

Nothing else differs between the two.
"""

import ablation
import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ablation.get_config("ablation_blocks")


def get_ablation() -> dict:
    return dict(
        question="Blocks drawn uniformly, or steps of a sampler's plan?",
        tasks=("draw", "draw/held_out"),
        ways=dict(schedule=dict(), uniform=dict(changes=dict(diffusion=dict(blocks="uniform")))),
    )
