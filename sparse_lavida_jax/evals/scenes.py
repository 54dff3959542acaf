# SPDX-License-Identifier: Apache-2.0
"""Exact scores on the scenes: every task, held-out prompts, scorers that read pixels or text."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files, markdown
from sparse_lavida_jax.evals.benchmark import EXPORT, Benchmark, Item, Metric
from sparse_lavida_jax.evals.files import EvaluationError
from sparse_lavida_jax.evals.scorers import wilson_interval
from sparse_lavida_jax.pipeline import ANSWER_TOKENS, SparseLaViDa
from sparse_lavida_jax.scenes import scoring, tasks, world

Output = np.ndarray | str
LONG_ANSWERS = ("plan", "edit_plan", "caption", "detect", "locate", "name")
EVAL_SEED = 2026  # of the prompts; the test stream is disjoint from training whatever the seed


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Scores of one task.

    Attributes:
        task: its name; for held-out combinations with "/held_out" after it.
        correct, total: prompts answered right, and asked.
        columns: (correct, total) of each column of "draw".
        precision: share of drawn objects that were asked for, with shape and colour; None for
            tasks without images.
        reasons: the commonest reasons for a 0, with their counts.
    """

    task: str
    correct: int
    total: int
    columns: dict[str, tuple[int, int]]
    precision: float | None
    reasons: dict[str, int]

    @property
    def share(self) -> float:
        return self.correct / max(self.total, 1)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.correct, self.total)

    @property
    def metrics(self) -> list[Metric]:
        """The lines of a table: the whole, each column, the precision of what was drawn."""
        found = [Metric(self.task, self.share, self.total, self.correct)]
        for column, (hits, total) in sorted(self.columns.items()):
            found.append(Metric(f"- {column}", hits / total, total, hits))
        if self.precision is not None and self.columns:
            found.append(Metric("- attribute precision", self.precision, self.total))
        return found


def answer(
    pipe: SparseLaViDa,
    samples: Sequence[tasks.Sample],
    *,
    sampling: config.Sampling | None = None,
    seed: int | Sequence[int] = 0,
) -> list[Output]:
    """Returns the model's output for samples of one task: images or text."""
    if any(sample.given for sample in samples):
        examples = [pipe.encoder.scene_example(sample) for sample in samples]
        return list(pipe.texts(pipe.run(examples, sampling=sampling, seed=seed)))
    task, prompts = samples[0].task, [sample.prompt for sample in samples]
    size = pipe.settings.vq.image_size
    # These all show an image, or none does; so with cells that are given.
    shown = [world.render(s.image, size) for s in samples if s.image is not None]
    known = [s.known_grid for s in samples if s.known_grid is not None]
    if task in ("edit", "inpaint", "outpaint"):
        return list(pipe.redraw(shown, prompts, known=known or None, sampling=sampling, seed=seed))
    if task == "draw":
        return list(pipe.draw(prompts, sampling=sampling, seed=seed))
    length = pipe.settings.data.max_answer_len if task in LONG_ANSWERS else ANSWER_TOKENS
    return list(
        pipe.write(prompts, shown or None, max_new_tokens=length, sampling=sampling, seed=seed)
    )


def evaluate(
    pipe: SparseLaViDa,
    task: str,
    prompts: int,
    *,
    split: str = "test",
    sampling: config.Sampling | None = None,
    seed: int = EVAL_SEED,
) -> TaskResult:
    """Scores `prompts` samples of a task.

    Args:
        split: "test", or "held_out" for attribute combinations that training never showed.
    """
    samples = [tasks.sample(task, seed, index, split) for index in range(prompts)]
    outputs = answer(pipe, samples, sampling=sampling, seed=seed)
    return tally(task if split == "test" else f"{task}/{split}", samples, outputs)


def tally(name: str, samples: Sequence[tasks.Sample], outputs: Sequence[Output]) -> TaskResult:
    """Adds up the scores of outputs."""
    columns: dict[str, tuple[int, int]] = {}
    reasons: collections.Counter[str] = collections.Counter()
    correct = right = drawn = 0
    for sample, output in zip(samples, outputs, strict=True):
        score = scoring.score(sample, output)
        correct += score.ok
        right += score.attributes[0]
        drawn += score.attributes[1]
        if not score.ok:
            reasons[score.reason] += 1
        if sample.column:
            hits, total = columns.get(sample.column, (0, 0))
            columns[sample.column] = (hits + score.ok, total + 1)
    return TaskResult(
        name,
        correct,
        len(samples),
        columns,
        right / drawn if drawn else None,
        dict(reasons.most_common(8)),
    )


