# SPDX-License-Identifier: Apache-2.0
r"""What does the step-causal mask gain in fine-tuning, and from scratch? Table 8 of the paper.

    python -m benchmarks.ablation --config=configs/ablation_training.py

A dense model is trained, and then for half as many steps again: step-causally, with several masked
blocks per row or one; with registers and truncation but full attention (one block, since several
would see each other); or densely. The paper: 0.78 step-causally, 0.71 truncated; without further
training 0.24 sampled sparsely and 0.77 sampled densely. Models from scratch train for as many steps
as the dense model, step-causally, with blocks from a schedule, or with uniform ones, whose masking
is that of full attention.
"""

import ablation
import ml_collections

BEFORE, AFTER = 2000, 1000  # steps of the dense model, and of those that start from it
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
