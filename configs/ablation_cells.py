# SPDX-License-Identifier: Apache-2.0
r"""What is one token? One code or a cell of four, with or without layout, in one pass or several.

    python -m sparse_lavida_jax.main --config=configs/scenes_vq_g4.py  # for four codes
    python -m benchmarks.ablation --config=configs/ablation_cells.py

The four codes of a cell are drawn independently, so its contents have to be decided before: by a
layout, or by the codes of the cell that are drawn first (`sampling.cell_passes`). More passes are
more work, so the same number of passes is also tried as more steps.
"""

import ablation
import ml_collections

FOUR = dict(
    model=dict(codes_per_token=4, codebook_size=256), data=dict(image_codec="runs/scenes_vq_g4")
)
PASSES = {f"passes_{n}": dict(cell_passes=n) for n in (1, 2, 4)}
STEPS = {f"steps_{n}": dict(num_steps=n) for n in (8, 16, 32)}


def get_config() -> ml_collections.ConfigDict:
    return ablation.get_config("ablation_cells")


def _both(name: str, changes: dict, sampled: dict) -> dict:
    """Returns a way with layouts, and one that never sees any."""
    data = changes.get("data", {})
    without = changes | dict(data=data | dict(layout_drop=1.0))
    at_once = {key: one | dict(layout=False) for key, one in sampled.items()}
    return {
        name: dict(changes=changes, sampled=sampled),
        f"{name}_no_layout": dict(changes=without, sampled=at_once),
    }


def get_ablation() -> dict:
    half_known = FOUR | dict(diffusion=dict(partial_cells=0.5))
    return dict(
        question="One code a token or four, laid out first or at once?",
        tasks=("draw",),
        ways=_both("one_code", {}, STEPS)
        | _both("four_codes", FOUR, STEPS)
        | _both("four_codes_partly_known", half_known, PASSES),
    )