def as_json(result: TaskResult) -> dict:
    """Returns what `bench/quality.py` writes."""
    return {
        "task": result.task,
        "correct": result.correct,
        "total": result.total,
        "share": result.share,
        "interval_95": list(result.interval),
        "columns": {name: list(pair) for name, pair in result.columns.items()},
        "attribute_precision": result.precision,
        "reasons": result.reasons,
    }


def table(results: Sequence[TaskResult]) -> str:
    """Returns a Markdown table of shares with their 95 % intervals."""
    lines = []
    for metric in (one for result in results for one in result.metrics):
        counts = (None, None) if metric.correct is None else (metric.correct, metric.count)
        interval = metric.interval and "{:.2f} to {:.2f}".format(*metric.interval)
        lines.append((metric.name, *counts, f"{metric.value:.2f}", interval))
    return markdown.table(("task", "right", "of", "share", "95 % interval"), lines)


class Bench(Benchmark):
    """Every task that a small model was trained on, and drawing of held-out combinations.

    The prompts are ours, and training never saw them.
    """

    title = "Scenes"
    source = "The package makes its prompts itself."
    configs: ClassVar = {"scenes": {"checkpoint": "scenes", "limit": 100, "batch_size": 32}}

    def read(self):
        """Yields the prompts of each task."""
        if self.config.data.source != "scenes":
            raise EvaluationError(
                "the benchmark 'scenes' judges models of scenes. Digits are judged in report.md;"
                " for a LaViDa-O choose another benchmark: configs/evaluate.py."
            )
        trained = [task for task in self.config.data.tasks if task in tasks.TASKS]
        asked = [(task, "test") for task in trained]
        if "draw" in trained:
            asked.append(("draw", "held_out"))
        for task, split in asked:
            for number in range(self.settings.limit or max(self.config.train.eval_prompts, 1)):
                words = tasks.sample(task, EVAL_SEED, number, split).prompt
                record = {"task": task, "split": split, "number": number}
                yield f"{task}/{split}/{number:05}", words, record, list

    def first(self, items):
        """Returns all: `limit` is of each task."""
        return items

    def batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Yields items of one task each, all with given tokens or none, and so with an image."""
        samples = {item.index: _sample(item) for item in items}

        def kind(item):
            sample = samples[item.index]
            shows = sample.image is not None
            return item.record["task"], item.record["split"], bool(sample.given), shows

        for _, members in itertools.groupby(sorted(items, key=kind), kind):
            yield from super().batches(list(members))

    def seed_of(self, item):
        """Returns the seed that `evaluate` gives the same prompt."""
        return EVAL_SEED + self.config.seed + item.record["number"]

    def answer(self, pipe, items, folder):
        """Returns texts, and the names of files with images."""
        samples, seeds = [_sample(item) for item in items], [self.seed_of(item) for item in items]
        made = answer(pipe, samples, sampling=self.sampling, seed=seeds)
        outputs = []
        for item, output in zip(items, made, strict=True):
            if isinstance(output, str):
                outputs.append({"text": output})
            else:
                name = f"{item.key}.png"
                image_files.write(folder / EXPORT / name, output)
                outputs.append({"files": [name]})
        return outputs

    def scores(self, answers, folder):
        """Returns the share of right responses of each task, and of its columns."""
        found = []
        for name, members in itertools.groupby(answers, lambda one: _name(one.item)):
            samples, outputs = [], []
            for one in members:
                samples.append(_sample(one.item))
                files = one.output.get("files")
                outputs.append(image_files.read(folder / EXPORT / files[0]) if files else one.text)
            found += tally(name, samples, outputs).metrics
        return found


def _sample(item: Item) -> tasks.Sample:
    record = item.record
    return tasks.sample(record["task"], EVAL_SEED, record["number"], record["split"])


def _name(item: Item) -> str:
    task, split = item.record["task"], item.record["split"]
    return task if split == "test" else f"{task}/{split}"
