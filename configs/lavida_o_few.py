# SPDX-License-Identifier: Apache-2.0
r"""LaViDa-O drawn in few steps: LoRA, with a style code that the cells of an image share.

    sparse-lavida fits configs/lavida_o_few.py
    python -m sparse_lavida_jax.main --config=configs/lavida_o_few.py
    python -m sparse_lavida_jax.main --config=configs/lavida_o_few.py:plain   # without a code
    python -m sparse_lavida_jax.main --config=configs/lavida_o_few.py:distil  # continues the first

Half of the image rows are drawn in one to four steps (docs/method.md); `distil` learns to decode
in one step what the average of its parameters decodes in two. It has not been tried at full size:
rank and learning rate are those of `configs/lavida_o_lora.py`.
"""

import lavida_o_lora
import ml_collections

WAYS = ("plain", "style", "distil")


def get_config(way: str = "style") -> ml_collections.ConfigDict:
    if way not in WAYS:
        raise ValueError(f"lavida_o_few has no variant {way!r}: choose {', '.join(WAYS)}.")
    c = lavida_o_lora.get_config()
    c.name = "lavida_o_few" if way == "style" else f"lavida_o_few_{way}"
    c.diffusion.plan_steps = (1, 2, 3, 4, 8, 16, 32, 64)
    c.sampling.update(num_steps=16, low_steps=8)
    if way != "plain":
        c.model.update(style_parts=9, style_groups=8, style_values=2)
        c.lora.also = "^(register_|style_code/)"
    if way == "style":
        c.optimizer.style_warmup_steps = 500
    if way == "distil":
        c.train.init_from = "runs/lavida_o_few"
        c.optimizer.update(distil=1.0, ema=0.999)
    return c
