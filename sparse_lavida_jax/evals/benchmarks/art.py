# SPDX-License-Identifier: Apache-2.0
"""Real art: every task of a model of the art world, and whether the cells of a thing agree."""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sparse_lavida_jax.art import judge, rules
from sparse_lavida_jax.art.grammar import ArtRequest
from sparse_lavida_jax.art.prompts import kept_cells
from sparse_lavida_jax.art.world import CELL
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.evals.benchmark import Answer
from sparse_lavida_jax.evals.benchmarks.scenes import SceneTasks, image
from sparse_lavida_jax.evals.scorers import Metric
from sparse_lavida_jax.scenes.task import Sample

OPEN_PROMPTS, OPEN_IMAGES = 250, 4  # prompts that leave style and facing open; images of each
OPEN, BARE = "open", "without a layout"
COHERENT, KEPT = "things coherent", "cells kept"  # parts of scores
KEPT_ERROR = 12.0  # levels, root mean square, that a cell which is kept may differ by; ours
SEED_STEP = 2**16  # between the images of a prompt


class ArtTasks(SceneTasks):
    """Every task that a model of the art world was trained on, held-out combinations, coherence.

    Drawing and editing are also asked for without a layout in words: then all cells of a thing have
    to agree by themselves. Of prompts that leave style and facing open, several images are drawn,
    with and without a layout.
    """

    title = "Real art"
    configs: ClassVar = {"art": {"checkpoint": "art", "limit": 100, "batch_size": 32}}
    learned: ClassVar[str] = "art"
    held_out: ClassVar[Sequence[str]] = ("draw", "edit", "ask", "ground", "outpaint")

    def read(self):
        """Yields the prompts of each task, then those that are asked in other ways."""
        yield from super().read()
        asked = [task for task in ("draw", "edit") if task in self.trained]
        bare = {"layout": False, "way": BARE}
        for split, task, number in itertools.product(self.splits, asked, range(self.limit)):
            yield self.item({"task": task, "split": split, "number": number, **bare}, " bare")
        if "draw" in self.trained and "test" in self.splits:
            numbers = [*itertools.islice(self._open(), min(OPEN_PROMPTS, self.limit))]
            ways = {"": {"way": OPEN}, " bare": {**bare, "way": f"{OPEN}, {BARE}"}}
            for ending, number, copy in itertools.product(ways, numbers, range(OPEN_IMAGES)):
                record = {"task": "draw", "split": "test", "number": number, "copy": copy}
                yield self.item({**record, **ways[ending]}, f" image {copy}{ending}")

    def _open(self):
        """Yields the numbers of the prompts that leave style and facing open."""
        for number in itertools.count():
            sample = self.sample({"task": "draw", "split": "test", "number": number})
            if is_open(sample):
                yield number

    def seed_of(self, item):
        """Returns a seed of its own for each image of a prompt."""
        return super().seed_of(item) + SEED_STEP * item.record.get("copy", 0)

    def answer(self, pipe, items, folder):
        """Returns texts, or the names of image files; of edits also the cells that were kept."""
        outputs = super().answer(pipe, items, folder)
        if items[0].record["task"] != "edit":
            return outputs
        found = []
        for item, output in zip(items, outputs, strict=True):
            sample, answer = self.sample(item.record), Answer(item, 0, output, 0.0)
            shown = pipe.codec.encode(self.here.render(sample.image)[None])
            (before,) = pipe.codec.to_pixels(shown)
            layout, cells = sample.layout or "", self.config.model.grid_size
            kept = kept_cells(layout, cells, sample.sheet)
            same = _differences(before, image(answer, folder))[kept] <= KEPT_ERROR
            found.append({**output, "kept": [int(same.sum()), len(same)]})
        return found

    def scores_of(self, name, answers, folder):
        """Adds coherence to what is drawn, and kept cells to edits."""
        found = super().scores_of(name, answers, folder)
        task, way = answers[0].record["task"], answers[0].record.get("way", "")
        if task == "edit":
            pairs = [one.output["kept"] for one in answers]
            right, total = (sum(column) for column in zip(*pairs, strict=True))
            found.append(Metric(f"- {KEPT}", right / max(total, 1), total, right))
        if task == "draw":
            samples = [self.sample(one.record) for one in answers]
            readings = [judge.read(image(one, folder), samples[0].sheet) for one in answers]
            found += coherence(samples, readings)
            if way.startswith(OPEN):
                found.append(agreement(readings))
        return found

    def name(self, record):
        way = record.get("way")
        return super().name(record) + (f", {way}" if way else "")


def coherence(samples: Sequence[Sample], readings: Sequence[judge.SceneReading]) -> list[Metric]:
    """Returns shares of the things that requests ask for, and how evenly open styles are chosen."""
    counts = [rules.coherence(*pair) for pair in zip(samples, readings, strict=True)]
    coherent, found, asked = (sum(column) for column in zip(*counts, strict=True))
    styles = collections.Counter(
        one.thing.style
        for sample, reading in zip(samples, readings, strict=True)
        if is_open(sample)
        for one in reading.found
    )
    shares = [count / styles.total() for count in styles.values()]
    entropy = sum(-share * math.log2(share) for share in shares)
    return [
        Metric("- things found", found / max(asked, 1), asked, found),
        Metric(f"- {COHERENT}", coherent / max(asked, 1), asked, coherent),
        Metric("- coherent of those found", coherent / max(found, 1), found, coherent),
        Metric("- entropy of open styles, bits", entropy, styles.total()),
    ]


def agreement(readings: Sequence[judge.SceneReading]) -> Metric:
    """Returns in how many prompts all images have the same things, styles, facings and places.

    Args:
        readings: `OPEN_IMAGES` for each prompt, in turn.
    """
    scenes = [reading.scene.things for reading in readings]
    prompts = [scenes[i : i + OPEN_IMAGES] for i in range(0, len(scenes), OPEN_IMAGES)]
    alike = sum(all(one == images[0] for one in images) for images in prompts)
    return Metric("- prompts with equal images", alike / len(prompts), len(prompts), alike)


def is_open(sample: Sample) -> bool:
    """Returns whether a prompt says neither style nor facing of any thing."""
    phrases = ArtRequest.parse(sample.prompt, sample.sheet).phrases
    return not any(phrase.style or phrase.facing for phrase in phrases)


def _differences(before: Pixels, after: Pixels) -> np.ndarray:
    """Returns the root mean square difference of each cell, in raster order."""
    squares = np.square(before.astype(np.float64) - after)
    sides = len(before) // CELL
    cells = squares.reshape(sides, CELL, sides, CELL, 3).swapaxes(1, 2)
    return np.sqrt(cells.mean(axis=(2, 3, 4))).reshape(-1)


BENCHMARK = ArtTasks
