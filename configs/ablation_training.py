# SPDX-License-Identifier: Apache-2.0
r"""What does the step-causal mask bring in fine-tuning, and from scratch? Table 8 of the paper.

    python -m sparse_lavida_jax.bench.ablation --config=configs/ablation_training.py

A dense model is trained, then for as many steps again as half of that: step-causally; with
registers and truncated, but full attention; densely. The paper: 0.78, 0.71; without any training
0.24 when sampled sparsely, and 0.77 when sampled densely. Half an hour a seed on a CPU core.
"""

import ablation
import ml_collections

STEPS = 1500  # after the dense training
DENSE = dict(preset="dense")
SPARSE = dict(preset="sparse")


def get_config() -> ml_collections.ConfigDict:
    return ablation.get_config("ablation_training")


def _after_dense(sampled: dict, **diffusion) -> dict:
    changes = dict(train=dict(train_steps=STEPS), diffusion=diffusion)
    return dict(after="dense", changes=changes, sampled=sampled)


def get_ablation() -> dict:
    truncated = dict(attention="truncated", num_masked_blocks=1)
    from_scratch = dict(changes=dict(train=dict(train_steps=3000 + STEPS)))
    return dict(
        question="What does step-causal training bring?",
        tasks=("draw", "draw/held_out"),
        ways={
            "dense": dict(
                changes=dict(diffusion=dict(attention="full")),
                sampled=dict(dense=DENSE, sparse=SPARSE),
            ),
            "dense_dense": _after_dense(dict(dense=DENSE, sparse=SPARSE), attention="full"),
            "dense_step_causal": _after_dense(dict(sparse=SPARSE)),
            "dense_truncated": _after_dense(dict(sparse=SPARSE), **truncated),
            "step_causal": from_scratch,
        },
    )
