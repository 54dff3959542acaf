# SPDX-License-Identifier: Apache-2.0
r"""LaViDa-O's structure at a tiny width: 32 layers, two branches, views of images, 4 codes.

    python -m benchmarks.sampling --config=configs/lavida_o_tiny.py --random-weights \
        --suite=headline

`configs/lavida_o_tiny.py:lora` trains adapters for a frozen base in bfloat16. What runs here also
runs at full size, but its speed says nothing about the speed there.
"""

import pathlib
import runpy

import ml_collections

FULL = pathlib.Path(__file__).with_name("lavida_o.py")


def get_config(trained: str = "all") -> ml_collections.ConfigDict:
    c = runpy.run_path(str(FULL))["get_config"]()
    c.name = "lavida_o_tiny"
    c.model.update(
        vocab_size=512, end_of_text_id=500, text_mask_id=501, width=32, mlp_hidden=48, num_heads=2,
        head_dim=16, generation_width=16, generation_mlp_hidden=32, codebook_size=32,
        image_table_rows=40, grid_size=8, num_registers=8, compute_dtype="float32",
    )  # fmt: skip
    c.model.vision.update(
        image_size=16, patch_size=4, width=16, num_layers=1, num_heads=2, mlp_hidden=16,
        grid_sizes=((16, 32), (32, 16), (32, 32), (48, 16), (16, 48)),
    )  # fmt: skip
    c.vq.update(
        image_size=64, channels=(8, 8, 8), layers_per_block=1, latent_channels=4, codebook_size=32,
        norm_groups=4,
    )  # fmt: skip
    c.data.update(text_block_len=8, max_answer_len=16)
    c.sampling.update(num_steps=8, text=dict(steps=4))
    if trained == "lora":
        c.lora = dict(rank=2, alpha=4.0)
        c.optimizer = dict(frozen_dtype="bfloat16")
    return c
