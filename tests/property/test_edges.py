# SPDX-License-Identifier: Apache-2.0
"""The limits of every range: sampling at each predicts what training computes, to 2e-5."""

import dataclasses

import numpy as np
import pytest
import tiny
import traces

TOLERANCE = 2e-5
FULL_BUCKET = 13  # words that make a prompt 16 tokens long
WORDS = (0, 1, FULL_BUCKET)  # an empty prompt, one of one word, one without padding
MODEL = tiny.model_settings(num_registers=2)

# Steps, registers of the model, and the share of given cells in each row.
EDGES = {
    "one step": (1, 2, (0.0, 0.0, 0.0)),
    "as many steps as cells": (9, 2, (0.0, 0.0, 0.0)),
    "more steps than cells": (12, 2, (0.0, 0.0, 0.0)),
    "no registers": (3, 0, (0.0, 0.0, 0.0)),
    "nothing, everything and all but one cell given": (3, 2, (0.0, 1.0, 8 / 9)),
}


@pytest.mark.parametrize("edge", EDGES)
def test_an_edge_is_sampled_as_it_is_trained(edge):
    num_steps, registers, shares = EDGES[edge]
    model = tiny.denoiser(dataclasses.replace(MODEL, num_registers=registers))
    asked = [
        tiny.request("image", model.settings, i, words=words, given=share)
        for i, (words, share) in enumerate(zip(WORDS, shares, strict=True))
    ]
    settings = traces.settings_of("sparse", "image", model.settings)
    plan = traces.plan(asked, settings, num_steps)
    steps, canvas = traces.moments(model, asked, plan, settings)
    assert len(steps) == min(num_steps, 9)
    assert (canvas != model.settings.image_mask_id).all()
    for row, one in zip(canvas, asked, strict=True):
        np.testing.assert_array_equal(row[one.given], one.response[one.given])
    trained = traces.training_logits(model, asked, steps, settings)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)


def test_a_batch_of_which_everything_is_given_is_returned():
    model = tiny.denoiser(MODEL)
    asked = [tiny.request("image", MODEL, 0, words=2, given=1.0)]
    settings = traces.settings_of("sparse", "image", MODEL)
    done = traces.finished(model, asked, traces.plan(asked, settings), settings)
    np.testing.assert_array_equal(done[0], asked[0].response)


def test_a_model_of_full_attention_is_sampled_sparsely_if_that_is_asked_for_by_name():
    full = dataclasses.replace(MODEL, trained_attention="full")
    asked = [tiny.request("image", full, i, words=3) for i in range(2)]
    settings = traces.settings_of("sparse", "image", full)
    assert settings.preset.truncate and not settings.preset.full_attention
    done = traces.finished(tiny.denoiser(full), asked, traces.plan(asked, settings), settings)
    assert (done != full.image_mask_id).all()
