# SPDX-License-Identifier: Apache-2.0
r"""LaViDa-O at full size, 10.4 B parameters, trained sparsely: to be measured without its weights.

    python -m benchmarks.sampling --config=configs/lavida_o.py --random-weights

Sizes and sampling settings are those of the release (spec Sec. 2, 6). A converted checkpoint
carries its own settings and needs no config file.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.name = "lavida_o"

    c.model = dict(
        vocab_size=127_378,
        end_of_text_id=126_081,
        text_mask_id=126_336,
        width=4096,
        mlp_hidden=12_288,
        num_layers=32,
        dual_tower_layers=16,
        num_heads=32,
        head_dim=128,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        generation_width=2048,
        generation_mlp_hidden=8192,
        codebook_size=8192,
        codes_per_token=4,
        grid_size=32,
        image_head="dit2",
        image_table_rows=8448,
        num_registers=64,
        compute_dtype="bfloat16",
        vision=dict(
            image_size=384,
            patch_size=14,
            width=1152,
            num_layers=26,
            num_heads=16,
            mlp_hidden=4304,
            pool=2,
            newline=True,
            grid_sizes=((384, 768), (768, 384), (768, 768), (1152, 384), (384, 1152)),
            unused_post_norm=True,
        ),
    )

    c.vq = dict(
        image_size=1024,
        channels=(128, 256, 256, 512, 768),
        layers_per_block=2,
        mid_attention=False,
        latent_channels=64,
        codebook_size=8192,
        norm_groups=32,
    )

    c.data = dict(source="none", text_block_len=32, max_answer_len=256)

    c.sampling = dict(
        num_steps=64,
        shift=5.0,
        temperature=0.8,
        guidance=4.0,
        guidance_edit=1.2,
        guidance_image=1.4,
        edit_guidance="source",
        text=dict(steps=16),
        layout=False,
    )
    return c


# How training cuts responses into blocks (docs/api/training.md); chosen after the name of a config:
# `configs/sft_1024.py:paper`. A run must continue with the same assignment; `one_step`, and then
# `schedule`, used to be the default.
ASSIGNMENTS = dict(
    # Ours. An image row contains every step of a sampler's plan, merged until each has 128 cells; a
    # text row contains the tokens of eight of its steps.
    plan=dict(blocks="plan", plan_steps=(64,), merge_cells=128, text_masked_blocks=8),
    # Eight rival steps of an image, and eight of a text.
    schedule=dict(num_masked_blocks=8, text_masked_blocks=8),
    # As in the paper (Sec. 3.3, M and N of its figure), with its loss (Eq. 1).
    paper=dict(blocks="uniform", num_clean_blocks=3, num_masked_blocks=2, weighting="1/t"),
    # As `schedule`, but with a single step of a text.
    one_step=dict(num_masked_blocks=8, text_masked_blocks=1),
)


def for_training(name: str, assignment: str) -> ml_collections.ConfigDict:
    """Returns the settings shared by training runs that start from a converted release.

    Args:
        assignment: one of `ASSIGNMENTS`.
    """
    if assignment not in ASSIGNMENTS:
        raise ValueError(f"there is no {assignment!r}. There are: {', '.join(ASSIGNMENTS)}.")
    c = get_config()
    c.name = f"{name}_paper" if assignment == "paper" else name
    c.model.remat = "layer"
    c.data = dict(
        source="prepared",
        folder="prepared",
        text_block_len=32,
        max_answer_len=256,
        # Evaluations ask for up to this many (docs/evaluation.md).
        sampled_answer_len=0 if assignment == "one_step" else 1024,
        source_drop=0.5,  # spec Sec. 9.2
    )
    c.diffusion = dict(plan_steps=(16, 32, 64), plan_text_steps=(8, 16, 32))
    c.diffusion.update(ASSIGNMENTS[assignment])
    c.train = dict(init_from="models/lavida-o", image_seconds=0.0)
    return c
