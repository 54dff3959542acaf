# SPDX-License-Identifier: Apache-2.0
"""Endless examples of every task of the art world, by number, and their exact judges: a file each.

`sample(task, seed, index, split)` is a pure function, as in `scenes.tasks`; what the splits hold
out is said in `art.dice`.
"""

import importlib
import pkgutil
import re

import numpy as np
from jaxtyping import UInt8

from sparse_lavida_jax.art import dice, judge
from sparse_lavida_jax.art.sheet import Sheet, load
from sparse_lavida_jax.art.world import IMAGE_SIZE, STEP
from sparse_lavida_jax.scenes.grammar import GrammarError
from sparse_lavida_jax.scenes.task import Judgement, Sample, Task, judged_task

SPLITS = ("train", "test", "held_out")
TABLE: dict[str, Task] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").TASK
    for module in pkgutil.iter_modules(__path__)
}
TASKS = tuple(name for name, task in TABLE.items() if task.judge)  # that are evaluated


def sample(
    task: str,
    seed: int,
    index: int,
    split: str = "train",
    sheet: Sheet | None = None,
    side: int = IMAGE_SIZE,
) -> Sample:
    """Returns example number `index` of an endless sequence.

    Args:
        side: of its images, in pixels.

    Raises:
        ValueError: an unknown task or split, or a negative seed or index.
    """
    if task not in TABLE or split not in SPLITS:
        raise ValueError(
            f"there is no task '{task}' in a split '{split}'. Choose one of {', '.join(TABLE)}, and"
            f" one of {', '.join(SPLITS)}."
        )
    sheet, held_out = sheet or load(), split == "held_out"
    make, others = TABLE[task].make, TABLE[task].made_of
    if others:
        made = make(sample(others[index % len(others)], seed, index, split, sheet, side))
        assert made is not None
        return made._replace(task=task)
    stream, how = f"art/{split}/{task}", {"held_out": held_out, "sheet": sheet, "side": side}
    draw = dice.ArtDice(seed, stream, index, **how)
    while True:
        if (made := make(draw)) is None:
            continue
        if is_held_out(made, sheet) == held_out:
            return _answered(made)._replace(task=task, held_out=held_out, sheet=sheet.whole)


def is_held_out(made: Sample, sheet: Sheet) -> bool:
    """Says whether a scene of an example is held out: see `art.dice`."""
    scenes = [scene for scene in (made.image, made.target) if scene is not None]
    return any(dice.is_held_out(scene, sheet) for scene in scenes)


def _answered(made: Sample) -> Sample:
    """Leaves out the image of an example whose response is a text about it."""
    return made._replace(target=None) if made.answer is not None else made


def score(
    sample: Sample, output: UInt8[np.ndarray, "h w 3"] | str, side: int = IMAGE_SIZE
) -> Judgement:
    """Judges a response: pixels for an image task, otherwise text.

    A bad response scores 0 with a reason, never an exception.

    Args:
        side: of the example's images, in pixels.

    Raises:
        ValueError: pixels where the task asks for text or the other way round, or a task without
            a judge.
    """
    task = judged_task(TABLE, sample.task, output)
    assert task.judge is not None
    try:
        is_text = isinstance(output, str)
        response = _inside(output, side) if is_text else judge.read(output, sample.sheet)
        fault = task.judge(sample, response)
    except GrammarError as error:
        fault = str(error)
    return Judgement(not fault, fault)


def _inside(text: str, side: int) -> str:
    """Returns a text without spaces around it; refuses places outside an image."""
    edges = [int(edge) for edge in re.findall(r"<LOC_(\d{1,9})>", text)]
    if max(edges, default=0) > side // STEP:
        raise GrammarError(f"'{text}' has a box that is not inside the image")
    return text.strip()
