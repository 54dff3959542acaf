# SPDX-License-Identifier: Apache-2.0
r"""Does sparse training cost quality? The kinds of task in tables 1 to 3 of the paper, one by one.

    python -m benchmarks.ablation --config=configs/ablation_quality.py

Each task is learned by its own model, sparsely and densely, from the same batches: in few steps, a
model of this size learns one of them well, but all together only to draw. Full attention masks
uniformly, as LaViDa-O does; `configs/ablation_blocks.py` separates blocks from attention.
"""

import ablation
import ml_collections

KINDS = dict(sparse={}, dense=dict(diffusion=dict(attention="full")))
EYES = dict(num_heads=6, head_dim=16)  # halve the steps for learning to find what a text names


def get_config() -> ml_collections.ConfigDict:
    return ablation.get_config("ablation_quality")


def _learns(steps: int, *, first: dict | None = None, until: int = 0, **tasks: float) -> dict:
    """Returns changes that teach tasks; for the first `until` batches, only `first` is taught."""
    lessons = dict(first=dict(until=until, tasks=first)) if first else {}
    # An edit sees the cells that it changes, so it needs no layout.
    return dict(
        model=EYES,
        data=dict(tasks=tasks, lessons=lessons, layout_drop=1.0),
        train=dict(train_steps=steps),
    )


SKILLS = {
    "draw": {},  # as in `configs/ablation.py`
    "edit": _learns(2000, edit=1.0),
    "answer": _learns(2500, first=dict(quiz=1.0), until=1500, quiz=1.0, answer=1.0),
    "point": _learns(2000, first=dict(locate=1.0), until=1000, locate=1.0, point=1.0),
    "infill": _learns(1000, infill=1.0),
}


def get_ablation() -> dict:
    return dict(
        question="Is a model that is trained and sampled sparsely as good as a dense one?",
        tasks=tuple(SKILLS),
        ways={
            f"{kind}_{skill}": dict(changes=changes | attention, tasks=(skill,), group=kind)
            for skill, changes in SKILLS.items()
            for kind, attention in KINDS.items()
        },
    )
