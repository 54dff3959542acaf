# SPDX-License-Identifier: Apache-2.0
"""Orders, schedules, noise and selections equal those recorded from the released code (F1)."""

import random

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sparse_lavida_jax import orders
from sparse_lavida_jax.sampling import commit, plans

REMASKING = {"low_confidence": "probability"}  # released name -> ours


@pytest.fixture(scope="module")
def parts(case):
    return case("F1_sampler_parts")


def recorded(parts, function):
    """The settings of one function, at least one."""
    cases = [given for given in parts.config["settings"] if given["function"] == function]
    assert cases, f"no recorded {function}"
    return cases


def schedules(parts, *, even):
    cases = recorded(parts, "get_num_transfer_tokens_sch")
    chosen = [given for given in cases if (given["schedule"] is None) == even]
    assert chosen
    return chosen


# ---------------------------------------------------------------------------------------------
# Schedules and orders.


def test_schedules_reveal_as_many_tokens_a_step_as_recorded(parts):
    """`None`, an even split that may have empty steps, is the rule for text blocks."""
    for given in schedules(parts, even=False):
        name = given["schedule"].rstrip("?")  # there an unknown name means the identity
        name = name if name in orders.SCHEDULES else "linear"
        shift = (given["schedule_kwargs"] or {}).get("shift", 1.0)
        per_step = orders.counts(name, given["steps"], given["n"], float(shift))
        np.testing.assert_array_equal(per_step, parts.outputs[given["tensor"]], given["tensor"])


def test_text_blocks_split_their_tokens_as_recorded(parts):
    for given in schedules(parts, even=True):
        (part,) = plans.text_plan(given["n"], given["n"], given["steps"])
        expected = parts.outputs[given["tensor"]]
        count = np.pad(part.count[:, 0], (0, len(expected) - part.num_steps))
        np.testing.assert_array_equal(count, expected, given["tensor"])


def test_a_text_block_may_follow_any_schedule(parts):
    for given in schedules(parts, even=False):
        name, shift = given["schedule"], (given["schedule_kwargs"] or {}).get("shift", 1.0)
        if name in orders.SCHEDULES:
            (part,) = plans.text_plan(
                given["n"], given["n"], given["steps"], schedule=name, shift=float(shift)
            )
            expected = parts.outputs[given["tensor"]]
            np.testing.assert_array_equal(part.count[:, 0], expected, given["tensor"])


def test_stratified_orders_are_the_recorded_ones(parts):
    for given in recorded(parts, "stratified_random"):
        side, shuffle = given["n"], given["shuffle_blocks"]
        cells = orders.stratified(side, side, given["seed"], shuffle=shuffle)
        np.testing.assert_array_equal(cells, parts.outputs[given["tensor"]], given["tensor"])


def test_the_generator_of_the_order_is_the_recorded_one(parts):
    for given in recorded(parts, "random.Random(seed).getrandbits(bits)"):
        generator = random.Random(given["seed"])
        drawn = [generator.getrandbits(given["bits"]) for _ in range(given["n"])]
        np.testing.assert_array_equal(drawn, parts.outputs[given["tensor"]])


def test_temperatures_fall_as_recorded(parts):
    for given in recorded(parts, "temperature schedule"):
        left = orders.cooling(
            given["schedule_temp"],
            given["n_steps"],
            given["min_temperature"],
            float(given["shift"]),
        )
        expected = parts.outputs[given["tensor"]]
        np.testing.assert_allclose(left, expected, rtol=0, atol=1e-5, err_msg=given["tensor"])


# ---------------------------------------------------------------------------------------------
# Noise and draws.


