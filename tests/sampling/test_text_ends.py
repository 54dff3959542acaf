# SPDX-License-Identifier: Apache-2.0
"""Where a text ends: after all its given tokens, or never."""

import dataclasses
import unittest.mock

import jax.numpy as jnp
import numpy as np
import pytest
import raw_data
import tiny
import traces

from sparse_lavida_jax import config
from sparse_lavida_jax.lavida_o.prompts import ChatPrompts
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.sampling import draw, state

# Unique to this test, so that no cached program of another test is used in its place.
SETTINGS = tiny.model_settings(vocab_size=43)
END = SETTINGS.end_of_text_id


@pytest.fixture
def ends_at_once():
    """Makes every text token an end-of-text if it may be one."""
    plain = Denoiser.text_logits

    def at_once(self, hidden):
        return plain(self, hidden).at[..., END].add(100.0)

    with unittest.mock.patch.object(Denoiser, "text_logits", at_once):
        yield


def texts(preset, asked, num_steps=2):
    settings = dataclasses.replace(traces.settings_of(preset, "text", SETTINGS), head_tile=0)
    plan = traces.plan(asked, settings, num_steps)
    return traces.finished(tiny.denoiser(SETTINGS), asked, plan, settings)[..., 0]


def with_given(positions, seed=0, **changes):
    one = tiny.request("text", SETTINGS, seed, words=3)
    given = np.isin(np.arange(tiny.TEXT_LEN), positions)
    return dataclasses.replace(one, given=given, **changes)


@pytest.mark.parametrize("preset", ["sparse", "dense"])
def test_one_end_of_text_wipes_nothing_that_is_given_after_it(ends_at_once, preset):
    """An infilled text with wide gaps, in a batch with one without given tokens."""
    asked = [with_given([2, 7], seed=1), with_given([], seed=2)]
    filled, free = texts(preset, asked)
    np.testing.assert_array_equal(filled[[2, 7]], asked[0].response[[2, 7], 0])
    assert (filled[:8] != END).all() and (filled[8:] == END).all()
    assert (free == END).all()


def test_a_response_of_a_fixed_length_does_not_end(ends_at_once):
    (ids,) = texts("sparse", [with_given([0], ends=False)])
    assert (ids != END).all()


def test_the_end_may_be_drawn_after_what_is_given_alone():
    asked = [with_given([2, 7]), with_given([]), with_given([11]), with_given([0], ends=False)]
    assert [*map(state.ends_from, asked)] == [7, 0, 11, 12]
    settings = traces.settings_of("sparse", "text", SETTINGS)
    rows = state.rows_of(tiny.sample_inputs(asked, SETTINGS, settings), settings)
    now = tiny.step_at(jnp.broadcast_to(jnp.arange(tiny.TEXT_LEN), (4, tiny.TEXT_LEN)))
    logits = jnp.zeros((4, tiny.TEXT_LEN, 1, SETTINGS.vocab_size))
    left = np.isfinite(draw.allowed(logits, rows, now, SETTINGS, settings))[:, :, 0]
    for row, one in zip(left, asked, strict=True):
        np.testing.assert_array_equal(row[:, END], np.arange(tiny.TEXT_LEN) >= state.ends_from(one))
    assert not left[..., SETTINGS.text_mask_id].any()
    released = dataclasses.replace(settings, released=True)
    assert np.isfinite(draw.allowed(logits, rows, now, SETTINGS, released)).all()


def test_ground_of_several_phrases_never_ends_early(tmp_path):
    tokenizer = raw_data.tokenizer(tmp_path)
    model = config.Model(
        vocab_size=tokenizer.vocab_size, text_mask_id=tokenizer.id_of("<|mdm_mask|>")
    )
    prompts = ChatPrompts(tokenizer, model, config.Data(), 1)
    image = np.zeros((8, 8, 3), np.uint8)
    (example,) = prompts.locate(["a cat", "a dog", "a cow"], image)
    assert state.ends_from(example) == len(example.response)
    assert state.ends_from(prompts.locate_one("a cat", image)) == 4
