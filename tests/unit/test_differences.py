# SPDX-License-Identifier: Apache-2.0
"""Where the released code fails or is wrong and no other test says what ours does.

The table is docs/differences.md.
"""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import config, train
from sparse_lavida_jax.data.batch import RowShape
from sparse_lavida_jax.lavida_o import objective
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sequence import LearnedText, Response, Source, Text
from sparse_lavida_jax.visibility import PAD_BLOCK

TESTS = pathlib.Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "differences.md"
SHAPE = RowShape(24, 20)


def released(**diffusion_settings):
    return config.Config(
        model=tiny.model_settings(codes_per_token=4),
        data=config.Data(prompt_drop=0.0, source_drop=0.5),
        diffusion=config.Diffusion(
            corruption="released", attention="full", weighting="mean", **diffusion_settings
        ),
    )


def batch_of(sequences, draws, settings):
    return objective.batch_sequences(list(sequences), list(draws), SHAPE, settings)


def an_edit(settings, seed, *, drop_source):
    """Returns a source image, words and an image to draw, with its random numbers."""
    rng, model = np.random.default_rng(seed), settings.model
    cells = (tiny.IMAGE_LEN, model.codes_per_token)
    source, codes = rng.integers(0, model.codebook_size, (2, *cells))
    parts = (
        Text(np.array([2, 10])),
        Source(source),
        LearnedText(np.array([12])),
        Response(cells[0]),
    )
    sequence = objective.Sequence(parts, codes, None, ())
    drawn = objective.draw(rng, sequence)
    return sequence, dataclasses.replace(drawn, source=0.0 if drop_source else 1.0)


@pytest.mark.parametrize("shorter_first", [True, False])
def test_without_a_loss_on_text_rows_of_unequal_images_are_what_each_is_alone(shorter_first):
    """The release mixes up the rows after one with fewer image tokens (behaviour 12)."""
    settings = released(text_loss=False)
    rows = [an_edit(settings, seed, drop_source=seed == 0) for seed in range(2)]
    if not shorter_first:
        rows.reverse()
    model = tiny.denoiser(settings.model)
    forward = tiny.quick_jit(
        lambda model, batch: model(
            batch.understanding, batch.generation, None, wanted="generation"
        )[0]["generation"]
    )

    def tokens_and_hidden(chosen):
        batch = batch_of(*zip(*chosen, strict=True), settings)
        assert batch.predicts == "generation"
        return batch.generation.layout.block != PAD_BLOCK, forward(model, batch)

    held, together = tokens_and_hidden(rows)
    assert len(set(held.sum(axis=1).tolist())) == 2
    for row, one in enumerate(rows):
        (held_alone,), (alone,) = tokens_and_hidden([one])
        np.testing.assert_array_equal(held[row], held_alone)
        np.testing.assert_allclose(together[row][held_alone], alone[held_alone], rtol=0, atol=1e-5)


def test_text_alone_is_learned_without_an_image():
    """The release fails without images, and shows rows that have none an empty one."""
    settings = released()
    sequence = objective.Sequence(
        (Text(np.array([2, 10, 11])), LearnedText(np.array([12, 13, 14, 15])), Response(0)),
        np.zeros((0, 4), int), None, (),
    )  # fmt: skip
    drawn = objective.draw(np.random.default_rng(0), sequence)
    batch = batch_of([sequence] * 2, [drawn] * 2, settings)
    assert batch.pixels is None and batch.predicts == "understanding"
    value, logged = tiny.quick_jit(train.loss)(tiny.denoiser(settings.model), batch)
    assert value > 1.0
    assert set(logged) == {"text_nll"}


def test_text_of_which_nothing_is_masked_has_no_loss():
    """The release computes 0 / 0 there, and repairs it only next to images (behaviour 24)."""
    settings = released()
    sequence = objective.Sequence(
        (Text(np.array([2, 10, 11, 12])), Response(0)), np.zeros((0, 4), int), None, ()
    )
    drawn = objective.draw(np.random.default_rng(0), sequence)
    batch = batch_of([sequence], [drawn], settings)
    grad = tiny.quick_jit(jax.value_and_grad(train.loss, has_aux=True))
    (value, _), gradient = grad(tiny.denoiser(settings.model), batch)
    assert value == 0.0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


def test_texts_of_a_batch_have_a_dual_cache_each():
    """The release's takes one row (behaviour 7)."""
    model = tiny.model_settings()
    requests = [tiny.request("text", model, seed, words=3 + 2 * seed) for seed in range(2)]
    sampling = config.Sampling(text_preset="fast_dllm_dual", text_steps=2)
    settings = presets.step_settings(sampling, model, "text")

    def finished(chosen):
        given = np.stack([request.given for request in chosen])
        plan = presets.plan(sampling, settings, model, given, tiny.TEXT_BLOCK_LEN)
        return traces.finished(tiny.denoiser(model), chosen, plan, settings)

    together = finished(requests)
    assert (together[0] != together[1]).any()
    for row, request in enumerate(requests):
        np.testing.assert_array_equal(together[row], finished([request])[0])


def test_the_tests_that_the_table_names_exist():
    named = set(re.findall(r"`(test_\w+)", DOCUMENT.read_text()))
    defined = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 10
    assert named <= defined


@pytest.mark.parametrize(
    ("preset", "grid", "whole"),
    [("dense", "code", False), ("sparse", "code", True), ("dense", "cell", True)],
)
def test_sparse_steps_decode_whole_cells_where_the_release_decodes_codes(preset, grid, whole):
    model = tiny.model_settings(codes_per_token=4)
    sampling = config.Sampling(preset=preset, grid=grid, num_steps=5)
    settings = presets.step_settings(sampling, model, "image")
    plan = presets.plan(sampling, settings, model, np.zeros((1, 9), bool), 1)
    assert all((part.candidates.shape[-1] == 1) == whole for part in plan)
    if not whole:  # some cell is known in part after a step
        assert any(part.candidates.any(-1).sum() > part.candidates.all(-1).sum() for part in plan)


def test_text_and_image_have_a_register_each():
    model = tiny.denoiser(tiny.model_settings())
    assert model.register_understanding.shape == (model.settings.width,)
    assert model.register_generation.shape == (model.settings.generation_width,)


def test_blocks_of_training_are_steps_of_a_plan_unless_told():
    assert config.Diffusion().blocks == "schedule"
    assert config.Diffusion(blocks="uniform").blocks == "uniform"
