# SPDX-License-Identifier: Apache-2.0
"""Endless examples of every task, by number.

`sample(task, seed, index, split)` is a pure function: any index gives the same example on any
machine, in any order. `scenes/scoring.py` judges what a model makes of an example.

**Held-out combinations.** Four of the 24 pairs of shape and colour are held out (`HELD_OUT`); each
shape and each of four colours occurs once among them. In the splits "train" and "test" an object
of such a pair is only ever *alone*: no image of the example holds another object, and no text
names more than one. (So a model knows how a purple circle looks and what it is called, but has
never counted, compared, related, or drawn one beside anything.) In the split "held_out" every
example has an object of a held-out pair, in an image or in a text, that is *not* alone. The two
conditions exclude each other: `is_held_out` is the line between them.
"""

import dataclasses
import re
from collections.abc import Callable

from sparse_lavida_jax.scenes import image_tasks, text_tasks
from sparse_lavida_jax.scenes.dice import HELD_OUT, Dice
from sparse_lavida_jax.scenes.image_tasks import Sample
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES

_MAKERS: dict[str, Callable[[Dice], Sample | None]] = {
    "draw": image_tasks.draw,
    "edit": image_tasks.edit,
    "inpaint": image_tasks.inpaint,
    "outpaint": image_tasks.outpaint,
    "plan": image_tasks.plan,
    "edit_plan": image_tasks.edit_plan,
    "answer": text_tasks.answer,
    "arithmetic": text_tasks.arithmetic,
    "point": text_tasks.point,
    "detect": text_tasks.detect,
    "locate": text_tasks.locate,
    "name": text_tasks.name,
    "quiz": text_tasks.quiz,
    "caption": text_tasks.caption,
    "constrained_caption": text_tasks.constrained_caption,
    "infill": text_tasks.infill,
    "reflect": text_tasks.reflect,
}
TASKS = tuple(_MAKERS)
IMAGE_TASKS = ("draw", "edit", "inpaint", "outpaint")
SPLITS = ("train", "test", "held_out")


def is_image_task(task: str) -> bool:
    """Says whether the response is an image; otherwise it is text."""
    return task in IMAGE_TASKS


def sample(task: str, seed: int, index: int, split: str = "train") -> Sample:
    """Returns example number `index` of an endless sequence.

    The splits, tasks and seeds are separate streams of a counter-based generator (Philox).

    Raises:
        ValueError: an unknown task or split, or a negative seed or index.
    """
    if task not in TASKS:
        raise ValueError(f"there is no task '{task}'. Choose one of {', '.join(TASKS)}.")
    if split not in SPLITS:
        raise ValueError(f"there is no split '{split}'. Choose one of {', '.join(SPLITS)}.")
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index must be 0 or more, got {seed=}, {index=}.")
    dice = Dice(seed, f"{split}/{task}", index, held_out=split == "held_out")
    while True:
        made = _MAKERS[task](dice)
        if made is not None and is_held_out(made) == dice.held_out:
            return dataclasses.replace(made, task=task, held_out=dice.held_out)


def is_held_out(sample: Sample) -> bool:
    """Says whether a held-out pair occurs with company: see the top of this file."""
    scenes = [scene for scene in (sample.image, sample.target) if scene is not None]
    texts = [_named_pairs(text) for text in (sample.prompt, sample.answer, sample.plan) if text]
    pairs = {thing.pair for scene in scenes for _, thing in scene.objects()}
    pairs |= {pair for named in texts for pair in named}
    alone = all(len(scene) <= 1 for scene in scenes) and all(len(named) <= 1 for named in texts)
    return not alone and not pairs.isdisjoint(HELD_OUT)


_NAMED = re.compile(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})(e?s\b)?")


def _named_pairs(text: str) -> list[tuple[str, str]]:
    """Lists the pairs that a text names; a plural counts twice."""
    return [
        (shape, colour)
        for colour, shape, plural in _NAMED.findall(text)
        for _ in range(2 if plural else 1)
    ]
