# SPDX-License-Identifier: Apache-2.0
"""Images edited by the released sampler in its four modes, step by step (case D)."""

import dataclasses

import jax.numpy as jnp
import merged
import numpy as np
import pytest
import replay
import tiny

from sparse_lavida_jax import sequence
from sparse_lavida_jax.data import images
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.vq import VQModel

NAME = "D_edit"
LOGITS = 1e-4
each_mode = pytest.mark.parametrize("name", replay.variants(NAME, "edit_mode"))


@pytest.fixture(scope="module")
def given(case):
    return case(NAME)


@pytest.fixture(scope="module")
def request_(given):
    """The edit as a request: the image as views and as source cells, then the instruction."""
    model, recorded = given.settings.model, given.outputs
    views = given.inputs["pixel_values"][0].transpose(0, 2, 3, 1)
    height, width = given.inputs["image_uint8"].shape[:2]
    index = images.token_index((width, height), model.vision, whole=len(views) == 1)
    features = len(views) * model.vision.num_tokens + model.vision.newline
    (source,) = replay.cells_of(recorded["enc.codes"], given.config["gen_shape"], model.codes_side)
    parts = replay.parts_of(
        recorded["new_input_ids"][0],
        given.config["prompt_cutoff_len"],
        given.config["golden_ids"],
        vision=sequence.VisionTokens(len(index), index, features),
        source=source,
    )
    return replay.image_request(parts, model, given.config["gen_shape"], (views,))


def run_of(given, request, name):
    """Returns (plan, settings) of a recorded run."""
    model = given.settings.model
    sampling = replay.image_sampling(given.config["variants"][name])
    settings = tiny.step_settings(sampling, model, "image", has_source=True)
    return replay.image_plan(sampling, settings, model, request), settings


def test_the_source_becomes_the_recorded_codes_and_tokens(given):
    pixels = given.outputs["enc.pixels"].transpose(0, 2, 3, 1)
    codes = np.asarray(tiny.quick_jit(VQModel.encode)(given.vq(), jnp.asarray(pixels)))
    np.testing.assert_array_equal(codes.reshape(1, -1), given.outputs["enc.codes"])
    model, grid = given.model(), given.config["gen_shape"]
    at = np.arange(given.settings.model.num_cells)[None]
    stream = merged.image_stream(codes, grid, model.settings.codes_side, at)
    embeds = tiny.quick_jit(Denoiser.embed_image)(model, stream)
    np.testing.assert_allclose(embeds, given.outputs["enc.embeds"], rtol=0, atol=LOGITS)


@each_mode
def test_edits_are_decoded_as_recorded(given, request_, name):
    model = given.settings.model
    plan, settings = run_of(given, request_, name)
    assert settings.guidance_rows == len(given.config["variants"][name]["rows"])
    shown, last, passes = replay.history(given.model(), request_, plan, settings)
    assert passes == given.config["variants"][name]["num_loop_steps"]
    grid = given.config["gen_shape"]
    before = replay.cells_of(given.outputs[f"{name}.codes_before_step"], grid, model.codes_side)
    np.testing.assert_array_equal(shown[:-1], before[1:])
    final = replay.cells_of(given.outputs[f"{name}.final_codes"], grid, model.codes_side)
    np.testing.assert_array_equal(last, final[0])
    replay.assert_image(given, request_, last, given.outputs[f"{name}.image_uint8"])


@each_mode
def test_rows_and_their_logits_are_the_recorded_ones(given, request_, name):
    plan, settings = run_of(given, request_, name)
    steps = replay.one_by_one(plan)
    for key, step in (("step0", 0), ("last", len(steps) - 1)):
        now = given.outputs[f"{name}.codes_before_step"][step]
        seen = replay.one_pass(given, request_, steps[step], settings, now)
        expected = given.outputs[f"{name}.logits_{key}"]
        np.testing.assert_allclose(seen.logits, expected, rtol=0, atol=LOGITS)
        np.testing.assert_array_equal(seen.modality, given.outputs[f"{name}.modality_indices"])
        if step == 0:
            embeds = given.outputs[f"{name}.inputs_embeds_step0"]
            np.testing.assert_allclose(seen.embeds, embeds, rtol=0, atol=LOGITS)


@pytest.mark.slow
def test_the_conditional_pass_is_the_recorded_one(given, request_):
    """An image known in part, layer by layer."""
    recorded, model = given.outputs, given.model()
    plan, settings = run_of(given, request_, replay.variants(NAME, "edit_mode")[0])
    alone = dataclasses.replace(settings, guidance_rows=1)
    codes = given.inputs["image_codes"][0]
    seen = replay.one_pass(given, request_, plan[0][:1], alone, codes)
    np.testing.assert_allclose(seen.embeds, recorded["cond.inputs_embeds"], rtol=0, atol=LOGITS)
    np.testing.assert_allclose(seen.logits, recorded["cond.image_logits"], rtol=0, atol=LOGITS)
    length, width = seen.modality.shape[1], model.settings.width
    found = merged.places(seen.modality)
    x = merged.take(seen.embeds, found, merged.widths(model.settings))
    layers = list(merged.after_layers(model, x, merged.layouts(found)))
    assert f"cond.hidden_after_layer.{len(layers)}" not in recorded
    for depth, hidden in enumerate(layers):
        expected = recorded[f"cond.hidden_after_layer.{depth}"]
        found_here = merged.merge(hidden, found, length, width)
        np.testing.assert_allclose(found_here, expected, rtol=0, atol=LOGITS)
