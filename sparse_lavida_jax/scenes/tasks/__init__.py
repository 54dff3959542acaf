# SPDX-License-Identifier: Apache-2.0
"""Endless examples of every task, by number, and their exact judges: a file each.

`sample(task, seed, index, split)` is a pure function: any index gives the same example on any
machine, in any order. `score` judges what a model makes of an example.

**Held-out combinations.** Four of the 24 pairs of shape and colour are held out (`HELD_OUT`); each
shape and each of four colours occurs once among them. In the splits "train" and "test" an object
of such a pair is only ever *alone*: no image of the example holds another object, and no text
names more than one. (So a model knows how a purple circle looks and what it is called, but has
never counted, compared, related, or drawn one next to anything.) In the split "held_out" every
example has an object of a held-out pair, in an image or in a text, that is *not* alone. The two
conditions exclude each other: `is_held_out` is the line between them.
"""

import importlib
import pkgutil
import re

import numpy as np
from jaxtyping import UInt8

from sparse_lavida_jax import old_names
from sparse_lavida_jax.scenes import judges, world
from sparse_lavida_jax.scenes.dice import HELD_OUT, Dice
from sparse_lavida_jax.scenes.grammar import GrammarError
from sparse_lavida_jax.scenes.task import Judgement, Sample, Task, judged_task
from sparse_lavida_jax.scenes.world import COLOURS, SHAPES

# The order decides which task a random number picks. These keep their places, so that runs can be
# repeated. Others follow by the alphabet.
_FIXED_ORDER = (
    "layout", "answer", "arithmetic", "point", "reflect", "caption", "constrained_caption",
    "infill", "detect", "locate", "name", "quiz", "edit_layout", "fill_layout", "draw", "edit",
    "inpaint", "outpaint",
)  # fmt: skip
SPLITS = ("train", "test", "held_out")


def _table() -> dict[str, Task]:
    """Returns the task of every file of this folder, by its name."""
    files = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {
        name: importlib.import_module(f"{__name__}.{name}").TASK
        for name in dict.fromkeys((*_FIXED_ORDER, *files))
    }


TABLE = _table()
TASKS = tuple(name for name, task in TABLE.items() if task.judge)  # that are evaluated
COMMANDS = {task.command: name for name, task in TABLE.items() if task.command}
assert len(COMMANDS) == sum(task.command is not None for task in TABLE.values()), "one task each"


def sample(task: str, seed: int, index: int, split: str = "train") -> Sample:
    """Returns example number `index` of an endless sequence.

    The splits, tasks and seeds are separate streams of a counter-based generator (Philox).

    Raises:
        ValueError: an unknown task or split, or a negative seed or index.
    """
    if task not in TABLE:
        raise ValueError(f"there is no task '{task}'. Choose one of {', '.join(TABLE)}.")
    if split not in SPLITS:
        raise ValueError(f"there is no split '{split}'. Choose one of {', '.join(SPLITS)}.")
    make, others = TABLE[task].make, TABLE[task].made_of
    if others:
        made = make(sample(others[index % len(others)], seed, index, split))
        assert made is not None
        return made._replace(task=task)
    dice = Dice(seed, f"{split}/{old_names.stream_of(task)}", index, held_out=split == "held_out")
    while True:
        made = make(dice)
        if made is not None and is_held_out(made) == dice.held_out:
            return made._replace(task=task, held_out=dice.held_out)


def is_held_out(sample: Sample) -> bool:
    """Says whether a held-out pair occurs with company: see the top of this file."""
    scenes = [scene for scene in (sample.image, sample.target) if scene is not None]
    texts = [text for text in (sample.prompt, sample.answer, sample.layout) if text]
    looks, words = [_HELD_OUT_LOOKS.isdisjoint(scene.cells) for scene in scenes], ". ".join(texts)
    if all(looks) and not any([name in words for name in _HELD_OUT_NAMES]):
        return False
    found = [[thing.pair for _, thing in scene.objects()] for scene in scenes]
    found += [_named_pairs(text) for text in texts]
    alone = all(len(pairs) <= 1 for pairs in found)
    return not alone and any(pair in HELD_OUT for pairs in found for pair in pairs)


_HELD_OUT_LOOKS = {thing.index for thing in world.OBJECTS if thing.pair in HELD_OUT}
_HELD_OUT_NAMES = tuple(f"{colour} {shape}" for shape, colour in HELD_OUT)
_NAMED = re.compile(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})(e?s\b)?")


def _named_pairs(text: str) -> list[tuple[str, str]]:
    """Lists the pairs that a text names; a plural counts twice."""
    return [
        (shape, colour)
        for colour, shape, plural in _NAMED.findall(text)
        for _ in range(2 if plural else 1)
    ]


def score(sample: Sample, output: UInt8[np.ndarray, "h w 3"] | str) -> Judgement:
    """Judges a response: pixels for an image task, otherwise text.

    A bad response scores 0 with a reason, never an exception.

    Raises:
        ValueError: pixels where the task asks for text or the other way round, or a task without
            a judge.
    """
    task = judged_task(TABLE, sample.task, output)
    assert task.judge is not None
    response = output.strip() if isinstance(output, str) else world.read(output)
    attributes, parts = (0, 0), {}
    if task.judge is judges.drawn and not isinstance(response, str):
        attributes = judges.attributes(sample, response.cells)
    if task.judge is judges.edit_fault and not isinstance(response, str):
        parts = judges.edit_parts(sample, response.cells)
    if isinstance(response, world.Unreadable):
        return Judgement(False, response.reason, attributes, parts)
    try:
        fault = task.judge(sample, response)
    except GrammarError as error:
        fault = str(error)
    return Judgement(not fault, fault, attributes, parts)
