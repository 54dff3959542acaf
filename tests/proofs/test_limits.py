# SPDX-License-Identifier: Apache-2.0
"""Limiting cases of the method: full attention, one step, every ablation switch."""

import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
import traces

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.batch import RowShape
from sparse_lavida_jax.data.corrupted_rows import Corrupted, CorruptedRow
from sparse_lavida_jax.models import stack
from sparse_lavida_jax.tags import without_blocks

TOLERANCE = 2e-5


# ---------------------------------------------------------------------------------------------
# Every token in block 0.


def full_attention_batch(model) -> Corrupted:
    """Two rows of prompt, source cells and image with scattered masks, without padding."""
    settings = model.settings
    rng = np.random.default_rng(7)
    rows = []
    for seed in range(2):
        asked = tiny.request("image", settings, seed, words=4, source=True)
        blocks = diffusion.uniform_blocks(rng, asked.given, config.Diffusion(attention="full"))
        prompt = tiny.sample_input(asked, settings)
        rows.append(
            CorruptedRow(prompt, asked.response, "image", blocks, settings, full_attention=True)
        )
    return tiny.stacked(rows, settings, full_attention=True)


def attention_without_rule(q, k, v, *tags, num_heads, layer):
    """Softmax attention of all tokens to all tokens."""
    assert layer is None
    q, k, v = (x.reshape(*x.shape[:2], num_heads, -1) for x in (q, k, v))
    logits = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    out = jnp.einsum("bhst,bthd->bshd", weights / weights.sum(axis=-1, keepdims=True), v)
    return out.reshape(*out.shape[:2], -1)


def test_block_zero_everywhere_is_attention_without_a_mask_bit_for_bit():
    model = tiny.denoiser(tiny.model_settings())
    batch = jax.tree.map(jnp.asarray, full_attention_batch(model))
    assert not np.asarray(batch.generation.tags.block).any()
    assert not np.asarray(batch.generation.tags.horizon).any()
    _, ours = traces.forward(model, batch)
    with unittest.mock.patch.object(stack, "step_causal_attention", attention_without_rule):
        _, plain = tiny.quick_jit(traces.training_pass)(model, batch)
    np.testing.assert_array_equal(ours, plain)
    assert np.abs(ours).max() > 0.1


