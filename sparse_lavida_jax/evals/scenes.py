# SPDX-License-Identifier: Apache-2.0
"""Exact scores on the scenes: every task, held-out prompts, scorers that read pixels or text."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files, markdown
from sparse_lavida_jax.evals.benchmark import EXPORT, Benchmark, Item, Score
from sparse_lavida_jax.evals.files import EvaluationError
from sparse_lavida_jax.evals.metrics import wilson_interval
from sparse_lavida_jax.pipeline import ANSWER_TOKENS, SparseLaViDa
from sparse_lavida_jax.sample import Callback
from sparse_lavida_jax.scenes import scoring, tasks, world

Output = np.ndarray | str
LONG_ANSWERS = ("plan", "edit_plan", "caption", "detect", "locate", "name")
EVAL_SEED = 2026  # of the prompts; the test stream is disjoint from training whatever the seed


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Scores of one task.

    Attributes:
        task: its name; for held-out combinations with "/held_out" behind it.
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


def answer(
    pipe: SparseLaViDa,
    samples: Sequence[tasks.Sample],
    *,
    sampling: config.Sampling | None = None,
    seed: int | Sequence[int] = 0,
    callback: Callback | None = None,
) -> list[Output]:
    """Returns the model's output for samples of one task: images or text."""
    task, prompts = samples[0].task, [sample.prompt for sample in samples]
    how = {"sampling": sampling, "seed": seed, "callback": callback}
    if any(sample.given for sample in samples):
        examples = [pipe.encoder.scene_example(sample) for sample in samples]
        return list(pipe.texts(pipe.decode(examples, **how)))
    # These all show an image, or none does; so with cells that are given.
    size = pipe.settings.vq.image_size
    shown = [world.render(s.image, size) for s in samples if s.image is not None]
    if task == "draw":
        return list(pipe.generate(prompts, **how).pixels)
    if task == "edit":
        return list(pipe.edit(shown, prompts, **how).pixels)
    if task in ("inpaint", "outpaint"):
        known = [s.known_grid for s in samples if s.known_grid is not None]
        return list(pipe.inpaint(shown, prompts, known=known, **how).pixels)
    length = pipe.settings.data.max_answer_len if task in LONG_ANSWERS else ANSWER_TOKENS
    examples = [
        pipe.prompts.ask(prompt, shown[i : i + 1], length) for i, prompt in enumerate(prompts)
    ]
    return list(pipe.texts(pipe.decode(examples, **how)))


def evaluate(
    pipe: SparseLaViDa,
    task: str,
    prompts: int,
    *,
    split: str = "test",
    sampling: config.Sampling | None = None,
    seed: int = EVAL_SEED,
    callback: Callback | None = None,
) -> TaskResult:
    """Scores `prompts` samples of a task.

    Args:
        split: "test", or "held_out" for attribute combinations that training never showed.
        callback: see `SparseLaViDa.run`.
    """
    samples = [tasks.sample(task, seed, index, split) for index in range(prompts)]
    outputs = answer(pipe, samples, sampling=sampling, seed=seed, callback=callback)
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
    for result in results:
        low, high = result.interval
        counts = (result.correct, result.total, f"{result.share:.2f}")
        lines.append((result.task, *counts, f"{low:.2f} to {high:.2f}"))
        for column, (hits, total) in sorted(result.columns.items()):
            low, high = wilson_interval(hits, total)
            counts = (hits, total, f"{hits / total:.2f}")
            lines.append((f"- {column}", *counts, f"{low:.2f} to {high:.2f}"))
        if result.precision is not None and result.columns:
            lines.append(("- attribute precision", None, None, f"{result.precision:.2f}", None))
    return markdown.table(("task", "right", "of", "share", "95 % interval"), lines)


class Bench(Benchmark):
    """Every task that a small model was trained on, and drawing of held-out combinations."""

    title = "Scenes"
    source = "The package makes its prompts itself."

    def read(self, settings):
        """Returns the prompts of each task."""
        if settings.data.source != "scenes":
            raise EvaluationError(
                "the benchmark 'scenes' judges models of scenes. Digits are judged in report.md;"
                " for a LaViDa-O choose one of configs/eval_*.py."
            )
        trained = [task for task in settings.data.tasks if task in tasks.TASKS]
        asked = [(task, "test") for task in trained]
        if "draw" in trained:
            asked.append(("draw", "held_out"))
        count = self.settings.limit or max(settings.train.eval_prompts, 1)
        numbered = ((task, split, i) for task, split in asked for i in range(count))
        return [self._item(index, *one) for index, one in enumerate(numbered)]

    def first(self, items):
        """Returns all: `limit` is of each task."""
        return items

    def batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Yields items of one task each, all with given tokens or none, and so with an image."""
        samples = {item.index: self._sample(item) for item in items}

        def kind(item):
            sample = samples[item.index]
            shows = sample.image is not None
            return item.record["task"], item.record["split"], bool(sample.given), shows

        for _, members in itertools.groupby(sorted(items, key=kind), kind):
            yield from super().batches(list(members))

    def seed_of(self, item):
        """Returns the seed that `evaluate` gives the same prompt."""
        return EVAL_SEED + self.seed + item.record["number"]

    def answer(self, pipe, items, folder):
        """Returns texts, and the names of files with images."""
        samples = [self._sample(item) for item in items]
        seeds = [self.seed_of(item) for item in items]
        outputs = []
        for item, made in zip(
            items, answer(pipe, samples, sampling=self.sampling, seed=seeds), strict=True
        ):
            if isinstance(made, str):
                outputs.append({"text": made})
            else:
                name = f"{item.key}.png"
                image_files.write(folder / EXPORT / name, made)
                outputs.append({"files": [name]})
        return outputs

    def scores(self, rows, folder):
        """Returns the share of right responses of each task, and of its columns."""
        found = []
        by_name = itertools.groupby(zip(self.items, rows, strict=True), lambda one: _name(one[0]))
        for name, members in by_name:
            samples, outputs = [], []
            for item, row in members:
                samples.append(self._sample(item))
                text, files = row.output.get("text"), row.output.get("files", [])
                outputs.append(image_files.read(folder / EXPORT / files[0]) if files else text)
            result = tally(name, samples, outputs)
            found.append(Score(name, result.share, result.total, result.correct))
            found += [
                Score(f"- {column}", hits / total, total, hits)
                for column, (hits, total) in sorted(result.columns.items())
            ]
            if result.precision is not None and result.columns:
                found.append(Score("- attribute precision", result.precision, result.total))
        return found

    def _item(self, index: int, task: str, split: str, number: int) -> Item:
        record = {"task": task, "split": split, "number": number}
        words = tasks.sample(task, EVAL_SEED, number, split).prompt
        return Item(index, f"{task}/{split}/{number:05}", words, record)

    def _sample(self, item: Item) -> tasks.Sample:
        record = item.record
        return tasks.sample(record["task"], EVAL_SEED, record["number"], record["split"])


def _name(item: Item) -> str:
    task, split = item.record["task"], item.record["split"]
    return task if split == "test" else f"{task}/{split}"
