# SPDX-License-Identifier: Apache-2.0
"""Rows of the art benchmark: answers are judged, and twins compared on the same prompts."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from benchmarks import art_scores, measurements, table
from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.evals import benchmark, nearest
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
    judged = {name: art_scores.shares_of(folder) for name, folder in folders.items()}
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
    elsewhere = {"sparse": judged["sparse"] | {"ground": {"ground/test/00000": 1.0}}}
    assert [row["task"] for row in art_scores.rows_of(results, "sparse", elsewhere)] == [*rows]


def test_parts_of_drawings_and_edits_are_shares_of_each_prompt(tmp_path, monkeypatch):
    """True images, of which every second one is empty: nothing of it is coherent."""
    data = dataclasses.replace(ART.data, tasks={"draw": 1.0, "edit": 1.0})
    learned = dataclasses.replace(ART, data=data)
    monkeypatch.setattr(model_folder, "find_model", pathlib.Path)
    monkeypatch.setattr(model_folder, "read_config", lambda _: learned)
    asked = {"benchmark": "art", "limit": 2}
    bench, lines = ArtTasks(config.changed(learned, {"evaluate": asked})), []
    (tmp_path / "shards" / "0-of-1").mkdir(parents=True)
    for item in bench.items:
        scene = bench.here.empty if item.record["number"] else bench.sample(item.record).target
        output = benchmark.write_images(tmp_path, {f"{item.key}.png": bench.here.render(scene)})
        kept = {"kept": [3, 4]} if item.record["task"] == "edit" else {}
        line = {"index": item.index, "seed": 0, "seconds": 0.1, "output": {**output, **kept}}
        lines.append(json.dumps(line) + "\n")
    (tmp_path / "shards" / "0-of-1" / "items.jsonl").write_text("".join(lines))
    results = {"benchmark": "art", "checkpoint": {"name": "a"}, "evaluate": asked}
    (tmp_path / "results.json").write_text(json.dumps(results))
    found = art_scores.shares_of(tmp_path)
    assert [*found["draw/held_out: things coherent"].values()] == [1.0, 0.0]
    assert [*found["edit/held_out: cells kept"].values()] == [0.75, 0.75]
    assert found["edit"].keys() == found["edit: cells kept"].keys()


def test_only_finished_evaluations_of_the_same_prompts_are_compared(evaluation, tmp_path):
    with pytest.raises(config.ConfigError, match="no finished evaluation"):
        art_scores.shares_of(tmp_path)
    with pytest.raises(config.ConfigError, match="different prompts"):
        art_scores.difference({"a": 1.0}, {"b": 1.0})


def test_the_table_has_bars_of_parts_and_of_what_may_be_at_most():
    parts = {
        "things found": [0.95, 300], "things coherent": [0.9, 300],
        "coherent of those found": [0.947, 285], "entropy of open styles, bits": [1.5, 40],
    }  # fmt: skip
    sparse = {
        "task": "draw/held_out", "method": "sparse", "correct": 85, "total": 100, "share": 0.85,
        "chance": 0.0, "parts": parts, "against_dense": [0.05, -0.01, 0.11],
        "parts_against_dense": {"things coherent": [0.01, -0.01, 0.03]},
    }  # fmt: skip
    dense = sparse | {"method": "dense", "correct": 80, "share": 0.8, "parts": {}}
    equal = {"prompts with equal images": [0.04, 25]}
    alike = sparse | {"task": "draw, open", "parts": equal, "against_dense": None, "chance": None}
    lines = table.art_table([dense, alike, sparse]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["task", "chance", "sparse", "dense", "sparse - dense", "bar"]
    told = {row[0]: row[1:] for row in cells[2:]}
    assert [*told] == [
        "draw, open", "draw, open: prompts with equal images", "draw/held_out",
        "draw/held_out: things coherent",
    ]  # fmt: skip
    assert told["draw/held_out"] == [
        "0.00", "0.850 (0.767 to 0.907)", "0.800 (0.711 to 0.867)", "+0.050 (-0.010 to +0.110)",
        "0.80 met",
    ]  # fmt: skip
    assert told["draw/held_out: things coherent"][-2:] == [
        "+0.010 (-0.010 to +0.030)", "0.95 not met",
    ]  # fmt: skip
    assert told["draw, open: prompts with equal images"][-1] == "at most 0.05 met"
    assert "things coherent" not in table.art_table([sparse], parts=False, name="art_scores")
    (line,) = table.coherence_table([alike, sparse]).splitlines()[2:]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        "draw/held_out, sparse", "300", "0.950", "0.900 (0.861 to 0.929)", "0.947", "1.50",
    ]  # fmt: skip


def test_what_was_drawn_in_training_is_counted_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(art_scores, "DOCS", tmp_path)
    tiles = [(np.zeros((96, 96, 3), np.uint8), "a dog", ok) for ok in (True, None, False, None)]
    monkeypatch.setattr(nearest, "remembered", lambda *_: ("", tiles, [0.95, 0.5]))
    art_scores.write_memory(object(), "art")
    (row,) = measurements.read_rows("art_memory")
    assert (row["correct"], row["total"], row["right"]) == (1, 2, 1)
    assert row["median_equal_cells"] == 0.725
    assert Image.open(tmp_path / "art_memory.png").width > 4 * 96