def test_without_blocks_turns_any_training_pass_into_full_attention():
    """With block 0 in place of step-causal tags, every token attends to all but padding."""
    model = tiny.denoiser(tiny.model_settings(codes_per_token=4))
    settings = model.settings
    rng = np.random.default_rng(1)
    asked = tiny.request("image", settings, 0, words=4, source=True)
    blocks = diffusion.uniform_blocks(rng, asked.given, config.Diffusion())
    row = CorruptedRow(
        tiny.sample_input(asked, settings), asked.response, "image", blocks, settings
    )
    text_len, image_len = len(row.understanding.block), len(row.generation.block)
    batch = tiny.stacked([row], settings, RowShape(text_len + 3, image_len + 3))
    streams = {
        name: (stream := getattr(batch, name)).replace(tags=without_blocks(stream.tags))
        for name in ("understanding", "generation")
    }
    _, ours = traces.forward(model, jax.tree.map(jnp.asarray, batch.replace(**streams)))
    text, image = streams["understanding"], streams["generation"]
    is_image = np.arange(text_len + image_len) >= text_len
    codes = np.zeros((len(is_image), 4), int)
    codes[is_image] = image.tokens[0, :image_len]
    codes[codes == settings.image_register_id] = -1
    _, plain = oracles.plain_forward(
        model,
        np.concatenate([text.tokens[0, :text_len], np.zeros(image_len, int)]),
        codes,
        np.concatenate([np.full(text_len, -1), image.index[0, :image_len]]),
        is_image,
        np.concatenate([text.tags.position[0, :text_len], image.tags.position[0, :image_len]]),
        np.ones((len(is_image), len(is_image)), bool),
    )
    np.testing.assert_allclose(ours[0, :image_len], plain[is_image], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_dense_sampler_is_the_training_pass_with_full_attention(modality):
    model = tiny.denoiser(tiny.model_settings(trained_attention="full"))
    requests = [
        tiny.request(modality, model.settings, i, words=n, given=share)
        for i, (n, share) in enumerate(((3, 0.0), (6, 0.4)))
    ]
    guidance = 0.5 if modality == "image" else 0.0
    settings = traces.settings_of("", modality, model.settings, guidance=guidance)
    assert settings.preset.full_attention
    assert settings.num_registers == 0
    steps, _ = traces.moments(model, requests, traces.plan(requests, settings, 3), settings)
    trained = traces.training_logits(model, requests, steps, settings, with_rest=True)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------------------------------
# One step.


@pytest.mark.parametrize("modality", ["image", "text"])
def test_one_step_is_the_training_pass_with_one_masked_block(modality):
    """Compares the plan's only step with the blocks that training makes from that plan."""
    model = tiny.denoiser(tiny.model_settings())
    requests = [tiny.request(modality, model.settings, i, words=n) for i, n in enumerate((3, 7))]
    settings = traces.settings_of("sparse", modality, model.settings)
    phases = traces.plan(requests, settings, num_steps=1, block_len=tiny.TEXT_LEN)
    (moment,), _ = traces.moments(model, requests, phases, settings)
    assert moment.masked.all()
    rows, starts = [], []
    for asked in requests:
        cut = whole_response(asked, modality, model.settings)
        prompt = tiny.sample_input(asked, model.settings)
        rows.append(CorruptedRow(prompt, asked.response, modality, cut, model.settings))
        starts.append(prompt.response_position)
    batch = tiny.stacked(rows, model.settings)
    logits = traces.spread_logits(model, batch, modality, starts, len(requests[0].given))
    np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)
    assert np.abs(logits).max() > 0.1


def whole_response(asked, modality, settings: config.Model) -> diffusion.Blocks:
    """Returns the blocks that training makes from a plan of one step: one masked block."""
    rng, one_block = np.random.default_rng(0), config.Diffusion(num_masked_blocks=1)
    if modality == "text":
        length = tiny.TEXT_LEN
        return diffusion.semi_autoregressive_blocks(rng, length, length, 1, asked.given, one_block)
    order = orders.order("stratified", 3, 3, asked.request.seed)
    sizes = np.array([tiny.IMAGE_LEN])
    return diffusion.schedule_blocks(
        rng, order, sizes, asked.given, one_block, settings.num_registers
    )


# ---------------------------------------------------------------------------------------------
# The switches of the ablation.


@functools.cache
def ablation(modality: str, preset: str):
    """The steps and the sample of one preset; the same requests and seeds for all."""
    model = tiny.denoiser(tiny.model_settings())
    requests = [
        tiny.request(
            modality,
            model.settings,
            i,
            words=n,
            vision=True,
            source=modality == "image",
            given=share,
        )
        for i, (n, share) in enumerate(((3, 0.3), (5, 0.0)))
    ]
    settings = traces.settings_of(preset, modality, model.settings)
    plan = traces.plan(requests, settings, num_steps=3, block_len=tiny.TEXT_LEN // 2)
    return model, requests, settings, *traces.moments(model, requests, plan, settings)


@pytest.mark.parametrize(
    ("modality", "plain", "cached"),
    [
        ("image", "none", ("p", "r", "pr")),
        ("image", "t", ("pt", "rt", "sparse")),
        ("text", "none", ("p", "r", "pr")),
        ("text", "t", ("pt", "rt", "sparse")),
    ],
)
def test_caching_changes_neither_logits_nor_samples(modality, plain, cached):
    *_, steps, responses = ablation(modality, plain)
    for preset in cached:
        *_, cached_steps, cached_responses = ablation(modality, preset)
        np.testing.assert_array_equal(cached_responses, responses)
        for moment, expected in zip(cached_steps, steps, strict=True):
            np.testing.assert_array_equal(moment.masked, expected.masked)
            np.testing.assert_allclose(
                moment.logits, expected.logits, rtol=0, atol=TOLERANCE, err_msg=preset
            )


@pytest.mark.parametrize("modality", ["image", "text"])
def test_without_truncation_the_other_masks_stand_in_the_block_of_the_step(modality):
    model, requests, settings, steps, _ = ablation(modality, "none")
    trained = traces.training_logits(model, requests, steps, settings, with_rest=True)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)
    *_, truncated, _ = ablation(modality, "t")
    # In the first step nothing is decoded yet, so only the other masks differ.
    assert np.abs(steps[0].logits - truncated[0].logits).max() > 1e-2


