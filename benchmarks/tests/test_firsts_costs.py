# SPDX-License-Identifier: Apache-2.0
"""Passes and tokens of a use are counted from the engine's own reports; pages have the rows."""

import pathlib
import types

from benchmarks import firsts, measurements

PAGES = pathlib.Path(__file__).parents[2] / "docs/log"


class Engine:
    """Decodes in two batches of three and five steps; scores in one pass."""

    def sample(self, *_, callback):
        for steps in (0, 2, 3, 0, 5):
            callback(types.SimpleNamespace(steps=steps))
        return types.SimpleNamespace(tokens=[7, 11])

    def scores(self, *_, **__):
        return [(None, types.SimpleNamespace(tokens=13))] * 2


def test_a_prompt_is_a_pass_and_so_is_a_whole_plan():
    engine = Engine()
    assert firsts.counted(engine, lambda: engine.sample([])) == {"passes": 10, "tokens": 18}
    assert firsts.counted(engine, lambda: engine.scores([])) == {"passes": 1, "tokens": 26}
    assert firsts.counted(engine, lambda: None) == {"passes": 0, "tokens": 0}


def test_the_page_of_costs_has_the_numbers_of_the_rows():
    text = (PAGES / "2026-11-firsts-costs.md").read_text()
    rows = [row for row in measurements.read_rows("firsts") if row["id"].startswith("costs/")]
    assert {row["use"] for row in rows} >= {"generate", "prove", "surprise"}
    for row in rows:
        cells = [row["images"], row["passes"], row["tokens"]]
        shares = [row[key] for key in ("passes_x", "tokens_x")] + [row.get("seconds_x")]
        cells += ["-" if share is None else f"{share:.2f}" for share in shares]
        assert f"| {row['use']} | " + " | ".join(map(str, cells)) + " |" in text
