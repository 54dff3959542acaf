# SPDX-License-Identifier: Apache-2.0
"""A style code keeps the sampler exact, and its objective bounds the likelihood of images."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.corrupted_rows import CorruptedRow
from sparse_lavida_jax.inference.engine import Engine
from sparse_lavida_jax.models.style_code import part_of, queries
from sparse_lavida_jax.sampling import calls
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.tags import FIRST_BLOCK
from sparse_lavida_jax.training import step, style
from sparse_lavida_jax.visibility import PAD_BLOCK

TOLERANCE = 2e-5
GROUPS, VALUES = 2, 3
CODES = np.stack(
    [np.eye(VALUES, dtype=np.float32)[list(one)] for one in itertools.product(range(3), repeat=2)]
)


@pytest.fixture(scope="module")
def model():
    return tiny.denoiser(
        tiny.model_settings(codes_per_token=4, style_groups=GROUPS, style_values=VALUES)
    )


def asked(model, count: int, **more):
    """Returns requests for images from prompts of different length."""
    return [tiny.request("image", model.settings, i, words=2 + i, **more) for i in range(count)]


def plan_batch(model, requests, responses, num_steps: int = 4):
    """Returns a training batch of whole plans, and the masked blocks of each row."""
    rows = []
    for one, cells in zip(requests, responses, strict=True):
        order = orders.order("stratified", 3, 3, one.request.seed)
        order = order[~one.given[order]]
        sizes = orders.counts("shift", num_steps, len(order), 3.0)
        blocks = diffusion.plan_blocks(order, sizes, one.given, 1)
        prompt = tiny.sample_input(one, model.settings)
        rows.append(CorruptedRow(prompt, cells, "image", blocks, model.settings))
    batch = tiny.stacked(rows, model.settings)
    return jax.tree.map(jnp.asarray, batch), [row.blocks.masked_blocks for row in rows]


def test_the_sampler_with_a_code_has_the_logits_of_training(model, monkeypatch):
    """One row has a code, one shows a source, and one shows cells: those two have none."""
    requests = [
        *asked(model, 1),
        tiny.request("image", model.settings, 1, words=4, source=True),
        tiny.request("image", model.settings, 2, words=3, given=0.4),
    ]
    codes, draw = [], calls.draw_styles

    def recorded(*given):
        codes.append(draw(*given))
        return codes[-1]

    monkeypatch.setattr(calls, "draw_styles", recorded)
    settings = traces.settings_of("sparse", "image", model.settings, guidance=0.7)
    plan = traces.plan(requests, settings, 4)
    steps, _ = traces.moments(model, requests, plan, settings)
    (code,) = codes
    np.testing.assert_array_equal(code.sum(axis=(1, 2)), [GROUPS, 0, 0])

    def largest_difference(code) -> float:
        def coded(*streams, **how):
            rows = streams[1].index.shape[0] // len(requests)
            return model(*streams, **how, style=jnp.tile(code, (rows, 1, 1)))

        for name in ("see", "text_logits", "image_logits"):
            setattr(coded, name, getattr(model, name))
        coded.settings = model.settings
        monkeypatch.setattr(traces, "forward", traces.training_pass)
        trained = traces.training_logits(coded, requests, steps, settings)
        pairs = zip(steps, trained, strict=True)
        return max(np.abs(moment.logits - logits).max() for moment, logits in pairs)

    assert largest_difference(code) < TOLERANCE
    other = code[:, :, ::-1]
    assert largest_difference(other) > 100 * TOLERANCE
    assert largest_difference(0 * code) > 100 * TOLERANCE


def test_one_pass_over_a_plan_draws_the_same_code_and_the_same_image(model):
    requests = asked(model, 2)
    sampling = config.build(
        config.Sampling, {"num_steps": 3, "temperature": 0.8, "order_seed": -1, "guidance": 0.7}
    )
    rows = [RowRequest(seed=5 + i, temperature=0.8, guidance=0.7) for i in range(2)]
    engine = Engine(model, 2, tiny.TEXT_BLOCK_LEN)
    drawn = engine.sample(requests, rows, sampling).drawn
    assert not np.array_equal(*drawn)
    for _, scores in engine.scores(requests, rows, sampling, drawn, stage="image"):
        assert (scores.margin[scores.decided] > -TOLERANCE).all()
    others = [dataclasses.replace(one, seed=one.seed + 9) for one in rows]
    found = engine.scores(requests, others, sampling, drawn, stage="image")
    assert min(scores.margin[scores.decided].min() for _, scores in found) < -100 * TOLERANCE
    # A code that is given is not drawn.
    images = []
    for code in (2, 0), (1, 1):
        told = [dataclasses.replace(one, style_code=code) for one in rows]
        images.append(engine.sample(requests, told, sampling).drawn)
        for _, scores in engine.scores(requests, told, sampling, images[-1], stage="image"):
            assert (scores.margin[scores.decided] > -TOLERANCE).all()
    assert not np.array_equal(*images)


def test_what_is_cached_does_not_depend_on_the_code(model):
    """Clean tokens and the prompt are the same with any code; masked cells are not."""
    requests = asked(model, 2)
    batch, masked = plan_batch(model, requests, [one.response for one in requests])
    states = [
        model(
            batch.understanding, batch.generation, wanted="both", style=jnp.tile(code, (2, 1, 1))
        )[0]
        for code in (jnp.array(CODES[0]), jnp.array(CODES[-1]))
    ]
    block = np.asarray(batch.generation.tags.block)
    is_masked = block >= min(masked[0])
    is_clean = (block >= FIRST_BLOCK) & ~is_masked & (block < 100)
    assert is_clean.any()
    first, second = (np.asarray(one["generation"]) for one in states)
    np.testing.assert_array_equal(first[is_clean], second[is_clean])
    assert np.abs(first - second)[is_masked].max() > 0.1
    np.testing.assert_array_equal(*(np.asarray(one["understanding"]) for one in states))


def test_the_objective_bounds_the_likelihood_and_its_cost_is_a_divergence(model):
    """All codes are enumerated: E_q[-log p(x | z)] + KL(q || p) >= -log sum p(z) p(x | z)."""
    (one,) = requests = asked(model, 1)
    batch, _ = plan_batch(model, requests, [one.response])
    start = style.first_register(batch.generation, model.settings)
    cells = style.predicted_cells(batch, model.settings.num_cells)
    order = np.argsort(np.asarray(cells.index[0]))
    np.testing.assert_array_equal(cells.tokens[0][order], one.response)
    asking = style.asked(batch, model.settings)
    of_prior, of_posterior = model.style_states(batch.understanding, asking)
    alone, nothing = model.style_states(batch.understanding, queries(model.settings, start))
    np.testing.assert_allclose(alone, of_prior, rtol=0, atol=TOLERANCE)
    assert not nothing.size

    every = jnp.array(CODES)
    spread = jnp.repeat(of_prior, len(every), axis=0)
    prior = jax.nn.log_softmax(model.style_code.prior_logits(spread, every))
    prior = (prior * every).sum(axis=(1, 2))
    np.testing.assert_allclose(jnp.exp(prior).sum(), 1, rtol=1e-5)
    posterior = jax.nn.log_softmax(model.style_code.posterior_logits(of_prior, of_posterior))
    posterior = (posterior * every).sum(axis=(1, 2))

    def nats(code) -> float:
        """Returns -log p(x | z) of the whole image."""
        hidden, _ = model(batch.understanding, batch.generation, wanted="generation", style=code)
        logits = jax.nn.log_softmax(model.image_logits(hidden["generation"]))
        own = jnp.take_along_axis(logits, batch.image_target[..., None], axis=-1)[..., 0]
        return -(own * (batch.image_weight > 0)[..., None]).sum()

    given = jnp.array([nats(code[None]) for code in every])
    exact = -jax.nn.logsumexp(prior - given)
    bound = (jnp.exp(posterior) * (given + posterior - prior)).sum()
    assert bound >= exact > 0

    # `coded` draws from the posterior, and its cost is KL(q || p) on average over the draws.
    count = 4000
    noise = jax.random.gumbel(jax.random.key(0), (count, GROUPS, VALUES))
    rows = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), 2, axis=0), batch)

    @jax.jit
    def drawn(noise):
        draws = style.StyleDraws(jnp.repeat(noise[None], 2, 0), jnp.array([True, False]))
        return style.coded(model, rows, None, draws)[:2]

    codes, costs = jax.lax.map(drawn, noise, batch_size=200)
    np.testing.assert_array_equal(codes[:, 1], 0)
    np.testing.assert_array_equal(costs[:, 1], 0)
    shares = jnp.einsum("tnc,znc->zt", codes[:, 0], every) > GROUPS - 0.5
    np.testing.assert_allclose(shares.mean(axis=1), jnp.exp(posterior), atol=0.03)
    divergence = (jnp.exp(posterior) * (posterior - prior)).sum()
    np.testing.assert_allclose(costs[:, 0].mean(), divergence, rtol=0.05)


def test_every_parameter_of_a_code_gets_a_gradient_whatever_the_microbatches(model):
    requests = [*asked(model, 3), tiny.request("image", model.settings, 3, words=3, source=True)]
    batch, _ = plan_batch(model, requests, [one.response for one in requests])
    draws = style.StyleDraws(
        jax.random.gumbel(jax.random.key(1), (4, GROUPS, VALUES)),
        jnp.array([True, True, False, True]),
    )
    found = []
    for parts in (1, 4):
        value, logged, gradient = step.gradient(
            model, batch, microbatches=parts, draws=draws, style_weight=0.5
        )
        assert logged["style_nll"] > 0
        found.append((value, jax.tree.leaves(gradient.style_code)))
    assert all(np.abs(leaf).max() > 0 for leaf in found[0][1])
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_posterior_knows_nothing_but_what_it_sees_of_the_image(model):
    requests = asked(model, 1) * 2
    first = requests[0].response
    batch, _ = plan_batch(model, requests, [first, first[::-1]])
    asking = style.asked(batch, model.settings)

    def logits(stream):
        states = model.style_states(batch.understanding, stream)
        return np.asarray(model.style_code.posterior_logits(*states))  # [b n c]

    one, other = logits(asking)
    assert np.abs(one - other).max() > 0.5  # before any training
    assert np.abs(one[0] - one[1]).max() > 0.5  # groups do not say the same
    start = style.first_register(batch.generation, model.settings)
    cells = style.predicted_cells(batch, model.settings.num_cells)
    hidden = dataclasses.replace(
        cells, tags=dataclasses.replace(cells.tags, block=jnp.full_like(cells.index, PAD_BLOCK))
    )
    assert np.abs(logits(queries(model.settings, start, hidden))).max() < 0.1


def test_a_group_says_what_its_part_of_the_image_is(model):
    cells = np.arange(9)
    parts = np.asarray(part_of(model.settings, cells))
    np.testing.assert_array_equal(parts, [0, 0, 1] * 3)
    requests = asked(model, 1) * 2
    first = requests[0].response
    second = np.where((parts == 1)[:, None], first[::-1], first)
    assert not np.array_equal(first, second)
    batch, _ = plan_batch(model, requests, [first, second])
    states = model.style_states(batch.understanding, style.asked(batch, model.settings))
    one, other = np.asarray(model.style_code.posterior_logits(*states))
    np.testing.assert_array_equal(one[0], other[0])
    assert np.abs(one[1] - other[1]).max() > 0.5
    six = dataclasses.replace(model.settings, style_groups=6, grid_size=4)
    found = np.asarray(part_of(six, np.arange(16))).reshape(4, 4)
    np.testing.assert_array_equal(found, [[0, 0, 1, 2]] * 2 + [[3, 3, 4, 5]] * 2)


def test_registers_carry_the_whole_code_and_masked_cells_that_of_their_part(model):
    requests = asked(model, 1)
    batch, masked = plan_batch(model, requests, [requests[0].response])
    codes = [jnp.array([np.eye(VALUES)[[first, second]]]) for first, second in [(0, 0), (0, 1)]]
    stream = batch.generation
    one, other = (
        np.asarray(model.style_code.carried(model.settings, code, stream))[0] for code in codes
    )
    differs = (one != other).any(axis=-1)
    block, index = np.asarray(stream.tags.block)[0], np.asarray(stream.index)[0]
    is_masked = (block >= min(masked[0])) & (block < 100)
    in_second = np.asarray(part_of(model.settings, index)) == 1
    np.testing.assert_array_equal(differs, is_masked & ((index < 0) | in_second))
    np.testing.assert_array_equal(model.style_code.carried(model.settings, 0 * codes[0], stream), 0)
