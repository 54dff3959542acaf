# SPDX-License-Identifier: Apache-2.0
"""The sampler, with cache and truncation, predicts what training computed: 2e-5 at every step."""

import dataclasses

import numpy as np
import pytest
import tiny
import traces

TOLERANCE = 2e-5


def draw(settings):
    """Images from prompts of different length; two share a prompt bucket, one does not."""
    return [tiny.request("image", settings, i, words=n) for i, n in enumerate((3, 12, 5))]


def edit(settings):
    """Edits with some target cells known, next to a row that has no image to look at."""
    return [
        tiny.request("image", settings, 0, words=2, vision=True, source=True, given=0.4),
        tiny.request("image", settings, 1, words=6),
        tiny.request("image", settings, 2, words=4, vision=True, source=True, given=0.7),
    ]


def answer(settings):
    """Answers about an image that is seen by the tower and as source cells."""
    return [
        tiny.request("text", settings, i, words=n, vision=True, source=True)
        for i, n in enumerate((1, 9))
    ]


def infill(settings):
    """Texts with holes; one of them has whole text blocks given."""
    requests = [
        tiny.request("text", settings, i, words=n, given=share)
        for i, (n, share) in enumerate(((7, 0.5), (2, 0.25), (4, 0.0)))
    ]
    holes = requests[0].given.copy()
    holes[: tiny.TEXT_BLOCK_LEN] = True
    return [dataclasses.replace(requests[0], given=holes), *requests[1:]]


CASES = {
    "draw": ("image", draw, 2, {"codes_per_token": 1, "num_registers": 3}),
    "edit": ("image", edit, 3, {"codes_per_token": 4, "num_registers": 2}),
    "answer": ("text", answer, 1, {"num_registers": 4}),
    "infill": ("text", infill, 1, {"num_registers": 0}),
}


@pytest.mark.parametrize(("passes", "preset"), [(2, "sparse"), (4, "sparse"), (2, "t")])
def test_so_are_those_of_passes_over_codes_inside_a_step(passes, preset):
    """What the first passes decode is in the input of the others, in the block of the step."""
    model = tiny.denoiser(tiny.model_settings(codes_per_token=4, num_registers=2))
    requests = draw(model.settings)
    settings = traces.settings_of(preset, "image", model.settings, guidance=0.7)
    segments = traces.plan(requests, settings, num_steps=3, cell_passes=passes)
    steps, canvas = traces.moments(model, requests, segments, settings)
    assert [moment.block for moment in steps] == np.repeat([2, 3, 4], passes).tolist()
    states = [moment.canvas for moment in steps] + [canvas]
    for i, moment in enumerate(steps):
        new = (states[i + 1] != states[i]).sum(axis=-1)
        np.testing.assert_array_equal(new, moment.masked * 4 // passes)
    trained = traces.training_logits(model, requests, steps, settings)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_sampler_logits_are_training_logits_at_every_step(case):
    kind, make_requests, rows, changes = CASES[case]
    model = tiny.denoiser(tiny.model_settings(**changes))
    requests = make_requests(model.settings)
    settings = traces.settings_of(
        "sparse",
        kind,
        model.settings,
        has_source=rows == 3,
        guidance=0.7 if rows > 1 else 0.0,
        guidance_image=0.4 if rows == 3 else 0.0,
    )
    assert settings.guidance_rows == rows
    segments = traces.plan(requests, settings, num_steps=4 if kind == "image" else 3)
    steps, canvas = traces.moments(model, requests, segments, settings)
    trained = traces.training_logits(model, requests, steps, settings)
    predicted = np.zeros(canvas.shape[:2], int)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)
        assert np.abs(logits[moment.masked]).max() > 0.1
        predicted += moment.masked
    given = np.stack([request.given for request in requests])
    np.testing.assert_array_equal(predicted > 0, ~given)
