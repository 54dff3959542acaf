# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.learning`: likelihoods of whole plans, the finer world, budgets, and the table."""

import dataclasses
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import learning
from sparse_lavida_jax import config
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.scenes.prompts import ExampleMaker
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

SMALL = {
    "model": {"width": 32, "mlp_hidden": 32, "num_heads": 2, "head_dim": 16, "num_layers": 2,
              "dual_tower_layers": 0, "generation_width": 32, "generation_mlp_hidden": 32,
              "unroll_layers": False, "grid_size": 16, "codebook_size": len(learning.TINTS)},
    "data": {"tasks": {"draw": 1.0}, "layout_drop": 1.0},
    "sampling": {"num_steps": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def ways() -> dict[str, config.Config]:
    shared = config.read(pathlib.Path(__file__).parents[2] / "configs/ablation.py")
    return learning.ways_of(config.changed(shared, SMALL))


@pytest.fixture(scope="module")
def examples(ways):
    settings = ways["plan"]
    encoder = ExampleMaker(Tokenizer(), settings.data, settings.model, None)
    samples = [tasks.sample("draw", 0, number) for number in range(2)]
    return [learning.fine_example(encoder, sample) for sample in samples]


def test_a_fine_image_shows_the_scene_in_its_colours():
    scene = world.Scene.of({0: world.Object("square", "red", "large")})
    tints = learning.tints_of(scene).reshape(16, 16)
    red = 1 + world.COLOURS.index("red")
    assert (tints[1:2, 1:2] == red).all()
    assert (tints[3:] == 0).all()
    assert (tints[:, 3:] == 0).all()
    assert set(np.unique(tints)) <= {0, red, red + len(world.COLOURS)}


@pytest.mark.parametrize("way", ["plan", "dense"])
@pytest.mark.parametrize("merge", [1, 16])
def test_every_cell_is_predicted_once_knowing_what_its_step_knows(ways, examples, way, merge):
    taken = learning.Likelihood(ways[way], examples, merge, together=4)
    for number, example in enumerate(examples):
        rows, known = [*taken._rows(example, number, merge)], np.zeros(256, bool)
        asked = [row.generation.index[row.generation.weight > 0] for row in rows]
        predicted = np.concatenate(asked)
        np.testing.assert_array_equal(np.sort(predicted), np.arange(256))
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
        assert taken.of(model) == pytest.approx(math.log(len(learning.TINTS)), abs=1e-5)


@pytest.mark.slow
def test_a_way_trains_until_both_budgets_are_spent(ways):
    here = dataclasses.replace(
        learning.WORLDS["fine"], operations=2e-4, seconds=0.2, held_out=2, together=2
    )
    row = learning.learn(ways["plan_merged"], here, fine=True)
    marks = [point["mark"] for point in row["curve"]]
    assert sorted(marks) == sorted(learning._marks(here))
    assert all(point[mark[0]] >= mark[1] for point in row["curve"] for mark in [point["mark"]])
    assert 0 < row["loss_tokens"] < row["slots"]
    assert "scores" not in row


def test_the_table_takes_means_over_seeds():
    def row(way, seed, tokens, nll):
        point = {"mark": ["operations", 1.0], "loss_tokens": tokens, "operations": 1.0}
        at_time = {"mark": ["seconds", 2.0]}
        curve = [{"full": nll, "merged": nll, **one} for one in (point, at_time)]
        budget = {"operations": 1.0, "seconds": 2.0}
        return {"world": "fine", "method": way, "seed": seed, "curve": curve, "budget": budget}

    rows = [row("plan", 0, 30, 0.1), row("plan", 1, 50, 0.3), row("dense", 0, 20, 0.5)]
    rows.append(row("dense", 1, 20, 0.5))
    lines = learning.summary(rows).splitlines()
    assert lines[2].startswith("| fine | plan | 2 | 2.00 ± 0.71 | 0.200 ± 0.141 |")
    assert lines[3].startswith("| fine | dense | 2 | 1.00 ± 0.00 | 0.500 ± 0.000 |")
