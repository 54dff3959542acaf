# SPDX-License-Identifier: Apache-2.0
r"""The bundled model of real art in few steps, with a style code: 50 minutes of one core.

    python -m sparse_lavida_jax.main --config=configs/art_few.py
    python -m sparse_lavida_jax.main --config=configs/art_few.py:plain   # without a code
    python -m sparse_lavida_jax.main --config=configs/art_few.py:distil  # continues the first

Seven of eight images are drawn in one to four steps. `plain` has the same lessons, batches and
time: what a code is worth is the difference of the two. `distil` learns to decode in one step what
the average of its parameters decodes in two. Results: docs/few_steps.md.
"""

import art
import ml_collections

WAYS = ("plain", "style", "distil")
TASKS = dict(draw=16.0, layout=1.0, edit=1.0, edit_layout=0.5, outpaint=0.3, ask=0.5)


def get_config(way: str = "style") -> ml_collections.ConfigDict:
    if way not in WAYS:
        raise ValueError(f"art_few has no variant {way!r}: choose {', '.join(WAYS)}.")
    c = art.get_config("late")
    c.name = "art_few" if way == "style" else f"art_few_{way}"
    c.data.tasks = TASKS
    c.diffusion.plan_steps = (1, 1, 1, 2, 2, 2, 4, 8)
    c.sampling.update(num_steps=2, schedule="linear", revisions=2)
    c.optimizer.update(learning_rate=1.5e-3, warmup_steps=20, ema=0.99)
    c.train.update(train_steps=1200, eval_every=0, eval_prompts=0)
    c.train.eval_tasks = ()
    if way != "plain":
        c.model.update(style_parts=9, style_groups=8, style_values=2)
    if way == "style":
        c.optimizer.style_warmup_steps = 600
    if way == "distil":
        c.train.init_from = "runs/art_few"
        c.train.train_steps = 300
        c.optimizer.update(learning_rate=8e-4, distil=1.0)
    return c
