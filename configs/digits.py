# SPDX-License-Identifier: Apache-2.0
r"""Handwritten digits: a small real data set, with 8x8 cells of 17 grey levels.

    pip install -e '.[digits]'
    python -m sparse_lavida_jax.main --config=configs/digits.py

Takes about 8 minutes on two CPU cores. The grey levels are the codes, so no image tokenizer is
needed; a nearest-neighbour classifier judges the drawings.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "digits"
    c.seed = 0

    c.model = dict(
        vocab_size=518,
        width=96,
        mlp_hidden=256,
        num_layers=4,
        dual_tower_layers=1,
        num_heads=3,
        head_dim=32,
        rope_theta=10_000.0,
        generation_width=96,
        generation_mlp_hidden=256,
        codebook_size=17,
        codes_per_token=1,
        grid_size=8,
        cell_positions=True,
        num_registers=4,
        unroll_layers=True,
    )
    c.data = dict(
        source="digits",
        image_codec="grey",
        tasks=dict(digit=1.0),
        prompt_drop=0.1,
        given=0.1,
    )
    c.diffusion = dict(blocks="schedule", num_masked_blocks=6, plan_steps=(16, 24, 32))
    # Grey levels of neighbours depend on each other, but the codes of one step are drawn
    # independently: hence many steps.
    c.sampling = dict(num_steps=32, schedule="shift", shift=2.0, temperature=0.9, plan=False)

    c.optimizer = dict(
        kind="muon",
        learning_rate=2e-3,
        warmup_steps=50,
        b1=0.9,
        b2=0.99,
        weight_decay=0.01,
        ema=0.998,
    )
    c.train = dict(
        train_steps=100_000,
        batch_size=16,
        seconds=400.0,
        checkpoint_seconds=120.0,
        image_seconds=130.0,
    )
    return c