# ---------------------------------------------------------------------------------------------
# Several steps in a row.


@pytest.mark.parametrize("given", [0.0, 0.3])
def test_steps_of_a_text_that_share_a_row_are_what_each_is_alone(given):
    asked = tiny.request("text", tiny.model_settings(), 5, words=4, given=given)
    together = diffusion.semi_autoregressive_blocks(
        np.random.default_rng(0),
        tiny.TEXT_LEN,
        tiny.TEXT_BLOCK_LEN,
        3,
        asked.given,
        config.Diffusion(text_masked_blocks=6),
    )
    assert len(together.masked_blocks) > 3
    assert len(together.copies) > tiny.TEXT_BLOCK_LEN
    assert_each_step_is_what_it_is_alone(asked, together)


@pytest.mark.parametrize(("given", "merge"), [(0.0, 1), (0.0, 2), (0.3, 1)])
def test_steps_of_a_plan_that_share_a_row_are_what_each_is_alone(given, merge):
    asked = tiny.request("image", tiny.model_settings(), 5, words=4, source=True, given=given)
    cells = orders.order("stratified", 3, 3, 1)
    cells = cells[~asked.given[cells]]
    sizes = orders.counts("shift", 5, len(cells), 3.0)
    together = diffusion.plan_blocks(cells, sizes, asked.given, merge)
    assert len(together.masked_blocks) == (5 if merge == 1 else 3)
    assert_each_step_is_what_it_is_alone(asked, together)


def assert_each_step_is_what_it_is_alone(asked, together: diffusion.Blocks):
    """Tokens that are clean for one step and masked for another do not interact."""
    model, modality = tiny.denoiser(tiny.model_settings()), asked.modality
    rows = [together, *(alone(together, number) for number in together.masked_blocks)]
    prompt = tiny.sample_input(asked, model.settings)
    inputs = [CorruptedRow(prompt, asked.response, modality, one, model.settings) for one in rows]
    batch = tiny.stacked(inputs, model.settings)
    is_text = modality == "text"
    logits = traces.forward(model, jax.tree.map(jnp.asarray, batch))[0 if is_text else 1]
    layouts = (batch.understanding if is_text else batch.generation).tags
    target = batch.text_target if is_text else batch.image_target
    for row, number in enumerate(together.masked_blocks, 1):
        ours = np.flatnonzero(layouts.block[0] == number)
        apart = np.flatnonzero(layouts.block[row] == rows[row].masked_blocks[0])
        # Both in the order of the response and the registers.
        ours, apart = (
            at[np.argsort(layouts.position[i, at])] for i, at in ((0, ours), (row, apart))
        )
        np.testing.assert_array_equal(target[0, ours], target[row, apart])
        np.testing.assert_allclose(logits[0, ours], logits[row, apart], rtol=0, atol=TOLERANCE)
    assert np.abs(logits).max() > 0.1


def alone(together: diffusion.Blocks, number: int) -> diffusion.Blocks:
    """Returns one masked block and what it sees, without the rest."""
    token, last = together.token, together.horizons[number]
    length = len(together.block) - len(together.copies)
    block = np.full(length, diffusion.ABSENT, np.int32)
    clean = ~together.masked & (together.block != diffusion.ABSENT) & (together.block <= last)
    block[token[clean]] = together.block[clean]
    masked = np.isin(np.arange(length), token[together.block == number])
    block[masked] = last + 1
    return diffusion.Blocks(block, masked, last, (last + 1,), masked.astype(float), 1.0)
