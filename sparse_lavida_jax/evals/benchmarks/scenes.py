# SPDX-License-Identifier: Apache-2.0
"""The scenes: every task of a small model, and prompts of held-out combinations."""

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.evals.benchmark import EXPORT, Answer, Benchmark, Item, write_images
from sparse_lavida_jax.evals.exact import EVAL_SEED
from sparse_lavida_jax.evals.official_files import EvaluationError, Record
from sparse_lavida_jax.evals.scorers import Metric
from sparse_lavida_jax.scenes.task import Sample

SPLITS = ("test", "held_out")  # held_out: combinations that training never showed


class SceneTasks(Benchmark):
    """Every task that a small model was trained on, and drawing of held-out combinations.

    The prompts are ours, and never occur in training.
    """

    title = "Scenes"
    source = "The package makes its prompts itself."
    has_tasks = True
    configs: ClassVar = {"scenes": {"checkpoint": "scenes", "limit": 100, "batch_size": 32}}
    learned: ClassVar[str] = "scenes"  # the data of its models
    held_out: ClassVar[Sequence[str]] = ("draw",)  # tasks with prompts of held-out combinations

    def __init__(self, settings):
        self.here = exact.world_of(settings)
        super().__init__(settings)

    @property
    def limit(self) -> int:
        """The number of prompts of a task."""
        return self.settings.limit or max(self.config.train.eval_prompts, 1)

    @property
    def trained(self) -> list[str]:
        """The tasks that the model learned and a program judges, or those of them that are named.

        Raises:
            EvaluationError: one that is named is not among them.
        """
        learned = [task for task in self.config.data.tasks if task in self.here.tasks.TASKS]
        named = self.settings.tasks or learned
        if wrong := sorted({*named} - {*learned}):
            raise EvaluationError(
                f"evaluate.tasks names {', '.join(wrong)}: the model learned {', '.join(learned)}."
            )
        return [task for task in learned if task in named]

    @property
    def splits(self) -> list[str]:
        """The splits that are asked for.

        Raises:
            EvaluationError: the one that is named is unknown.
        """
        if self.settings.split not in ("", *SPLITS):
            raise EvaluationError(
                f"evaluate.split is {self.settings.split!r}: {self.title} has"
                f" {' and '.join(SPLITS)}."
            )
        return [self.settings.split] if self.settings.split else [*SPLITS]

    def read(self):
        """Yields the prompts of each task."""
        if self.config.data.source != self.learned:
            raise EvaluationError(
                f"the benchmark {self.learned!r} judges models of {self.learned}. For a LaViDa-O"
                " choose another benchmark: configs/evaluate.py."
            )
        asked = [
            (split, task)
            for split, task in itertools.product(self.splits, self.trained)
            if split == "test" or task in self.held_out
        ]
        if not asked:
            raise EvaluationError(
                f"{', '.join(self.trained)} has no prompts of held-out combinations: choose of"
                f" {', '.join(self.held_out)}, or leave evaluate.split out."
            )
        for (split, task), number in itertools.product(asked, range(self.limit)):
            yield self.item({"task": task, "split": split, "number": number})

    def item(self, record: Record, ending: str = "") -> Item:
        """Returns the item of a prompt.

        Args:
            ending: of its key, if the same prompt is asked in several ways.
        """
        key = f"{record['task']}/{record['split']}/{record['number']:05}{ending}"
        return Item(key, self.sample(record).prompt, record)

    def sample(self, record: Record) -> Sample:
        """Returns the example of a record."""
        return self.here.sample(record["task"], EVAL_SEED, record["number"], record["split"])

    def first(self, items):
        """Returns all items: `limit` is per task."""
        return items

    def batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Yields items of one task each, all or none with given tokens, and so with an image.

        The tasks take turns, so that the time of the first batches tells that of the others.
        """
        samples = {item.index: self.sample(item.record) for item in items}

        def kind(item):
            sample = samples[item.index]
            shows = sample.image is not None
            return self.name(item.record), bool(sample.given), shows

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
        samples = [self.sample(item.record) for item in items]
        how = {"sampling": self.sampling, "layout": items[0].record.get("layout")}
        made = exact.answer(pipe, samples, seed=[self.seed_of(item) for item in items], **how)
        return [
            {"text": output}
            if isinstance(output, str)
            else write_images(folder, {f"{item.key}.png": output})
            for item, output in zip(items, made, strict=True)
        ]

    def scores(self, answers, folder):
        """Returns the share of correct responses for each task, and for its columns."""
        found = []
        for name, members in itertools.groupby(answers, lambda one: self.name(one.record)):
            found += self.scores_of(name, [*members], folder)
        return found

    def scores_of(self, name: str, answers: Sequence[Answer], folder) -> list[Metric]:
        """Returns the scores of answers to prompts of one task and split."""
        samples = [self.sample(one.record) for one in answers]
        outputs = [one.text if "text" in one.output else image(one, folder) for one in answers]
        return exact.tally(name, samples, outputs, self.here).metrics

    def name(self, record: Record) -> str:
        """Returns the name of the score that a prompt counts for."""
        task, split = record["task"], record["split"]
        return task if split == "test" else f"{task}/{split}"


def image(answer: Answer, folder: pathlib.Path) -> Pixels:
    """Returns the image of an answer."""
    return image_files.read(folder / EXPORT / answer.output["files"][0])


BENCHMARK = SceneTasks
