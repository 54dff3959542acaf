# SPDX-License-Identifier: Apache-2.0
r"""What does the step-causal mask bring in fine-tuning, and from scratch? Table 8 of the paper.

    python -m sparse_lavida_jax.bench.ablation --config=configs/ablation_training.py

A dense model is trained, then for as many steps again as half of that: step-causally, with several
masked blocks a row or with one; with registers and truncated, but full attention (one block, since
others would see each other); densely. The paper: 0.78 step-causally, 0.71 truncated; without any
training 0.24 when sampled sparsely, and 0.77 when sampled densely. From scratch there are as many
steps as of the dense model, step-causal with blocks of a schedule or with uniform ones, as full
attention masks.
"""

import ablation
import ml_collections

BEFORE, AFTER = 2000, 1000  # steps of the dense model, and of what starts from it
DENSE = dict(preset="dense")
SPARSE = dict(preset="sparse")
BOTH = dict(dense=DENSE, sparse=SPARSE)


def get_config() -> ml_collections.ConfigDict:
    c = ablation.get_config("ablation_training")
    c.train.train_steps = BEFORE
    return c


def _after_dense(sampled: dict, **diffusion) -> dict:
    changes = dict(train=dict(train_steps=AFTER), diffusion=diffusion)
    return dict(after="dense", changes=changes, sampled=sampled)


def get_ablation() -> dict:
    only_sparse = dict(sparse=SPARSE)
    return dict(
        question="What does step-causal training bring?",
        tasks=("draw", "draw/held_out"),
        ways=dict(
            dense=dict(changes=dict(diffusion=dict(attention="full")), sampled=BOTH),
            dense_dense=_after_dense(BOTH, attention="full"),
            dense_step_causal=_after_dense(only_sparse),
            dense_step_causal_one=_after_dense(only_sparse, num_masked_blocks=1),
            dense_truncated=_after_dense(only_sparse, attention="truncated", num_masked_blocks=1),
            scratch_step_causal=dict(sampled=only_sparse),
            scratch_step_causal_uniform=dict(
                changes=dict(diffusion=dict(blocks="uniform")), sampled=only_sparse
            ),
        ),
    )
