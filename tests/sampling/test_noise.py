# SPDX-License-Identifier: Apache-2.0
"""Draws have the probabilities of the logits, and no two things share their noise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import stats

from sparse_lavida_jax import config
from sparse_lavida_jax.sampling import commit, draw, state

SETTINGS = tiny.model_settings()
DRAWS = 4000


def rows_and_step(modality="image", stage="", attempt=0, draws=DRAWS):
    """Returns a row of `draws` tokens to decode, and the settings of its modality."""
    settings = tiny.step_settings(config.Sampling(), SETTINGS, modality)
    settings = dataclasses.replace(settings, temperature=1.0)
    asked = tiny.asked_with(tiny.request(modality, SETTINGS, 3, words=2), attempt=attempt)
    rows = state.rows_of(tiny.sample_inputs([asked], SETTINGS, settings), settings, stage)
    return rows, tiny.step_at(jnp.arange(draws)[None]), settings


def assert_drawn_as(drawn, probability):
    """Tests counts of draws by chi-square, for codes that are expected five times or more."""
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=len(probability))
    expected = probability * counts.sum()
    assert counts[probability == 0].sum() == 0
    often = expected >= 5
    found = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    assert stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-3


def probability_of(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


LOGITS = np.random.default_rng(0).normal(size=12)
KEPT = np.sort(np.argsort(-LOGITS)[:4])  # by top-k 4


@pytest.mark.parametrize("case", ["plain", "top_k", "top_p", "guided", "three_rows", "four_codes"])
def test_what_is_drawn_has_the_probability_of_its_logits(case):
    rows, now, settings = rows_and_step()
    codes = 4 if case == "four_codes" else 1
    logits = jnp.asarray(np.broadcast_to(LOGITS, (1, DRAWS // codes, codes, 12)), jnp.float32)
    expected = LOGITS
    now = tiny.step_at(now.decode[:, : DRAWS // codes])
    if case in ("top_k", "top_p"):
        ranked = np.sort(probability_of(LOGITS))[::-1]
        asked = {"top_k": 4} if case == "top_k" else {"top_p": float(ranked[:4].sum() - 1e-3)}
        logits = commit.filtered(logits, **({"top_k": 0, "top_p": 1.0} | asked))
        expected = np.where(np.isin(np.arange(12), KEPT), LOGITS, -np.inf)
    if case in ("guided", "three_rows"):
        number = 2 if case == "guided" else 3
        others = np.random.default_rng(1).normal(size=(number - 1, 12))
        all_rows = [jnp.asarray(np.broadcast_to(one, (1, DRAWS, 1, 12))) for one in others]
        guided = dataclasses.replace(settings, guidance_rows=number)
        rows = dataclasses.replace(
            rows, guidance=np.full(1, 0.5, np.float32), guidance_image=np.full(1, 0.3, np.float32)
        )
        logits = draw.guided(jnp.stack([*all_rows, logits]), rows, now, guided)
        if number == 3:
            expected = 1.3 * expected - 0.3 * others[1]
        expected = 1.5 * expected - 0.5 * others[0]
    drawn = draw.Draws().codes(rows, now, logits.astype(jnp.float32), settings)
    assert_drawn_as(drawn, probability_of(expected))


def test_words_are_drawn_with_the_probability_of_their_logits():
    rows, now, settings = rows_and_step("text")
    known = np.random.default_rng(2).normal(size=SETTINGS.vocab_size).astype(np.float32)
    logits = jnp.broadcast_to(known, (1, DRAWS, 1, SETTINGS.vocab_size))
    logits = draw.allowed(logits, rows, now, SETTINGS, settings)
    known[SETTINGS.text_mask_id] = -np.inf
    drawn = draw.Draws().codes(rows, now, logits, settings)
    assert_drawn_as(drawn, probability_of(known.astype(float)))


def test_rare_words_of_a_large_vocabulary_are_drawn():
    """With 23 random bits, a tail of 1 % over 127,000 words had only .0035 to .0046 of draws."""
    rows, now, _ = rows_and_step("text", draws=32)
    numbers = np.asarray(draw.noise(rows.key, now, (131_072,)))
    large = numbers[numbers > 8]
    assert len(np.unique(large)) > 0.99 * len(large) > 1000  # a share of 0.8 with 23 random bits


@pytest.mark.slow
def test_a_tail_of_one_percent_over_a_large_vocabulary_is_drawn_in_one_percent_of_draws():
    words, tail = 127_001, 0
    logits = np.full(words, np.log(0.01 / (words - 1)), np.float32)
    logits[0] = np.log(0.99)
    drawn = jax.jit(
        lambda key, at: jnp.argmax(
            draw.noise(key, tiny.step_at(at), (words,)) + logits[None, None], axis=-1
        )
    )
    rows, *_ = rows_and_step("text")
    for start in range(0, 8000, 50):
        tail += int((drawn(rows.key, start + jnp.arange(50)[None]) > 0).sum())
    assert 55 <= tail <= 105  # 80 expected, deviation 9


def test_no_two_things_made_of_one_seed_share_their_noise():
    """A layout, its image, a verdict, and the attempts of a reflection."""
    ways = [("text", "layout"), ("text", "text"), ("image", "image")]
    noises = []
    for modality, stage in ways:
        for attempt in (0, 1, 2):
            rows, now, _ = rows_and_step(modality, stage, attempt, draws=4)
            noises.append(tuple(np.asarray(draw.noise(rows.key, now, (3,))).ravel()))
    assert len(set(noises)) == 9
