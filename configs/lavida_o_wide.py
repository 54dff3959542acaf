# SPDX-License-Identifier: Apache-2.0
r"""LaViDa-O at its full widths, but two layers: how much 8 bits change sums over 4,096 numbers.

    python -m benchmarks.sampling --config=configs/lavida_o_wide.py --random-weights \
        --suite=quant --runs=5

Widths, heads and vocabulary are those of the release. It takes 15 GB and an hour on two cores:
images have 256 px, answers 16 tokens, and the products are float32.
"""

import pathlib
import runpy

import ml_collections

FULL = pathlib.Path(__file__).with_name("lavida_o.py")


def get_config() -> ml_collections.ConfigDict:
    c = runpy.run_path(str(FULL))["get_config"]()
    c.name = "lavida_o_wide"
    # One layer with both branches, one without generation branch.
    c.model.update(num_layers=2, dual_tower_layers=0, grid_size=8, compute_dtype="float32")
    c.model.vision.num_layers = 1
    c.data.update(text_block_len=8, max_answer_len=16)
    c.sampling.update(num_steps=16)
    return c
