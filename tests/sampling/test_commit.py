# SPDX-License-Identifier: Apache-2.0
"""What may be drawn, how sure the model is of it, and how much is committed: against loops."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sparse_lavida_jax.sampling import commit
from sparse_lavida_jax.sampling.commit import CommitRule


def some_logits(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2


def softmax(row):
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def rest(p, code):
    """One minus the probability of a code, without rounding."""
    return np.delete(p, code).sum()


MEASURES = {
    "probability": lambda p, code: np.log(p[code] / rest(p, code)),
    "margin": lambda p, _: np.log(np.diff(np.sort(p))[-1] / (rest(p, p.argmax()) + np.sort(p)[-2])),
    "entropy": lambda p, _: np.sum(p * np.log(p)),
}

# ---------------------------------------------------------------------------------------------
# What may be drawn.


def test_gumbel_noise_chooses_what_the_released_formula_chooses():
    rng = np.random.default_rng(0)
    logits, uniform = some_logits(50, 9).astype(np.float64), rng.random((50, 9))
    for temperature in (0.3, 1.0):
        released = np.exp(logits) / (-np.log(uniform)) ** temperature
        ours = logits / temperature + tiny.gumbel(uniform)
        np.testing.assert_array_equal(ours.argmax(axis=1), released.argmax(axis=1))


def test_gumbel_noise_of_zero_is_a_number():
    assert np.isfinite(tiny.gumbel(np.zeros(1))).all()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.6), (3, 1.0), (4, 0.6), (1, 0.01), (99, 1.0)])
def test_filters_keep_the_most_probable(top_k, top_p):
    logits = some_logits(20, 7)
    left = np.asarray(commit.filtered(jnp.asarray(logits), top_k, top_p))
    for row, filtered in zip(logits, left, strict=True):
        ranked = np.argsort(-row)[: top_k or None]
        probability, kept, held = softmax(row[ranked]), [], 0.0
        for i, p in zip(ranked, probability, strict=True):
            if held <= top_p or not kept:
                kept.append(i)
            held += p
        assert set(np.flatnonzero(np.isfinite(filtered))) == set(kept)
        np.testing.assert_array_equal(filtered[kept], row[kept])


def test_no_filter_leaves_the_logits_alone():
    logits = jnp.asarray(some_logits(4, 7))
    assert commit.filtered(logits, 0, 1.0) is logits


def test_of_equal_logits_at_the_edge_no_more_are_kept_than_the_probability_needs():
    """Many bfloat16 logits are equal: here 1,000 words have one probability."""
    logits = jnp.zeros((1, 1000)).at[0, 3].set(1.0)
    left = np.isfinite(commit.filtered(logits, 0, 0.9))[0]
    held, each = np.e / (np.e + 999), 1 / (np.e + 999)
    assert left.sum() == 1 + np.ceil((0.9 - held) / each)
    assert left[3] and left[: left.sum()].all()


# ---------------------------------------------------------------------------------------------
# Confidence.


def test_confidences_are_those_of_the_softmax():
    logits = some_logits(2, 3, 2, 6)
    drawn = np.random.default_rng(1).integers(0, 6, (2, 3, 2))
    for name, measure in MEASURES.items():
        found = commit.confidence(name, jnp.asarray(logits), jnp.asarray(drawn))
        for at in np.ndindex(drawn.shape):
            expected = measure(softmax(logits[at]), drawn[at])
            assert found[at] == pytest.approx(expected, abs=2e-5), name


@pytest.mark.parametrize("name", MEASURES)
def test_confidences_of_probabilities_next_to_one_are_ranked_as_in_float64(name):
    """With margins of 10 to 20 nats, these probabilities are all 1 in float32."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(1, 64, 1, 50)).astype(np.float32)
    logits[..., 7] = logits.max(axis=-1) + np.linspace(10, 20, 64)[None, rng.permutation(64), None]
    drawn = np.full((1, 64, 1), 7)
    found = np.asarray(commit.confidence(name, jnp.asarray(logits), jnp.asarray(drawn)))[0, :, 0]
    exact = [MEASURES[name](softmax(row), 7) for row in logits[0, :, 0]]
    np.testing.assert_array_equal(np.argsort(found), np.argsort(exact))


