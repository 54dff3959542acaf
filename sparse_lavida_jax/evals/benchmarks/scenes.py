# SPDX-License-Identifier: Apache-2.0
"""The scenes: every task of a small model, and prompts of held-out combinations."""

import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.evals.benchmark import EXPORT, Benchmark, Item, write_images
from sparse_lavida_jax.evals.exact import EVAL_SEED
from sparse_lavida_jax.evals.official_files import EvaluationError
from sparse_lavida_jax.scenes import tasks


class SceneTasks(Benchmark):
    """Every task that a small model was trained on, and drawing of held-out combinations.

    The prompts are ours, and never occur in training.
    """

    title = "Scenes"
    source = "The package makes its prompts itself."
    configs: ClassVar = {"scenes": {"checkpoint": "scenes", "limit": 100, "batch_size": 32}}

    def read(self):
        """Yields the prompts of each task."""
        if self.config.data.source != "scenes":
            raise EvaluationError(
                "the benchmark 'scenes' judges models of scenes. For a LaViDa-O choose another"
                " benchmark: configs/evaluate.py."
            )
        trained = [task for task in self.config.data.tasks if task in tasks.TASKS]
        asked = [(task, "test") for task in trained]
        if "draw" in trained:
            asked.append(("draw", "held_out"))
        for task, split in asked:
            for number in range(self.settings.limit or max(self.config.train.eval_prompts, 1)):
                words = tasks.sample(task, EVAL_SEED, number, split).prompt
                record = {"task": task, "split": split, "number": number}
                yield Item(f"{task}/{split}/{number:05}", words, record)

    def first(self, items):
        """Returns all items: `limit` is per task."""
        return items

    def batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Yields items of one task each, all or none with given tokens, and so with an image.

        The tasks take turns, so that the time of the first batches tells that of the others.
        """
        samples = {item.index: _sample(item) for item in items}

        def kind(item):
            sample = samples[item.index]
            shows = sample.image is not None
            return item.record["task"], item.record["split"], bool(sample.given), shows

        batches = super().batches
        kinds = itertools.groupby(sorted(items, key=kind), kind)
        turns = itertools.zip_longest(*[batches(list(members)) for _, members in kinds])
        for turn in turns:
            yield from filter(None, turn)

    def seed_of(self, item):
        """Returns the seed that `evaluate` gives to the same prompt."""
        return EVAL_SEED + self.config.seed + item.record["number"]

    def answer(self, pipe, items, folder):
        """Returns texts, or the names of image files."""
        samples, seeds = [_sample(item) for item in items], [self.seed_of(item) for item in items]
        made = exact.answer(pipe, samples, sampling=self.sampling, seed=seeds)
        return [
            {"text": output}
            if isinstance(output, str)
            else write_images(folder, {f"{item.key}.png": output})
            for item, output in zip(items, made, strict=True)
        ]

    def scores(self, answers, folder):
        """Returns the share of correct responses for each task, and for its columns."""
        found = []
        for name, members in itertools.groupby(answers, lambda one: _name(one.item)):
            samples, outputs = [], []
            for one in members:
                samples.append(_sample(one.item))
                files = one.output.get("files")
                outputs.append(image_files.read(folder / EXPORT / files[0]) if files else one.text)
            found += exact.tally(name, samples, outputs).metrics
        return found


def _sample(item: Item) -> tasks.Sample:
    record = item.record
    return tasks.sample(record["task"], EVAL_SEED, record["number"], record["split"])


def _name(item: Item) -> str:
    task, split = item.record["task"], item.record["split"]
    return task if split == "test" else f"{task}/{split}"


BENCHMARK = SceneTasks
