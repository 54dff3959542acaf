# SPDX-License-Identifier: Apache-2.0
"""Images drawn by the released sampler, step by step (case F3)."""

import numpy as np
import pytest
import replay
import tiny

from sparse_lavida_jax import config, orders, sequence

NAME = "F3_t2i_trace"
LOGITS = 1e-4
each_variant = pytest.mark.parametrize("name", replay.variants(NAME))


@pytest.fixture(scope="module")
def given(case):
    return case(NAME)


def run_of(given, name):
    """Returns (request, plan, settings, draws) of a recorded run."""
    variant, model = given.config["variants"][name], given.settings.model
    grid, side = variant["gen_shape"], model.codes_side
    parts = replay.parts_of(
        given.inputs["input_ids"][0], variant["prompt_cutoff_len"], given.config["golden_ids"]
    )
    request = replay.image_request(parts, model, grid)
    sampling = replay.image_sampling(variant)
    settings = tiny.step_settings(sampling, model, "image")
    plan = replay.image_plan(sampling, settings, model, request)
    return request, plan, settings, replay.image_draws(variant, given.outputs, grid, side)


@each_variant
def test_codes_are_decoded_as_recorded(given, name):
    variant, side = given.config["variants"][name], given.settings.model.codes_side
    request, plan, settings, draws = run_of(given, name)
    shown, last, passes = replay.history(given.model(), request, plan, settings, draws)
    assert passes == variant["num_loop_steps"]
    before = replay.cells_of(given.outputs[f"{name}.codes_before_step"], variant["gen_shape"], side)
    np.testing.assert_array_equal(shown[:-1], before[1:])
    assert (before[0] == given.settings.model.image_mask_id).all()
    final = replay.cells_of(given.outputs[f"{name}.final_codes"], variant["gen_shape"], side)
    np.testing.assert_array_equal(last, final[0])
    replay.assert_image(given, request, last, given.outputs[f"{name}.image_uint8"])


@each_variant
def test_the_recorded_steps_are_guided(given, name):
    _, plan, settings, _ = run_of(given, name)
    guided = np.concatenate([[part.guided] * part.num_steps for part in plan])
    rows = np.where(guided, settings.guidance_rows, 1)
    np.testing.assert_array_equal(rows, given.config["variants"][name]["rows_per_step"])


@each_variant
def test_logits_of_every_row_are_the_recorded_ones(given, name):
    request, plan, settings, _ = run_of(given, name)
    steps = replay.one_by_one(plan)
    for key, step in (("step0", 0), ("last", len(steps) - 1)):
        now = given.outputs[f"{name}.codes_before_step"][step]
        seen = replay.one_pass(given, request, steps[step], settings, now)
        expected = given.outputs[f"{name}.logits_{key}"]
        np.testing.assert_allclose(seen.logits, expected, rtol=0, atol=LOGITS)


def test_the_embedded_rows_are_the_recorded_ones(given):
    keys = [key for key in given.outputs if key.endswith(".inputs_embeds_step0")]
    assert keys
    for key in keys:
        name = key.partition(".")[0]
        request, plan, settings, _ = run_of(given, name)
        now = given.outputs[f"{name}.codes_before_step"][0]
        seen = replay.one_pass(given, request, plan[0][:1], settings, now)
        np.testing.assert_allclose(seen.embeds, given.outputs[key], rtol=0, atol=LOGITS)
        np.testing.assert_array_equal(
            seen.modality, np.broadcast_to(given.inputs["is_gen"], seen.modality.shape)
        )


def test_the_fixed_order_is_the_recorded_one(given):
    """The steps of the plan split the recorded order code by code."""
    order = given.inputs["unmask_order_seed42"]
    counts = given.inputs["num_transfer_tokens"]
    fixed = [
        name
        for name, variant in given.config["variants"].items()
        if variant["confidence_policy"] == "stratified" and variant["num_loop_steps"] == len(counts)
    ]
    assert fixed
    for name in fixed:
        grid, side = given.config["variants"][name]["gen_shape"], given.settings.model.codes_side
        _, plan, _, _ = run_of(given, name)
        bounds = np.cumsum([0, *counts])
        for i, part in enumerate(replay.one_by_one(plan)):
            chosen = np.zeros((len(order) // side**2, side**2), bool)
            chosen[part.decode[0, 0]] = part.candidates[0, 0]
            codes = sequence.codes_from_cells(chosen[None], grid[0] // side, side).ravel()
            expected = np.sort(order[bounds[i] : bounds[i + 1]])
            np.testing.assert_array_equal(np.flatnonzero(codes), expected)
            assert part.count[0, 0] == counts[i]


@each_variant
def test_temperatures_of_the_plan_fall_as_the_variant_says(given, name):
    variant = given.config["variants"][name]
    _, plan, _, _ = run_of(given, name)
    noise = np.concatenate([part.noise for part in plan])
    share = np.ones(variant["n_steps"])
    if variant["dynamic_temperature"]:
        share = orders.cooling(
            variant["schedule_temp"],
            variant["n_steps"],
            float(variant["min_temperature"]),
            float(variant["shift_alg_effective"]),
        )
    np.testing.assert_allclose(noise, variant["alg_temp"] * share[: len(noise)], rtol=1e-6)


def test_a_recorded_image_need_not_be_a_square():
    """The replay functions accept any grid: here 2 x 3 cells."""
    model = tiny.model_settings(codes_per_token=4)
    request = replay.image_request((sequence.Response(6),), model, (4, 6))
    assert (request.grid, request.response.shape) == ((2, 3), (6, 4))
    codes = np.arange(24)
    (cells,) = replay.cells_of(codes, (4, 6), 2)
    np.testing.assert_array_equal(cells[4], [14, 15, 20, 21])  # in the middle of the lower row
    back = sequence.codes_from_cells(cells[None], request.grid[0], 2)
    np.testing.assert_array_equal(np.ravel(back), codes)
    sampling = config.Sampling(preset="dense", grid="code", num_steps=5)
    settings = tiny.step_settings(sampling, model, "image")
    plan = replay.image_plan(sampling, settings, model, request)
    assert sum(int(part.candidates.sum()) for part in plan) == 24