def test_text_noise_is_the_recorded_one_and_chooses_the_same_tokens(parts):
    """exp(logit) / (-log u)^T, which is exp(logit + T * Gumbel noise)."""
    for given in recorded(parts, "add_gumbel_noise"):
        logits, temperature = parts.inputs[given["logits"]], given["temperature"]
        expected, scores = parts.outputs[given["tensor"]], logits
        if temperature == 0:
            np.testing.assert_array_equal(logits, expected)
        else:
            noise = tiny.gumbel(parts.inputs[given["uniform"]])
            value = np.exp(logits.astype(np.float64) + temperature * noise)
            np.testing.assert_allclose(value, expected, rtol=1e-9)
            scores = logits / temperature + noise.astype(np.float32)
        chosen = parts.outputs[given["argmax_tensor"]]
        np.testing.assert_array_equal(scores.argmax(axis=-1), chosen, given["tensor"])


def test_gumbel_noise_is_the_recorded_one(parts):
    for given in recorded(parts, "gumbel_noise"):
        noise = tiny.gumbel(parts.inputs[given["uniform"]])
        np.testing.assert_allclose(noise, parts.outputs[given["tensor"]], rtol=0, atol=1e-5)


def test_noisy_confidences_are_the_recorded_ones(parts):
    for given in recorded(parts, "log(p) + alg_temp*gumbel"):
        assert given["clamp_min"] == commit.LEAST_PROBABILITY
        found = commit.with_noise(
            commit.log_odds(parts.inputs[given["p"]])[..., None],
            jnp.asarray(parts.outputs[given["gumbel"]])[..., None],
            jnp.float32(given["alg_temp"]),
        )
        expected = parts.outputs[given["tensor"]]
        np.testing.assert_allclose(found[..., 0], expected, rtol=0, atol=1e-5)


def test_filters_leave_the_recorded_logits(parts):
    for given in recorded(parts, "top_k_top_p_filtering"):
        logits = jnp.asarray(parts.inputs[given["logits"]])
        left = commit.filtered(logits, given["top_k"], given["top_p"])
        expected = parts.outputs[given["tensor"]]
        np.testing.assert_array_equal(np.isneginf(left), np.isneginf(expected), given["tensor"])
        kept = ~np.isneginf(expected)
        np.testing.assert_allclose(np.asarray(left)[kept], expected[kept], rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# Selections.


def candidates(parts, given):
    """(what is drawn, how sure it is, which tokens are masked) of a recorded selection."""
    assert given["temperature"] == 0
    logits = jnp.asarray(parts.inputs[given["logits"]] * given.get("logits_scale", 1.0))
    drawn = logits.argmax(axis=-1)
    if given.get("random_confidence") is not None:
        sure = jnp.asarray(parts.inputs[given["random_confidence"]])[..., None]
    else:
        name = REMASKING.get(given["remasking"], given["remasking"])
        sure = commit.confidence(name, logits[:, :, None], drawn[..., None])
    return drawn, sure, jnp.asarray(parts.inputs[given["mask"]])[..., None]


def test_the_surest_tokens_are_the_recorded_ones(parts):
    for given in recorded(parts, "get_transfer_index"):
        drawn, sure, masked = candidates(parts, given)
        nothing = jnp.zeros(len(drawn), int)
        if given["threshold"] is not None:
            chosen = commit.CommitRule("threshold", given["threshold"])(sure, masked, nothing)
        else:
            count = jnp.asarray(given["num_transfer_tokens"])
            chosen = commit.CommitRule("count")(sure, masked, count)
        np.testing.assert_array_equal(chosen[..., 0], parts.outputs[given["tensor"]])
        if "x0_tensor" in given:
            tokens = np.where(masked[..., 0], drawn, parts.inputs[given["x"]])
            np.testing.assert_array_equal(tokens, parts.outputs[given["x0_tensor"]])


def test_the_factor_rule_commits_the_recorded_tokens(parts):
    for given in recorded(parts, "get_transfer_index_dynamic"):
        drawn, sure, masked = candidates(parts, given)
        nothing = jnp.zeros(len(drawn), int)
        rule = commit.CommitRule("factor", given["factor"], released=True)
        chosen = rule(sure, masked, nothing)
        np.testing.assert_array_equal(
            chosen[..., 0], parts.outputs[given["tensor"]], given["tensor"]
        )
