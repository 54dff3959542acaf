# SPDX-License-Identifier: Apache-2.0
r"""How many steps should a row of text predict? Answers to questions about an image.

    python -m benchmarks.ablation --config=configs/ablation_text_blocks.py

A sampler writes one text block after another, so a step-causal row with one step predicts what is
masked of eight tokens, while a dense row predicts what is masked of all. `uniform`, as in the
paper, also masks all text blocks at once, which no sampler does.
"""

import ablation
import ablation_quality
import ml_collections

ANSWER = ablation_quality.SKILLS["answer"]


def get_config() -> ml_collections.ConfigDict:
    return ablation.get_config("ablation_text_blocks")


def get_ablation() -> dict:
    return dict(
        question="Of how many steps should a row of text predict the tokens?",
        tasks=("answer",),
        ways={
            "steps_1": dict(changes=ANSWER),
            "steps_4": dict(changes=ANSWER | dict(diffusion=dict(text_masked_blocks=4))),
            "uniform": dict(changes=ANSWER | dict(diffusion=dict(blocks="uniform"))),
            "dense": dict(changes=ANSWER | ablation_quality.KINDS["dense"]),
        },
    )
