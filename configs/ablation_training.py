# SPDX-License-Identifier: Apache-2.0
r"""What does the step-causal mask bring in fine-tuning, and from scratch? Table 8 of the paper.

    python -m sparse_lavida_jax.bench.ablation --config=configs/ablation_training.py

A dense model is trained, then for as many steps again as half of that: step-causally, with several
masked blocks a row or with one; with registers and truncated, but full attention (one block, since
others would see each other); densely. The paper: 0.78 step-causally, 0.71 truncated; without any
training 0.24 when sampled sparsely, and 0.77 when sampled densely. From scratch all steps are one
run, of full attention or step-causal, the latter with blocks of a schedule or uniform ones, as full
attention masks. An hour a seed on a CPU core.
"""

import ablation
import ml_collections

BEFORE, AFTER = 3000, 1500  # steps of the dense model, and of what starts from it
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


def _from_scratch(sampled: dict, **diffusion) -> dict:
    changes = dict(train=dict(train_steps=BEFORE + AFTER), diffusion=diffusion)
    return dict(changes=changes, sampled=sampled)


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
            scratch_dense=_from_scratch(BOTH, attention="full"),
            scratch_step_causal=_from_scratch(only_sparse),
            scratch_step_causal_uniform=_from_scratch(only_sparse, blocks="uniform"),
        ),
    )
