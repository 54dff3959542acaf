# SPDX-License-Identifier: Apache-2.0
r"""A small model for 16 x 16 images, so that anyone can measure what leaving tokens out saves.

    python -m benchmarks.sampling --config=configs/speed_cpu.py --random-weights \
        --suite=cpu

Takes a minute on two cores.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "speed_cpu"
    c.model = dict(
        vocab_size=512,
        end_of_text_id=500,
        text_mask_id=501,
        width=256,
        mlp_hidden=768,
        num_layers=8,
        dual_tower_layers=3,
        num_heads=4,
        head_dim=64,
        generation_width=256,
        generation_mlp_hidden=768,
        codebook_size=256,
        codes_per_token=1,
        grid_size=16,
        num_registers=16,
    )
    c.data = dict(source="none", text_block_len=32, max_answer_len=64)
    c.sampling = dict(num_steps=32, shift=3.0, guidance=0.0, layout=False)
    return c
