# SPDX-License-Identifier: Apache-2.0
r"""A small Sparse-LaViDa that learns to draw, edit, answer and point, from scratch, on a laptop.

    python -m sparse_lavida_jax.main --config=configs/scenes.py

Takes a quarter of an hour on two CPU cores, report included. One code per cell; images are laid
out in text before they are drawn. Everything here is ours: the paper has no model of this size.
`configs/scenes.py:schedule` cuts responses into blocks as this config once did (docs/training.md).
"""

import ml_collections

BLOCKS = dict(
    # Every step of a sampler's plan in one row; for a text, up to eight of them.
    plan=dict(blocks="plan", text_masked_blocks=8),
    # A few steps of the plan. Runs that were started this way continue with it.
    schedule=dict(blocks="schedule", num_masked_blocks=4),
)


def get_config(blocks: str = "plan") -> ml_collections.ConfigDict:
    if blocks not in BLOCKS:
        raise ValueError(f"there is no {blocks!r}. There are: {', '.join(BLOCKS)}.")
    c = ml_collections.ConfigDict()
    c.name = "scenes"
    c.seed = 0

    c.model = dict(
        vocab_size=518,
        width=96,
        mlp_hidden=256,
        num_layers=4,
        dual_tower_layers=2,
        num_heads=3,
        head_dim=32,
        rope_theta=10_000.0,
        generation_width=64,
        generation_mlp_hidden=192,
        codebook_size=64,
        codes_per_token=1,
        grid_size=6,
        cell_positions=True,
        num_registers=4,
        unroll_layers=True,
        vision=dict(
            image_size=96,
            patch_size=16,
            width=96,
            num_layers=1,
            num_heads=3,
            mlp_hidden=192,
            pool=1,
        ),
    )

    c.data = dict(
        source="scenes",
        image_codec="scenes_g1",
        # Drawing is taught first: with all tasks at once, it is learned only near the end.
        lessons=dict(draw=dict(until=2000, tasks=dict(plan=3.0, draw=7.0))),
        tasks=dict(
            plan=3.2,
            draw=9.0,
            edit=2.0,
            edit_plan=1.0,
            fill_plan=0.2,
            answer=1.0,
            point=1.0,
            detect=1.2,
            arithmetic=0.4,
            caption=0.4,
            constrained_caption=0.2,
            infill=0.3,
            reflect=0.5,
            inpaint=0.2,
            outpaint=0.2,
        ),
        text_block_len=8,
        max_answer_len=40,
        given=0.1,
        prompt_drop=0.05,
        source_drop=0.0,
    )

    c.diffusion = dict(plan_steps=(6, 8, 12, 18), **BLOCKS[blocks])
    c.sampling = dict(num_steps=8, schedule="shift", shift=2.0, temperature=0.3, text_steps=8)

    c.optimizer = dict(
        kind="muon",
        learning_rate=2.2e-3,
        warmup_steps=50,
        b1=0.9,
        b2=0.99,
        weight_decay=0.01,
        ema=0.998,
    )
    c.train = dict(
        train_steps=100_000,
        batch_size=16,
        seconds=620.0,
        checkpoint_seconds=120.0,
        image_seconds=220.0,
        eval_prompts=48,
    )
    return c
