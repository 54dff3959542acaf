# SPDX-License-Identifier: Apache-2.0
"""Exact scores on the scenes: every task, held-out prompts, scorers that read pixels or text."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data import scenes, scoring, tasks
from sparse_lavida_jax.pipeline import ANSWER_TOKENS, SparseLaViDa

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
            tasks without pictures.
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


def wilson_interval(correct: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a share (E. B. Wilson, 1927)."""
    if total == 0:
        return 0.0, 1.0
    share = correct / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def answer(
    pipe: SparseLaViDa,
    samples: Sequence[tasks.Sample],
    *,
    sampling: config.Sampling | None = None,
    seed: int = 0,
) -> list[Output]:
    """Returns the model's output for samples of one task: pictures or text."""
    if any(sample.given for sample in samples):
        examples = [pipe.encoder.scene_example(sample) for sample in samples]
        return list(pipe.texts(pipe.run(examples, sampling=sampling, seed=seed)))
    task, prompts = samples[0].task, [sample.prompt for sample in samples]
    size = pipe.settings.vq.image_size
    # The samples of a task all show a picture, or none does; so with cells that are given.
    shown = [scenes.render(s.picture, size) for s in samples if s.picture is not None]
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


def evaluate_all(
    pipe: SparseLaViDa, prompts: int, *, sampling: config.Sampling | None = None
) -> list[TaskResult]:
    """Scores every task that the model was trained on, and drawing of held-out combinations."""
    trained = [task for task in pipe.settings.data.tasks if task in tasks.TASKS]
    results = [evaluate(pipe, task, prompts, sampling=sampling) for task in trained]
    if "draw" in trained:
        results.append(evaluate(pipe, "draw", prompts, split="held_out", sampling=sampling))
    return results


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
    lines = ["| task | right | of | share | 95 % interval |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        low, high = result.interval
        lines.append(
            f"| {result.task} | {result.correct} | {result.total} | {result.share:.2f}"
            f" | {low:.2f} to {high:.2f} |"
        )
        for column, (hits, total) in sorted(result.columns.items()):
            low, high = wilson_interval(hits, total)
            lines.append(
                f"| - {column} | {hits} | {total} | {hits / total:.2f} | {low:.2f} to {high:.2f} |"
            )
        if result.precision is not None and result.columns:
            lines.append(f"| - attribute precision | | | {result.precision:.2f} | |")
    return "\n".join(lines)
