# SPDX-License-Identifier: Apache-2.0
r"""A small Sparse-LaViDa that learns to draw, edit, answer and point, from scratch, on a laptop.

    python -m sparse_lavida_jax.main --config=configs/scenes.py

Takes a quarter of an hour on two CPU cores, report included. One code per cell; images are laid
out in text before they are drawn. Everything here is ours: the paper has no model of this size.
In this time it learns to draw, to name objects and to find them; edits and answers take
`configs/scenes_long.py`, which trains the bundled model.
"""

import ml_collections

# One skill after another: with all tasks at once, no task that needs looking is learned for
# thousands of steps. Learned skills are rehearsed: otherwise they are forgotten within a thousand.
LESSONS = dict(
    # To name what is at a place. With many objects, few names can be guessed from the others.
    name=dict(until=500, tasks=dict(name_some=1.0)),
    # And the reverse.
    look=dict(until=1300, tasks=dict(name_some=1.0, locate=1.5, point=1.5, quiz_fair=0.7)),
    draw=dict(
        until=3000,
        tasks=dict(
            layout=6.0, draw=5.0, locate=0.6, point=0.6, name_some=0.4, answer=0.8, edit=0.4
        ),
    ),
)


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "scenes"
    c.seed = 0

    c.model = dict(
        vocab_size=518,
        width=96,
        mlp_hidden=256,
        num_layers=4,
        dual_tower_layers=2,
        num_heads=8,
        head_dim=16,
        # A masked word has to gather from its neighbours what it is about before it can look.
        neighbour_heads=(1, 2, 3, -1, -2, -3, -4, -5),
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
        image_codec="scenes",
        lessons=LESSONS,
        tasks=dict(
            layout=5.0,
            draw=7.0,
            edit=2.0,
            edit_layout=1.0,
            fill_layout=0.2,
            answer=1.0,
            point=1.0,
            locate=1.0,
            name_some=0.5,
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
        sampled_answer_len=40,
        edit_keeps=0.6,
        given=0.1,
        prompt_drop=0.05,
        source_drop=0.0,
    )

    # Every step of a sampler's plan in one row; for a text, up to eight of them. In a third of the
    # texts, everything missing from a block is masked at once: if some words or all other objects
    # are known, a word can be guessed without looking at the image.
    c.diffusion = dict(
        blocks="plan",
        text_masked_blocks=8,
        plan_steps=(6, 8, 12, 18),
        plan_text_steps=(1, 4, 8),
    )
    c.sampling = dict(
        num_steps=8,
        schedule="shift",
        shift=2.0,
        temperature=0.3,
        text=dict(steps=8),
        # Layouts stay right and still differ: at 1.0, .93 of the bundled model's positions are
        # right, here .97.
        layout_temperature=0.35,
    )

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
        seconds=720.0,
        checkpoint_seconds=120.0,
        image_seconds=240.0,
        eval_prompts=48,
    )
    return c