@pytest.mark.parametrize("name", ["probability", "margin", "entropy"])
def test_what_may_not_be_drawn_does_not_count(name):
    """Compares a vocabulary without a token to one in which it may not be drawn."""
    logits = some_logits(1, 4, 1, 5)
    barred = np.concatenate([logits, np.full((1, 4, 1, 1), -np.inf, np.float32)], axis=-1)
    drawn = jnp.asarray(logits.argmax(axis=-1))
    found, expected = (commit.confidence(name, jnp.asarray(x), drawn) for x in (barred, logits))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_noise_is_added_to_the_logarithm():
    sure, noise = commit.log_odds(jnp.array([[[0.5]], [[0.0]]])), jnp.array([[[2.0]], [[-1.0]]])
    found = commit.with_noise(sure, noise, jnp.float32(3.0))
    expected = [np.log(0.5) + 6, np.log(1e-20) - 3]
    np.testing.assert_allclose(found[:, 0, 0], expected, rtol=1e-6)


# ---------------------------------------------------------------------------------------------
# How much is committed.


def some_candidates(seed):
    rng = np.random.default_rng(seed)
    sure, candidate = rng.random((3, 5, 2)).astype(np.float32), rng.random((3, 5, 2)) < 0.7
    candidate[2] = False
    return sure, candidate


def chosen_by(rule, sure, candidate):
    nothing = jnp.zeros(len(sure), int)
    if rule.name != "entropy":
        sure = commit.log_odds(sure)
    return np.asarray(rule(jnp.asarray(sure), jnp.asarray(candidate), nothing))


def surest_first(sure, candidate):
    return sorted(np.flatnonzero(candidate), key=lambda i: -sure.ravel()[i])


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.99])
def test_everything_above_the_threshold_is_committed_and_the_surest_anyway(threshold):
    for seed in range(10):
        sure, candidate = some_candidates(seed)
        chosen = chosen_by(CommitRule("threshold", threshold), sure, candidate)
        for row in range(3):
            ranked = surest_first(sure[row], candidate[row])
            expected = {i for i in ranked if sure[row].ravel()[i] >= threshold} | set(ranked[:1])
            assert set(np.flatnonzero(chosen[row])) == expected


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0])
def test_the_factor_rule_commits_while_many_are_sure_together(factor, released):
    for seed in range(30):
        sure, candidate = some_candidates(seed)
        chosen = chosen_by(CommitRule("factor", factor, released=released), sure, candidate)
        for row in range(3):
            ranked, number = surest_first(sure[row], candidate[row]), 0
            for n, i in enumerate(ranked, start=1):
                if n > 1 and sure[row].ravel()[i] < 1 - factor / (n + 1):
                    break
                number = n
            if released and number == len(ranked) - 1:  # a single token gets no pass of its own
                number += 1
            assert set(np.flatnonzero(chosen[row])) == set(ranked[:number])


@pytest.mark.parametrize("bound", [0.0, 0.3, 1.0, 9.0])
def test_the_entropies_of_all_but_the_largest_keep_the_bound(bound):
    for seed in range(30):
        sure, candidate = some_candidates(seed)
        entropy = 1 - sure
        chosen = chosen_by(CommitRule("entropy", bound, "entropy"), -entropy, candidate)
        for row in range(3):
            ranked, number = surest_first(sure[row], candidate[row]), 0
            while number < len(ranked) and entropy[row].ravel()[ranked[:number]].sum() <= bound:
                number += 1
            assert set(np.flatnonzero(chosen[row])) == set(ranked[:number])


@pytest.mark.parametrize("most", [1, 2, 100])
def test_a_cap_leaves_the_surest_of_what_a_rule_commits(most):
    sure, candidate = some_candidates(3)
    whole = chosen_by(CommitRule("threshold", 0.3), sure, candidate)
    capped = chosen_by(CommitRule("threshold", 0.3, most=most), sure, candidate)
    for row in range(3):
        kept = surest_first(sure[row], whole[row])[:most]
        assert set(np.flatnonzero(capped[row])) == set(kept)


def test_only_the_released_factor_rule_leaves_no_last_token_to_itself():
    whole = np.ones((1, 3, 1), bool)
    cases = [([0.9, 0.8, 0.1], False, 2), ([0.9, 0.8, 0.1], True, 3), ([0.9, 0.2, 0.1], True, 1)]
    for sure, released, number in cases:
        surest_first = np.array(sure, np.float32).reshape(1, 3, 1)
        chosen = chosen_by(CommitRule("factor", 1.0, released=released), surest_first, whole)
        np.testing.assert_array_equal(chosen[0, :, 0], np.arange(3) < number)
