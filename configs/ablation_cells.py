# SPDX-License-Identifier: Apache-2.0
r"""What is one token? One code, or a cell of four, with and without a plan.

    python -m sparse_lavida_jax.bench.ablation --config=configs/ablation_cells.py

Four codes of a cell are drawn independently, so what stands in it has to be decided before. Half an
hour a seed on a CPU core.
"""

import ablation
import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ablation.get_config("ablation_cells")


def get_ablation() -> dict:
    four = dict(
        model=dict(codes_per_token=4, codebook_size=256), data=dict(picture_codec="scenes_g4")
    )
    sampled = dict(laid_out_first=dict(), at_once=dict(plan=False))
    in_passes = {
        f"{name}_{passes}_passes": changes | dict(cell_passes=passes)
        for name, changes in sampled.items()
        for passes in (2, 4)
    }
    return dict(
        question="One code a token or four, laid out first or at once?",
        tasks=("draw",),
        ways={
            "one_code": dict(sampled=sampled),
            "four_codes": dict(changes=four, sampled=sampled),
            "four_codes_partly_known": dict(
                changes=four | dict(diffusion=dict(partial_cells=0.5)), sampled=sampled | in_passes
            ),
        },
    )
