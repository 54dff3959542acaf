# SPDX-License-Identifier: Apache-2.0
r"""How many tokens may a text step commit? Share correct against forward passes, only layouts.

    python -m benchmarks.ablation --config=configs/ablation_text.py

A layout names objects and cells that the prompt does not determine, so tokens committed together
may contradict each other.
"""

import ablation
import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ablation.get_config("ablation_text")
    c.data.tasks = dict(layout=1.0)
    c.train.train_steps = 1500
    return c


def get_ablation() -> dict:
    sampled = {f"count_{n}": dict(text=dict(steps=n)) for n in (1, 2, 4, 8)}
    for commit, levels in dict(
        threshold=(0.3, 0.5, 0.7, 0.9, 0.99), factor=(0.3, 1.0, 3.0), entropy=(0.03, 0.1, 0.3, 1.0)
    ).items():
        for level in levels:
            name = f"{commit}_{level}".replace(".", "p")
            sampled[name] = dict(text={"commit": commit, commit: level})
    return dict(
        question="How many tokens of a text may a step commit?",
        tasks=("layout",),
        ways=dict(sparse=dict(sampled=sampled)),
        prompts=300,
        batch_size=1,
        curve=True,
    )
