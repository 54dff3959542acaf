# SPDX-License-Identifier: Apache-2.0
r"""How many registers are needed? The paper: 64 for 1,024 cells; 0 and 1 are worst (Table 7).

    python -m benchmarks.ablation --config=configs/ablation_registers.py

2 for 36 cells are the paper's ratio. Blocks are merged the same way for all.
"""

import ablation
import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ablation.get_config("ablation_registers")


def get_ablation() -> dict:
    ways = {str(m): dict(changes=dict(model=dict(num_registers=m))) for m in (0, 1, 2, 4, 8, 36)}
    ways["4"] = dict()  # as in `configs/scenes.py`
    return dict(
        question="How many registers are needed?", tasks=("draw", "draw/held_out"), ways=ways
    )
