# SPDX-License-Identifier: Apache-2.0
"""The sampler, with cache and truncation, predicts what training computed: 2e-5 at every step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.batch import make_row
from sparse_lavida_jax.data.corrupted_rows import CorruptedRow
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.sequence import Response

TOLERANCE = 2e-5


def draw(settings):
    """Images from prompts of different length; two share a prompt bucket, one does not."""
    return [tiny.request("image", settings, i, words=n) for i, n in enumerate((3, 12, 5))]


def edit(settings):
    """Edits with some known target cells, in a batch with a row without input image."""
    return [
        tiny.request("image", settings, 0, words=2, vision=True, source=True, given=0.4),
        tiny.request("image", settings, 1, words=6),
        tiny.request("image", settings, 2, words=4, vision=True, source=True, given=0.7),
    ]


def answer(settings):
    """Answers about an image, given as vision features and as source cells."""
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
def test_logits_of_passes_over_codes_inside_a_step_are_training_logits(passes, preset):
    """Later passes see what earlier ones decoded, in the block of the step."""
    model = tiny.denoiser(tiny.model_settings(codes_per_token=4, num_registers=2))
    requests = draw(model.settings)
    settings = traces.settings_of(preset, "image", model.settings, guidance=0.7)
    phases = traces.plan(requests, settings, num_steps=3, cell_passes=passes)
    steps, responses = traces.moments(model, requests, phases, settings)
    assert [moment.block for moment in steps] == np.repeat([2, 3, 4], passes).tolist()
    states = [moment.responses for moment in steps] + [responses]
    for i, moment in enumerate(steps):
        new = (states[i + 1] != states[i]).sum(axis=-1)
        np.testing.assert_array_equal(new, moment.masked * 4 // passes)
    trained = traces.training_logits(model, requests, steps, settings)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_sampler_logits_are_training_logits_at_every_step(case):
    modality, make_requests, rows, changes = CASES[case]
    model = tiny.denoiser(tiny.model_settings(**changes))
    requests = make_requests(model.settings)
    settings = traces.settings_of(
        "sparse",
        modality,
        model.settings,
        has_source=rows == 3,
        guidance=0.7 if rows > 1 else 0.0,
        guidance_image=0.4 if rows == 3 else 0.0,
    )
    assert settings.guidance_rows == rows
    phases = traces.plan(requests, settings, num_steps=4 if modality == "image" else 3)
    steps, responses = traces.moments(model, requests, phases, settings)
    trained = traces.training_logits(model, requests, steps, settings)
    predicted = np.zeros(responses.shape[:2], int)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)
        assert np.abs(logits[moment.masked]).max() > 0.1
        predicted += moment.masked
    given = np.stack([request.given for request in requests])
    np.testing.assert_array_equal(predicted > 0, ~given)


# Steps, registers of the model, and the share of given cells in each row: the limits of each range.
EDGES = {
    "one step": (1, 2, (0.0, 0.0, 0.0)),
    "as many steps as cells": (9, 2, (0.0, 0.0, 0.0)),
    "more steps than cells": (12, 2, (0.0, 0.0, 0.0)),
    "no registers": (3, 0, (0.0, 0.0, 0.0)),
    "nothing, everything and all but one cell given": (3, 2, (0.0, 1.0, 8 / 9)),
}
WORDS = (0, 1, 13)  # an empty prompt, one of one word, one that fills its bucket


@pytest.mark.parametrize("edge", EDGES)
def test_sampler_logits_are_training_logits_at_the_limits_of_every_range(edge):
    num_steps, registers, shares = EDGES[edge]
    model = tiny.denoiser(tiny.model_settings(num_registers=registers))
    asked = [
        tiny.request("image", model.settings, i, words=words, given=share)
        for i, (words, share) in enumerate(zip(WORDS, shares, strict=True))
    ]
    settings = traces.settings_of("sparse", "image", model.settings)
    plan = traces.plan(asked, settings, num_steps)
    steps, responses = traces.moments(model, asked, plan, settings)
    assert len(steps) == min(num_steps, 9)
    assert (responses != model.settings.image_mask_id).all()
    for row, one in zip(responses, asked, strict=True):
        np.testing.assert_array_equal(row[one.given], one.response[one.given])
    trained = traces.training_logits(model, asked, steps, settings)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)


def test_one_row_of_a_whole_plan_has_the_logits_of_every_step_of_the_sampler():
    """Edits with and without given cells, from rows as made by `diffusion.blocks="plan"`."""
    model = tiny.denoiser(tiny.model_settings(codes_per_token=4))
    requests = [
        tiny.request("image", model.settings, i, words=3 + i, source=True, given=share)
        for i, share in enumerate((0.0, 0.4))
    ]
    settings = traces.settings_of("sparse", "image", model.settings)
    steps, responses = traces.moments(model, requests, traces.plan(requests, settings, 4), settings)
    rows, plan = [], []
    for asked, drawn in zip(requests, responses, strict=True):
        cells = orders.order("stratified", 3, 3, asked.request.seed)
        cells = cells[~asked.given[cells]]
        sizes = orders.counts("shift", 4, len(cells), 3.0)
        plan.append(diffusion.plan_blocks(cells, sizes, asked.given, 1))
        prompt = tiny.sample_input(asked, model.settings)
        rows.append(CorruptedRow(prompt, drawn, "image", plan[-1], model.settings))
    batch = tiny.stacked(rows, model.settings)
    _, logits = traces.forward(model, jax.tree.map(jnp.asarray, batch))
    predicted = np.zeros(responses.shape[:2], int)
    for i, blocks in enumerate(plan):
        assert len(blocks.masked_blocks) == len(steps) == 4
        for number, moment in zip(blocks.masked_blocks, steps, strict=True):
            own = batch.generation.tags.block[i] == number
            slots = np.flatnonzero(own & (batch.image_weight[i] > 0))
            cells = batch.generation.index[i, slots]
            assert sorted(cells) == np.flatnonzero(moment.masked[i]).tolist()
            sampled = moment.logits[i, cells]
            np.testing.assert_allclose(logits[i, slots], sampled, rtol=0, atol=TOLERANCE)
            assert np.abs(sampled).max() > 0.1
            predicted[i, cells] += 1
    np.testing.assert_array_equal(predicted, [~asked.given for asked in requests])


def settings_for(model: config.Model, longest: int) -> config.Config:
    """Returns the settings of a training for texts of up to `longest` tokens."""
    data = config.Data(
        text_block_len=tiny.TEXT_BLOCK_LEN, sampled_answer_len=longest, prompt_drop=0.0, given=0.0
    )
    return config.Config(model=model, data=data)


def shortened(asked: Example, length: int) -> Example:
    """Returns a text request with a shorter response, and nothing after it."""
    start = next(i for i, part in enumerate(asked.parts) if isinstance(part, Response))
    return dataclasses.replace(
        asked,
        parts=(*asked.parts[:start], Response(length)),
        response=asked.response[:length],
        given=asked.given[:length],
        reach=length,
    )


def test_registers_of_a_long_text_stand_where_training_with_short_answers_put_them():
    """Training answers had up to 256 tokens; 1,024 are sampled, with the registers after them."""
    model, block = tiny.denoiser(tiny.model_settings(num_registers=4)), tiny.TEXT_BLOCK_LEN
    asked = shortened(tiny.request("text", model.settings, 0, words=5), tiny.TEXT_LEN)
    settings = traces.settings_of("sparse", "text", model.settings)
    steps, _ = traces.moments(model, [asked], traces.plan([asked], settings, 3), settings)
    length = tiny.sample_inputs([asked], model.settings, settings)[0].length
    short = shortened(asked, block)  # the training response ends in the first text block
    settings_ = settings_for(model.settings, tiny.TEXT_LEN)
    drawn = {
        tiny.registers_from(make_row(short, settings_, np.random.default_rng(i)), model.settings)
        for i in range(40)
    }
    prompt = tiny.sample_input(short, model.settings)
    start = prompt.response_position
    assert sorted(drawn) == [start + block, start + 2 * block, length]
    first = [moment for moment in steps if moment.masked[:, :block].any()]
    assert len(first) == 3
    for moment in first:
        state = dataclasses.replace(
            moment, responses=moment.responses[:, :block], decoded_at=moment.decoded_at[:, :block],
            masked=moment.masked[:, :block],
        )  # fmt: skip
        sampled = moment.logits[0, :block]
        for places, is_same in ((length, True), (prompt.length, False)):
            blocks = traces.blocks_of(state, 0, False, None)
            longer = prompt._replace(length=places)
            row = CorruptedRow(longer, state.responses[0], "text", blocks, model.settings)
            batch = tiny.stacked([row], model.settings)
            (trained,) = traces.spread_logits(model, batch, "text", [start], block)
            error = np.abs(trained - sampled)[state.masked[0]].max()
            assert (error < TOLERANCE) == is_same
