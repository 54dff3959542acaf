# SPDX-License-Identifier: Apache-2.0
"""Metrics, and the formulas for them."""

import dataclasses
import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from sparse_lavida_jax.data import markdown

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

RELAXATION = 0.05  # allowed difference of numbers in ChartQA
LEAST_ANLS = 0.5  # lower similarities count as 0


@dataclasses.dataclass(frozen=True)
class Metric:
    """A line of the table.

    Attributes:
        name: what was measured.
        value: in the unit of the benchmark: a share, points, a distance.
        count: the number of items.
        correct: how many of them are correct; None if the value is not a share of correct items.
        chance: the value without looking at the image (`evals/chance.py`); None: not known.
    """

    name: str
    value: float
    count: int
    correct: int | None = None
    chance: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of a share; None for other values."""
        return None if self.correct is None else wilson_interval(self.correct, self.count)

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of `results.json`."""
        return {**dataclasses.asdict(self), "interval_95": self.interval}


def table(metrics: Iterable[Metric]) -> str:
    """Returns a Markdown table of values with their 95 % intervals, and with chance if known."""
    metrics, rows = [*metrics], []
    columns = ["score", "value", "right", "of", "95 % interval"]
    if has_chance := any(one.chance is not None for one in metrics):
        columns.append("chance")
    for one in metrics:
        interval = one.interval and "{:.3f} to {:.3f}".format(*one.interval)
        row = [one.name, f"{one.value:.5g}", one.correct, one.count, interval]
        chance = None if one.chance is None else f"{one.chance:.2f}"
        rows.append([*row, chance] if has_chance else row)
    return markdown.table(columns, rows)


def mean(name: str, values: Sequence[float | bool]) -> Metric:
    """Returns the mean of values; for hits and misses, the share of hits."""
    hits = [value for value in values if isinstance(value, bool)]
    correct = sum(hits) if len(hits) == len(values) else None
    return Metric(name, sum(values) / max(len(values), 1), len(values), correct)


def means(
    name: str, values: Sequence[tuple[str, float | bool]], *, ending: str = ""
) -> list[Metric]:
    """Returns the mean of all values, then of each group, ordered by first appearance.

    Args:
        ending: appended to the names of groups, if the same groups have other lines too.
    """
    parts = [mean(f"- {group}{ending}", members) for group, members in grouped(values).items()]
    return [mean(name, [value for _, value in values]), *parts]


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation over runs; 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """Returns "mean ± standard deviation" over runs; "" without values."""
    if not values:
        return ""
    told = f" ± {spread(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{told}"


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean difference of paired scores, and the ends of its 95 % interval."""
    pairs = [own - other for own, other in zip(ours, theirs, strict=True)]
    mean = statistics.mean(pairs)
    error = 1.96 * statistics.pstdev(pairs) / math.sqrt(len(pairs))
    return mean, mean - error, mean + error


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Groups the second members of pairs by the first ones, in order of appearance."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def wilson_interval(correct: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a share (E. B. Wilson, 1927)."""
    if total == 0:
        return 0.0, 1.0
    share = correct / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def edit_distance(one: str, other: str) -> int:
    """Returns the least number of insertions, deletions, substitutions (V. Levenshtein, 1966)."""
    before = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        now = [i]
        for j, b in enumerate(other, 1):
            now.append(min(before[j] + 1, now[-1] + 1, before[j - 1] + (a != b)))
        before = now
    return before[-1]


def anls(answer: str, wanted: Sequence[str]) -> float:
    """Returns the similarity of an answer to the closest of the accepted ones (arXiv:1905.13648).

    That is 1 - edit distance / length of the longer one; 0 below 0.5. Case and runs of spaces do
    not matter.
    """
    given = " ".join(answer.lower().split())
    best = 0.0
    for one in wanted:
        right = " ".join(one.lower().split())
        longer = max(len(given), len(right))
        best = max(best, 1.0 if longer == 0 else 1 - edit_distance(given, right) / longer)
    return best if best >= LEAST_ANLS else 0.0


def relaxed_match(answer: str, wanted: str) -> bool:
    """Whether an answer is correct for ChartQA (arXiv:2203.10244 Sec. 5.1).

    Numbers may differ by 5 %; other answers must be equal except for case.
    """
    given, right = _number(answer), _number(wanted)
    if given is not None and right:
        return abs(given - right) / abs(right) <= RELAXATION
    return answer.strip().lower() == wanted.strip().lower()


def _number(text: str) -> float | None:
    """Returns a number, with percentages as shares; None for other text."""
    text = text.strip()
    try:
        return float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def frechet_distance(one: Float[np.ndarray, "n d"], other: Float[np.ndarray, "m e"]) -> float:
    """Returns the squared Fréchet distance of two normal distributions (arXiv:1706.08500).

    |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), with means and covariances of the features. With
    Inception-v3 features (the layer of 2048 before its classifier) this is FID.

    Raises:
        ValueError: fewer than two rows, or features of different widths.
    """
    if one.shape[1] != other.shape[1] or min(len(one), len(other)) < 2:
        raise ValueError(
            f"features of shapes {one.shape} and {other.shape} cannot be compared: two rows or more"
            " of one width are needed."
        )
    one, other = one.astype(np.float64), other.astype(np.float64)
    first, second = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    first, second = np.atleast_2d(first), np.atleast_2d(second)
    # (S1 S2)^(1/2) has the same trace as (R S2 R)^(1/2) with R = S1^(1/2), which is symmetric.
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    shared = np.linalg.eigvalsh(root @ second @ root)
    gap = one.mean(axis=0) - other.mean(axis=0)
    trace = np.trace(first) + np.trace(second) - 2 * np.sqrt(np.maximum(shared, 0)).sum()
    return max(0.0, float(gap @ gap + trace))  # rounding may make it negative
