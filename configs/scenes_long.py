# SPDX-License-Identifier: Apache-2.0
r"""The training of the bundled model "scenes": `configs/scenes.py`, longer, with more lessons.

    python -m sparse_lavida_jax.main --config=configs/scenes_long.py

It took 328 minutes on one busy CPU core. The bundled model was trained with a learning rate that
would have ended at step 50,000, shortened to 44,000 when the last lesson began.

`configs/scenes_long.py:blind` is the same without vision: what it gets right in a task about an
image can be known without looking.
"""

import ml_collections
import scenes

# As in `configs/scenes.py`, with questions before drawing.
LESSONS = dict(
    # To name what is at a place. With many objects, few names can be guessed from the others.
    name=dict(until=1000, tasks=dict(name_some=1.0)),
    # And the reverse; and first answers: four questions per image, all answers equally likely.
    look=dict(
        until=4000, tasks=dict(name_some=1.0, locate=1.0, point=1.0, quiz_fair=1.5, answer=1.0)
    ),
    # Counting.
    ask=dict(
        until=10_000,
        tasks=dict(
            quiz_fair=4.0, answer=2.5, name_some=0.4, name=0.2, locate=0.6, point=0.6, detect=0.5
        ),
    ),
    # Drawing and everything else. What was learned is rehearsed.
    draw=dict(
        until=33_783,
        tasks=dict(
            layout=2.5,
            draw=4.5,
            edit=1.5,
            edit_layout=3.0,
            fill_layout=0.6,
            inpaint=0.5,
            outpaint=0.5,
            answer=3.0,
            quiz_fair=1.5,
            quiz=0.3,
            point=0.8,
            locate=0.7,
            name=0.5,
            name_some=0.5,
            detect=1.0,
            caption=1.0,
            constrained_caption=0.5,
            infill=0.7,
            reflect=1.0,
            arithmetic=0.7,
        ),
    ),
)
TASKS = dict(
    layout=2.0,
    draw=2.5,
    edit=1.5,
    edit_layout=2.0,
    fill_layout=2.0,
    inpaint=2.5,
    outpaint=2.0,
    answer=2.5,
    quiz_fair=1.0,
    quiz=0.3,
    point=0.6,
    locate=1.0,
    name=0.4,
    name_some=0.4,
    detect=2.2,
    caption=2.0,
    constrained_caption=0.8,
    infill=2.2,
    reflect=1.2,
    arithmetic=2.5,
)
TEXT = tuple(name for name in TASKS if name not in ("draw", "edit", "inpaint", "outpaint"))


def get_config(eyes: str = "open") -> ml_collections.ConfigDict:
    if eyes not in ("open", "blind"):
        raise ValueError(f"scenes_long has no variant {eyes!r}: choose open or blind.")
    c = scenes.get_config()
    c.name = "scenes_long"
    c.data.lessons = LESSONS
    c.data.tasks = TASKS
    c.optimizer.warmup_steps = 200
    c.optimizer.final_fraction = 0.03
    c.optimizer.ema = 0.9995
    c.train.train_steps = 44_000
    c.train.seconds = 0.0
    c.train.image_seconds = 0.0
    c.train.eval_every = 10_000
    c.train.eval_tasks = (
        "layout", "edit", "edit_layout", "answer", "point", "locate", "name", "quiz", "detect",
        "caption", "infill", "inpaint", "outpaint", "reflect", "arithmetic",
    )  # fmt: skip
    c.train.checkpoint_seconds = 300.0
    if eyes == "blind":
        c.name = "scenes_blind"
        c.data.blind = True
        c.data.lessons = {}  # which teach to look
        c.data.tasks = {name: TASKS[name] for name in TEXT}
        c.train.train_steps = 5000
        c.train.eval_every = c.train.eval_prompts = 0  # see benchmarks.quality
        c.train.eval_tasks = ()
    return c
