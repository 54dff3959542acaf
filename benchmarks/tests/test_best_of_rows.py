# SPDX-License-Identifier: Apache-2.0
"""What the best of several returns and costs follows from the tries of `best_of=8`."""

import json
import pathlib

import pytest

from benchmarks import best_of, measurements


def one(right, accepted):
    return {"right": right, "accepted": accepted, "tokens": 10, "judging_tokens": 5}


# Right at once; right at the third try; wrong and accepted at the second; never accepted.
ITEMS = [
    [one(True, True)],
    [one(False, False), one(False, False), one(True, True)],
    [one(False, False), one(False, True)],
    [one(False, False)] * 8,
]


@pytest.mark.parametrize(
    ("tries", "right", "mean_tries", "tokens"),
    [(1, 1, 1, 10), (2, 1, 7 / 4, 15 * 7 / 4), (4, 2, 10 / 4, 15 * 10 / 4), (8, 2, 14 / 4, 52.5)],
)
def test_a_row_for_each_number_of_tries(tries, right, mean_tries, tokens):
    found = best_of.summary(ITEMS, tries)
    assert (found["right"], found["items"], found["tries"]) == (right, 4, mean_tries)
    assert found["tokens"] == pytest.approx(tokens)
    assert found["of_an_unjudged_draw"] == pytest.approx(tokens / 10)
    assert found["of_a_judged_draw"] == pytest.approx(tokens / 15)
    assert (found["accepted_if_right"], found["accepted_if_wrong"]) == (1.0, 0.0)


def test_finished_items_are_read_again(tmp_path):
    path = tmp_path / "best_of.jsonl"
    assert best_of._read(path, "outpaint") == {}
    lines = [{"task": task, "item": 3, "tries": ITEMS[0]} for task in ("outpaint", "inpaint")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_of._read(path, "inpaint") == {3: ITEMS[0]}


def test_the_page_has_the_numbers_of_the_rows():
    page = pathlib.Path(__file__).parents[2] / "docs/log/2026-11-best-of.md"
    text = page.read_text()
    for row in measurements.read_rows("best_of"):
        if "ranked" in row["method"]:
            assert f"| {row['method']} | {row['share']:.3f} |".replace("| 0.", "| .") in text
            continue
        low, high = row["interval_95"]
        cells = (
            f"| {row['task']} | {row['best_of']} | {row['share']:.3f} | {low:.3f} to {high:.3f} |"
        )
        assert cells.replace("| 0.", "| .").replace("to 0.", "to .") in text


def test_the_least_surprising_of_eight_is_taken_and_of_those_accepted_if_judged():
    def scored(right, accepted, cell, total):
        return one(right, accepted) | {"largest cell": cell, "sum": total, "ranking_tokens": 20}

    items = [
        [scored(False, False, 1, 9), scored(True, True, 2, 8), scored(False, True, 3, 7)],
        [scored(False, False, 1, 9), scored(True, False, 2, 10), scored(False, False, 3, 11)],
    ]
    rows = dict(best_of.ranked_rows(items))
    right = {method: row["right"] for method, row in rows.items()}
    assert right == {
        "ranked by largest cell": 0, "judged, ranked by largest cell": 1,
        "ranked by sum": 0, "judged, ranked by sum": 0,
    }  # fmt: skip
    for method, row in rows.items():
        assert (row["by_chance"], row["any"], row["first_accepted"]) == (1 / 3, 1.0, 0.5)
        assert row["tokens"] == 8 * (35 if method.startswith("judged") else 30)
