# SPDX-License-Identifier: Apache-2.0
"""Drawing tile by tile gives the same tokens as drawing from all logits."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import sample
from sparse_lavida_jax.models import fuse, text_head
from sparse_lavida_jax.sampling import commit, draw, plans
from sparse_lavida_jax.sampling import state as state_of

VOCABULARY, TILE, WIDTH = 53, 16, 8
SETTINGS = tiny.model_settings(vocab_size=VOCABULARY)


@pytest.mark.parametrize("cut", [False, True])
def test_draw_and_confidences_are_those_of_all_logits(cut):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 3, 5, WIDTH)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(WIDTH, VOCABULARY)), jnp.float32)
    noise = jnp.asarray(rng.gumbel(size=(3, 5, VOCABULARY)), jnp.float32)
    banned = jnp.arange(VOCABULARY) == 20

    def combined(logits):  # guidance
        return 3 * logits[1] - 2 * logits[0]

    def logits_of(hidden, columns, start):
        logits = combined(hidden @ columns)
        own = jax.lax.dynamic_slice_in_dim(banned, start, columns.shape[-1])
        return jnp.where(own[None, None], -jnp.inf, logits)

    def score_of(logits, number):
        own = jax.lax.dynamic_slice_in_dim(noise, number * TILE, logits.shape[-1], axis=2)
        return logits / 0.7 + own

    given = [kernel[:, i : i + TILE] for i in range(0, VOCABULARY, TILE)] if cut else kernel
    draw_by_tiles = functools.partial(
        text_head.draw, logits_of=logits_of, score_of=score_of, tile=TILE
    )
    drawn = tiny.quick_jit(draw_by_tiles)(hidden, given)
    logits = jnp.where(banned[None, None], -jnp.inf, combined(hidden @ kernel))
    expected = jnp.argmax(logits / 0.7 + noise, axis=-1)
    np.testing.assert_array_equal(drawn.token, expected)
    assert len(np.unique(expected // TILE)) == 4
    for name in ("probability", "margin", "entropy"):
        plain = commit.confidence(name, logits[:, :, None], expected[:, :, None])[..., 0]
        np.testing.assert_allclose(drawn.confidence(name), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["probability", "margin", "entropy"])
def test_confidences_by_tiles_do_not_saturate(name):
    """For probabilities that are 1 in float32; the largest logit is in various tiles."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, 8, VOCABULARY)).astype(np.float32)
    logits[0, np.arange(8), np.arange(8) * 5] += np.linspace(15, 30, 8)
    kernel = jnp.asarray(logits[0].T)  # a hidden state per word: its row of logits
    drawn = text_head.draw(
        jnp.eye(8)[None, None],
        kernel.T,
        logits_of=lambda hidden, columns, start: (hidden @ columns)[0],
        score_of=lambda logits, number: logits,
        tile=TILE,
    )
    plain = commit.confidence(name, jnp.asarray(logits)[:, :, None], drawn.token[:, :, None])
    np.testing.assert_allclose(drawn.confidence(name), plain[..., 0], rtol=1e-4)
    assert (np.diff(np.asarray(plain).ravel()) > 0).all()


def test_of_equal_scores_the_first_is_drawn():
    same = text_head.draw(
        jnp.ones((1, 1, 1, 2)),
        jnp.ones((2, 40)),
        logits_of=lambda hidden, columns, start: (hidden @ columns)[0],
        score_of=lambda logits, number: logits,
        tile=TILE,
    )
    assert int(same.token[0, 0]) == 0
    np.testing.assert_allclose(same.confidence("probability"), -np.log(39), rtol=1e-6)


def test_a_text_is_that_of_the_plain_path_for_the_same_noise():
    model = tiny.denoiser(SETTINGS)
    plain = traces.settings_of("sparse", "text", SETTINGS)
    assert plain.head_tile == 0
    by_tiles = dataclasses.replace(plain, head_tile=TILE)
    # With an end that may not be drawn before given tokens.
    asked = [tiny.request("text", SETTINGS, seed, words=3, given=seed / 3) for seed in (0, 1)]
    plan = traces.plan(asked, plain, num_steps=3, block_len=tiny.TEXT_LEN)
    ours = traces.finished(model, asked, plan, by_tiles, stop_early=False)
    expected = traces.finished(
        model, asked, plan, plain, stop_early=False,
        draws=tiny.Recorded(gumbel=tile_noise(asked, plan, plain)),
    )  # fmt: skip
    np.testing.assert_array_equal(ours, expected)
    assert len(np.unique(ours // TILE)) > 2


def tile_noise(asked, plan, settings):
    """Returns the noise of every step, position and word that drawing by tiles uses."""
    key = state_of.rows_of(tiny.sample_inputs(asked, SETTINGS, settings), settings).key
    everywhere = jnp.repeat(jnp.arange(tiny.TEXT_LEN)[None], len(asked), axis=0)
    one, nothing = jnp.float32(1), everywhere[:, :0]
    steps = []
    for block in np.concatenate([phase.block for phase in plan]):
        now = plans.Steps(
            jnp.int32(block), nothing, everywhere, everywhere[..., None] >= 0, nothing,
            everywhere[:, 0], one, one, one,
        )  # fmt: skip
        tiles = [draw.noise(key, now, (TILE,), i) for i in range(-(-VOCABULARY // TILE))]
        steps.append(jnp.concatenate(tiles, axis=-1)[:, :, None, :VOCABULARY])
    return np.stack(steps)


def test_logits_over_the_vocabulary_never_exist():
    settings = traces.settings_of("sparse", "text", SETTINGS)
    asked = [tiny.request("text", SETTINGS, 0, words=3)]
    plan = traces.plan(asked, settings, num_steps=2)
    assert made_over_the_vocabulary(asked, plan, settings)
    by_tiles = dataclasses.replace(settings, head_tile=TILE)
    assert not made_over_the_vocabulary(asked, plan, by_tiles)


def made_over_the_vocabulary(asked, plan, settings):
    """Returns shapes of arrays over all words that a phase makes, without the head itself."""
    seen, run_phase = [], sample.run_phase

    def program(*arrays, settings):
        seen.append(str(run_phase.trace(*arrays, settings=settings).jaxpr))
        return arrays[1]

    with traces._patched(run_phase=program):
        inputs = tiny.sample_inputs(asked, SETTINGS, settings)
        sample.sample(tiny.denoiser(SETTINGS), inputs, plan[:1], settings=settings)
    kernel = f"{SETTINGS.width},{VOCABULARY}"
    return {s for s in re.findall(rf"\[([\d,]*,{VOCABULARY})\]", seen[0]) if s != kernel}


def test_only_a_large_vocabulary_is_cut():
    assert text_head.tile_of(SETTINGS.vocab_size) == 0
    large = dataclasses.replace(SETTINGS, vocab_size=127_378)
    assert traces.settings_of("sparse", "text", large).head_tile == text_head.TILE
    assert traces.settings_of("sparse", "image", large).head_tile == 0


def test_a_head_of_tiles_is_the_head():
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, VOCABULARY)), jnp.float32)
    head = fuse.TiledHead(kernel, TILE)
    assert [tile.kernel.shape[-1] for tile in head.tiles] == [16, 16, 16, 5]
    x = jnp.ones((2, 3, WIDTH))
    np.testing.assert_allclose(head(x), x @ kernel, rtol=1e-5, atol=1e-5)
