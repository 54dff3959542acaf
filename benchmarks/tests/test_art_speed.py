# SPDX-License-Identifier: Apache-2.0
"""Seconds of real art: who is timed, on what, and what rows say."""

import types

import stand_ins

from benchmarks import art_speed, measurements
from sparse_lavida_jax.evals import exact


def test_methods_and_plans_take_turns_on_the_same_prompts(monkeypatch, tmp_path, capsys):
    asked = []

    class Pipe:
        settings = stand_ins.settings(sampling={"num_steps": 5, "revisions": 2})

        def generate(self, words, *, sampling, as_written):
            asked.append((sampling.preset, sampling.num_steps, sampling.revisions, tuple(words)))
            seconds = {"sparse": 1.0, "dense": 3.0}[sampling.preset]
            return types.SimpleNamespace(seconds={"layout": 0.5, "image": seconds})

    monkeypatch.setattr(art_speed.SparseLaViDa, "from_pretrained", lambda name: Pipe())
    monkeypatch.setattr(art_speed, "keep_programs", lambda: None)
    monkeypatch.setattr(exact, "world_of", lambda settings: exact.SCENES)
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    art_speed.main([])
    for batch in art_speed.BATCHES:
        own = [how for *how, words in asked if len(words) == batch]
        turn = [
            [preset, *plan]
            for plan in ((5, 2), (5, 0), (2, 1), (2, 2))
            for preset in ("sparse", "dense")
        ]
        assert own == turn * (1 + art_speed.RUNS)
        assert len({words for *_, words in asked if len(words) == batch}) == 1
    rows = {
        (row["method"], row["batch"], row["steps"], row["revisions"]): row
        for row in measurements.read_rows("art_speed")
    }
    assert len(rows) == 8 * len(art_speed.BATCHES)
    dense = rows["dense_lean", 4, 5, 2]
    assert dense["seconds"]["image"] == 3.0 and dense["seconds"]["request"] >= 0
    assert (dense["steps"], dense["revisions"]) == (5, 2)
    assert (
        "4 together, low: image 1.00 of its own plan's; dense over sparse: layout 1.00, image 3.00"
        in capsys.readouterr().out
    )
