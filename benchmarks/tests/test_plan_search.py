# SPDX-License-Identifier: Apache-2.0
"""The search keeps what draws best, and its scores are those of the images."""

import itertools
import pathlib

import numpy as np
import pytest
import stand_ins

from benchmarks import plan_search
from sparse_lavida_jax import config
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.evals.benchmarks import art
from sparse_lavida_jax.pipeline import SparseLaViDa


class Fake:
    """Scores plans by their settings, and counts them."""

    def __init__(self):
        self.tried = []

    def scored(self, steps, changes):
        self.tried.append(changes)
        right = changes.get("schedule") == "cosine"
        right += changes.get("order") == "halton"
        # Two temperatures draw as well; one of them more coherently.
        right += changes.get("temperature") in (0.3, 0.6)
        return {"share": right / steps, "coherent": changes.get("temperature", 0.0)}


def test_settings_are_searched_one_after_another_from_the_best_so_far():
    fake = Fake()
    best = plan_search.search(fake, 4, ["counts", "order", "temperature"])
    assert best == {
        "merge_cells": 0, "schedule": "cosine", "order": "halton", "temperature": 0.6,
    }  # fmt: skip
    assert len(fake.tried) == 5 + 4 + 4
    assert plan_search.search(fake, 4, []) == {} == fake.tried[-1]


def test_a_plan_is_given_in_words():
    told = "schedule=linear,order=layout,revisions=2,temperature=0"
    changes = plan_search.changes_of(told.split(","), config.Sampling())
    assert changes == {"schedule": "linear", "order": "layout", "revisions": 2, "temperature": 0.0}
    assert isinstance(changes["temperature"], float)
    for wrong in ("shape=linear", "revisions=two", "revisions", "build=1"):
        with pytest.raises(config.ConfigError, match=f"--plan={wrong}: give settings"):
            plan_search.changes_of([wrong], config.Sampling())


@pytest.mark.parametrize("given", ["words", "layout"])
def test_a_plan_is_scored_by_its_images(monkeypatch, given):
    asked = []
    pipe: SparseLaViDa = stand_ins.pipe_of_tasks(("draw",), 3)
    samples = [
        exact.SCENES.sample("draw", plan_search.PROMPT_SEED, i, "held_out") for i in range(5)
    ]

    class Drawn:
        def __init__(self, pixels: list[Pixels]):
            self.pixels, self.seconds = pixels, {"image": 0.3}

    def run(requests):
        asked.extend(requests)
        numbers = range(len(asked) - len(requests), len(asked))
        # Every other image is right; the others are empty.
        scenes = [samples[i].target if i % 2 == 0 else exact.SCENES.empty for i in numbers]
        return Drawn([exact.SCENES.render(scene) for scene in scenes])

    monkeypatch.setattr(pipe, "run", run)
    scorer = plan_search.Scorer(pipe, "tiny", given, prompts=5, seed=2)
    found = scorer.score(pipe.settings.sampling)
    assert (found["correct"], found["prompts"], found["share"]) == (3, 5, 0.6)
    assert found["of_each"] == {"correct": "10101"}
    assert "coherent" not in found and found["image_s"] > 0
    assert len({one.seed for one in asked}) == 5
    laid_out = [sample.layout if given == "layout" else False for sample in samples]
    assert [one.layout for one in asked] == laid_out
    np.testing.assert_array_equal([one.sampling is pipe.settings.sampling for one in asked], True)


def test_open_prompts_leave_style_and_facing_to_the_model():
    settings = config.read(pathlib.Path(__file__).parents[2] / "configs/art.py")
    for split, is_open in (("open", True), ("held_out", False)):
        samples = [*itertools.islice(plan_search.samples_of(settings, split), 12)]
        assert all(map(art.is_open, samples)) == is_open
        assert len({one.prompt for one in samples}) > 6
