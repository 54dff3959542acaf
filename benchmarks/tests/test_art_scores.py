# SPDX-License-Identifier: Apache-2.0
"""Rows of the art benchmark: answers are judged, and twins compared on the same prompts."""

import dataclasses
import json
import pathlib

import pytest

from benchmarks import art_scores
from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.evals.benchmarks.art import ArtTasks

ART = config.read(pathlib.Path(__file__).parents[2] / "configs/art.py")
LIMIT = 8


@pytest.fixture
def evaluation(tmp_path, monkeypatch):
    """Returns a function that makes a finished evaluation of questions, some of them wrong."""
    data = dataclasses.replace(ART.data, tasks={"ask": 1.0})
    learned = dataclasses.replace(ART, data=data)
    monkeypatch.setattr(model_folder, "find_model", pathlib.Path)
    monkeypatch.setattr(model_folder, "read_config", lambda _: learned)
    asked = {"benchmark": "art", "limit": LIMIT}
    bench = ArtTasks(config.changed(learned, {"evaluate": asked}))

    def made(name: str, wrong: set[int]) -> pathlib.Path:
        folder = tmp_path / name
        (folder / "shards" / "0-of-1").mkdir(parents=True)
        lines = [
            json.dumps({
                "index": item.index, "seed": 0, "seconds": 0.1,
                "output": {"text": " no" * 3 if item.index in wrong
                           else bench.sample(item.record).answer},
            })
            for item in bench.items
        ]  # fmt: skip
        (folder / "shards" / "0-of-1" / "items.jsonl").write_text("\n".join(lines) + "\n")
        results = {
            "benchmark": "art", "checkpoint": {"name": name, "sha256": "0"}, "sampling": {},
            "evaluate": {"benchmark": "art", "limit": LIMIT},
            "scores": [
                {"name": "ask", "value": 1.0, "count": LIMIT, "chance": 0.5},
                {"name": "- count", "value": 1.0, "count": 3},
                {"name": "ask/held_out", "value": 1.0, "count": LIMIT, "chance": 0.3},
            ],
        }  # fmt: skip
        (folder / "results.json").write_text(json.dumps(results))
        return folder

    return made


def test_rows_count_what_is_right_and_compare_the_same_prompts(evaluation):
    folders = {"sparse": evaluation("a", {0, 9}), "dense": evaluation("b", {0, 1, 2})}
    judged = {name: art_scores.right_of(folder) for name, folder in folders.items()}
    results = json.loads((folders["sparse"] / "results.json").read_text())
    rows = {row["task"]: row for row in art_scores.rows_of(results, "sparse", judged)}
    assert {task: row["correct"] for task, row in rows.items()} == {"ask": 7, "ask/held_out": 7}
    assert rows["ask"]["parts"] == {"count": [1.0, 3]} and rows["ask"]["chance"] == 0.5
    mean, low, high = rows["ask"]["against_dense"]
    assert mean == 2 / LIMIT  # items 1 and 2 are right with one and wrong with the other
    assert low == pytest.approx(2 * mean - high) and high - mean == pytest.approx(
        1.96 * (mean - mean**2) ** 0.5 / LIMIT**0.5
    )
    assert "against_dense" not in art_scores.rows_of(results, "dense", judged)[0]


def test_only_finished_evaluations_of_the_same_prompts_are_compared(evaluation, tmp_path):
    with pytest.raises(config.ConfigError, match="no finished evaluation"):
        art_scores.right_of(tmp_path)
    with pytest.raises(config.ConfigError, match="different prompts"):
        art_scores.difference({"a": True}, {"b": True})
