# SPDX-License-Identifier: Apache-2.0
r"""A small Sparse-LaViDa that draws, edits and answers questions about scenes of real art.

    python -m sparse_lavida_jax.training.vision_tower --config=configs/art.py \
        --out=runs/art.safetensors
    python -m sparse_lavida_jax.main --config=configs/art.py
    python -m sparse_lavida_jax.main --config=configs/art.py:blind
    python -m sparse_lavida_jax.main --config=configs/art.py:late

12x12 cells of four codes each, for 96x96 pixels; 40 of the 120 things, in batches of 16: why is in
docs/log/2026-11-art-model.md. The first command teaches the vision tower to see, 20 minutes of one
quiet CPU core; the second takes about ten hours, by the times of its steps.
Settings are ours. `blind` sees empty images: what it gets right in a task about an image can be
known without looking. `late` goes on from the bundled model, or another `train.init_from`, without
lessons and with learning rates that fall to the end, as the bundled model and its twin ended.
"""

import ml_collections

# As in `configs/scenes.py`: one skill after another, and learned skills are rehearsed. Most of what
# a model has to remember is what things look like: parts of images teach that, with several times
# as many cells of things a second as whole images.
LESSONS = dict(
    name=dict(until=1200, tasks=dict(name=1.0)),
    look=dict(until=3000, tasks=dict(name=1.0, locate=1.0, ask=1.5, ground=1.0)),
    parts=dict(
        until=15_000,
        tasks=dict(draw_part=8.0, layout=0.5, name=0.5, locate=0.3, ask=0.7, ground=0.3),
    ),
)


ABOUT_IMAGES = (
    "ask", "reason", "ground", "locate", "detect", "name", "caption", "infill", "retell", "reflect",
)  # fmt: skip


VARIANTS = ("whole", "blind", "late")


def get_config(variant: str = "whole") -> ml_collections.ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"art has no variant {variant!r}: choose {', '.join(VARIANTS)}.")
    c = ml_collections.ConfigDict()
    c.name = "art"
    c.seed = 0

    c.model = dict(
        vocab_size=1792,
        width=128,
        mlp_hidden=256,
        num_layers=5,
        dual_tower_layers=3,
        num_heads=8,
        head_dim=16,
        neighbour_heads=(1, 2, 3, -1, -2, -3, -4, -5),
        rope_theta=10_000.0,
        # Codes of every block of every drawing: most of what is to be remembered.
        generation_width=128,
        generation_mlp_hidden=384,
        codebook_size=1024,
        codes_per_token=4,
        sequential_codes=True,  # all four have the style of the first
        grid_size=12,
        cell_positions=True,
        num_registers=4,
        unroll_layers=True,
        vision=dict(
            image_size=96,
            patch_size=8,
            width=96,
            num_layers=2,
            num_heads=3,
            mlp_hidden=192,
            pool=2,
        ),
    )
    c.data = dict(
        source="art",
        image_codec="art",
        things=40,
        lessons=LESSONS,
        tasks=dict(
            draw=4.0,
            draw_part=1.5,
            layout=8.0,
            edit=1.5,
            edit_layout=2.5,
            inpaint=0.4,
            outpaint=0.4,
            fill_layout=0.8,
            ask=3.0,
            reason=1.5,
            reflect=1.2,
            ground=2.5,
            locate=1.2,
            detect=1.5,
            name=2.0,
            caption=1.6,
            infill=0.6,
            retell=0.2,
        ),
        edit_keeps=0.6,
        text_block_len=8,
        max_answer_len=40,
        sampled_answer_len=40,
        layout_drop=0.25,
        given=0.1,
        prompt_drop=0.05,
        source_drop=0.0,
    )
    # Every step of a sampler's plan in one row. Plans begin with single cells, which settle what
    # words leave open: cells of one step cannot agree on it (benchmarks/plan_bounds.py).
    c.diffusion = dict(
        blocks="plan",
        text_masked_blocks=8,
        plan_steps=(8, 12, 16, 20),
        layout_first=0.3,
        plan_text_steps=(1, 4, 8),
        merge_cells=0,
    )
    c.sampling = dict(
        num_steps=12,
        order="layout",
        schedule="shift",
        shift=16.0,
        temperature=0.1,
        revisions=4,  # what plans draw: docs/few_steps.md
        text=dict(steps=8),
        layout_temperature=0.35,
    )
    c.optimizer = dict(
        kind="muon",
        learning_rate=2.2e-3,
        warmup_steps=100,
        b1=0.9,
        b2=0.99,
        weight_decay=0.01,
        ema=0.999,
        final_fraction=0.03,
    )
    c.train = dict(
        train_steps=50_000,
        vision_from="runs/art.safetensors",
        batch_size=16,
        loss_chunk=128,  # half of the cells have no loss: 10 to 20 % less time of a step on a core
        checkpoint_seconds=300.0,
        image_seconds=0.0,
        eval_every=5000,
        eval_prompts=64,
        eval_tasks=("layout", "ask", "ground"),
    )
    if variant == "late":
        # Layouts are known by then; what drawings lack is single cells (docs/log).
        c.data.tasks.update(
            draw=10.0, draw_part=4.0, edit=3.0, inpaint=0.6, outpaint=0.6, layout=3.0,
            edit_layout=2.0, ground=3.0, name=1.2,
        )  # fmt: skip
        c.seed = 1  # other examples
        c.data.lessons = {}
        c.optimizer.learning_rate = 8e-4
        c.train.init_from = "art"
        c.train.train_steps = 7000
        c.train.vision_from = ""
        c.train.eval_every = 3500
    if variant == "blind":
        c.name = "art_blind"
        c.data.blind = True
        c.data.lessons = {}  # which teach to look
        c.data.tasks = {name: c.data.tasks[name] for name in ABOUT_IMAGES}
        c.train.train_steps = 3000
        c.train.vision_from = ""
        c.train.eval_every = c.train.eval_prompts = 0
        c.train.eval_tasks = ()
    return c
