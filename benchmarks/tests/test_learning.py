# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.learning`: likelihoods of whole plans, budgets, and the table."""

import dataclasses
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import learning
from sparse_lavida_jax import config
from sparse_lavida_jax.art import vocabulary
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.scenes.prompts import ExampleMaker
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

SMALL = {
    "model": {"width": 32, "mlp_hidden": 32, "num_heads": 2, "head_dim": 16, "num_layers": 2,
              "dual_tower_layers": 0, "generation_width": 32, "generation_mlp_hidden": 32,
              "unroll_layers": False, "neighbour_heads": ()},
    "data": {"tasks": {"draw": 1.0}, "lessons": {}},
    "optimizer": {"final_fraction": 1.0},
    "train": {"vision_from": ""},
    "diffusion": {"merge_cells": 16, "layout_first": 0.0},
    "sampling": {"num_steps": 8, "order": "stratified", "shift": 2.0, "revisions": 0},
}  # fmt: skip
CELLS = 144


@pytest.fixture(scope="module")
def ways() -> dict[str, config.Config]:
    shared = config.read(pathlib.Path(__file__).parents[2] / "configs/art.py")
    return learning.ways_of(config.changed(shared, SMALL), {"few": {"data": {"things": 12}}})


@pytest.fixture(scope="module")
def examples(ways):
    encoder = ExampleMaker(
        Tokenizer(vocabulary.SHIPPED), ways["plan"].data, ways["plan"].model, None
    )
    codes = np.random.default_rng(0).integers(1024, size=(2, CELLS, 4))
    return [encoder.image_example("a bear", one) for one in codes]


def test_further_ways_change_the_merged_plan(ways):
    few, merged = ways["few"], ways["plan_merged"]
    assert few.data.things == 12 and merged.data.things == 40
    assert dataclasses.replace(few, data=merged.data) == merged


@pytest.mark.parametrize("world", learning.WORLDS)
def test_what_a_way_has_learned_can_be_sampled(world):
    """Half an hour of training is lost otherwise."""
    here = learning.WORLDS[world]
    file = pathlib.Path(__file__).parents[2] / f"configs/{here.file}.py"
    shared = config.changed(config.read(file), here.changes)
    for settings in learning.ways_of(shared, here.more).values():
        samplers = learning._samplers(settings, shared.diffusion.merge_cells)
        assert samplers["merged"].merge_cells == shared.diffusion.merge_cells > 0
        assert all(one.order == "stratified" and not one.revisions for one in samplers.values())


@pytest.mark.parametrize("way", ["plan", "dense"])
@pytest.mark.parametrize("merge", [1, 16])
def test_every_cell_is_predicted_once_knowing_what_its_step_knows(ways, examples, way, merge):
    taken = learning.Likelihood(ways[way], examples, merge, together=4)
    for number, example in enumerate(examples):
        rows, known = [*taken._rows(example, number, merge)], np.zeros(CELLS, bool)
        asked = [row.generation.index[row.generation.weight > 0] for row in rows]
        predicted = np.concatenate(asked)
        np.testing.assert_array_equal(np.sort(predicted), np.arange(CELLS))
        if way == "plan":
            assert len(rows) == 1
            continue
        assert len(rows) == (8 if merge == 1 else len(rows))
        for row, cells in zip(rows, asked, strict=True):
            is_known = row.generation.tokens[:, 0] != ways[way].model.image_mask_id
            np.testing.assert_array_equal(is_known, known[row.generation.index])
            known[cells] = True


@pytest.mark.slow
def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_codes(ways, examples):
    for way in ("plan", "dense"):
        taken = learning.Likelihood(ways[way], examples, 16, together=4)
        model = Denoiser(ways[way].model, rngs=nnx.Rngs(0))
        model.image_head.logits.kernel[...] = jnp.zeros_like(model.image_head.logits.kernel[...])
        assert taken.of(model) == pytest.approx(math.log(1024), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("operations", [2e-4, 0.0])
def test_a_way_trains_until_its_budgets_are_spent(ways, operations):
    small = {"operations": operations, "seconds": 0.2, "held_out": 2, "together": 2, "scored": 2}
    here = dataclasses.replace(learning.WORLDS["art"], **small)
    row = learning.learn(ways["few"], here, 16)
    marks = [point["mark"] for point in row["curve"]]
    assert sorted(marks) == sorted(learning._marks(here))
    assert len(marks) == learning.PARTS * (2 if operations else 1)
    assert all(point[mark[0]] >= mark[1] for point in row["curve"] for mark in [point["mark"]])
    assert 0 < row["loss_tokens"] < row["slots"]
    assert row["scores"]["merged"]["total"] == 2
    assert 0 <= row["scores"]["full"]["coherent"] <= row["scores"]["full"]["found"] <= 1


@pytest.mark.slow
def test_steps_of_ways_are_timed_on_the_same_examples(ways):
    rows = [*learning.step_times({"few": ways["few"], "again": ways["few"]}, 2)]
    assert [row["method"] for row in rows] == ["few", "again"]
    assert all(row["step_s"] > 0 for row in rows)
    assert rows[0]["operations"] == rows[1]["operations"] > 0


def test_the_table_takes_means_over_seeds():
    def row(way, seed, tokens, nll):
        point = {"mark": ["operations", 1.0], "loss_tokens": tokens, "operations": 1.0}
        at_time = {"mark": ["seconds", 2.0]}
        curve = [{"full": nll, "merged": nll, **one} for one in (point, at_time)]
        budget = {"operations": 1.0, "seconds": 2.0}
        return {"world": "art", "method": way, "seed": seed, "curve": curve, "budget": budget}

    rows = [row("plan", 0, 30, 0.1), row("plan", 1, 50, 0.3), row("dense", 0, 20, 0.5)]
    rows.append(row("dense", 1, 20, 0.5))
    lines = learning.summary(rows).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| art | plan | 2 | 2.00 ± 0.71 | 0.200 ± 0.141 |")
    assert lines[3].startswith("| art | dense | 2 | 1.00 ± 0.00 | 0.500 ± 0.000 |")


def test_a_budget_of_time_alone_gives_a_table_of_curves():
    curve = [
        {"mark": ["seconds", 9.0], "steps": 2, "full": 1.5, "operations": 0.25},
        {"mark": ["seconds", 18.0], "steps": 4, "full": 1.25, "operations": 0.5},
    ]
    scores = {"full": {"found": 0.5, "coherent": 0.25, "share": 0.0}}
    row = {"world": "art", "method": "plan", "seed": 0, "curve": curve, "scores": scores}
    row["budget"] = {"operations": 0.0, "seconds": 18.0}
    lines = learning.curves([row]).splitlines()
    assert lines[0] == "| way | steps | 9 s | 18 s | things found | coherent |"
    assert lines[2] == "| plan | 4 | 1.500 (0.2) | 1.250 (0.5) | 0.500 | 0.250 |"
    assert len(learning.summary([row]).splitlines()) == 2
