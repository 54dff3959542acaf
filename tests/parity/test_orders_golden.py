# SPDX-License-Identifier: Apache-2.0
"""Orders and schedules equal those recorded from the released code (case F1)."""

import json

import numpy as np
import pytest
import safetensors.numpy

from sparse_lavida_jax import orders


@pytest.fixture(scope="module")
def recorded(golden_dir):
    folder = golden_dir / "F1_sampler_parts"
    settings = json.loads((folder / "config.json").read_text())["settings"]
    return settings, safetensors.numpy.load_file(folder / "outputs.safetensors")


def test_schedules_reveal_as_many_tokens_a_step_as_recorded(recorded):
    """`None`, an even split that may hold empty steps, is the rule of text blocks."""
    settings, outputs = recorded
    cases = [
        case for case in settings
        if case["function"] == "get_num_transfer_tokens_sch" and case["schedule"] is not None
    ]  # fmt: skip
    assert len(cases) == 210
    for case in cases:
        schedule = case["schedule"].rstrip("?")  # an unknown name is the identity there
        shift = (case["schedule_kwargs"] or {}).get("shift", 1.0)
        per_step = orders.counts(schedule, case["steps"], case["n"], float(shift))
        np.testing.assert_array_equal(per_step, outputs[case["tensor"]], case["tensor"])


def test_text_blocks_split_their_tokens_as_recorded(recorded):
    settings, outputs = recorded
    cases = [
        case for case in settings
        if case["function"] == "get_num_transfer_tokens_sch" and case["schedule"] is None
    ]  # fmt: skip
    assert len(cases) == 30
    for case in cases:
        (part,) = orders.text_plan(case["n"], case["n"], case["steps"])
        expected = outputs[case["tensor"]]
        np.testing.assert_array_equal(part.count[:, 0], expected[expected > 0], case["tensor"])


def test_stratified_orders_are_the_recorded_ones(recorded):
    settings, outputs = recorded
    cases = [
        case for case in settings
        if case["function"] == "stratified_random" and case["shuffle_blocks"]
    ]  # fmt: skip
    assert len(cases) == 7
    for case in cases:
        cells = orders.stratified(case["n"], case["n"], case["seed"])
        np.testing.assert_array_equal(cells, outputs[case["tensor"]], case["tensor"])
