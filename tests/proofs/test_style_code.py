# SPDX-License-Identifier: Apache-2.0
"""A style code keeps the sampler exact, and its objective bounds the likelihood of images."""

import dataclasses
import functools
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
from sparse_lavida_jax.models import parameters, sharding
from sparse_lavida_jax.models.style_code import part_of, queries, seen
from sparse_lavida_jax.sampling import calls
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.tags import FIRST_BLOCK
from sparse_lavida_jax.training import step, style
from sparse_lavida_jax.visibility import PAD_BLOCK

TOLERANCE = 2e-5
PARTS, VALUES = 2, 3
CODES = np.stack(
    [np.eye(VALUES, dtype=np.float32)[list(one)] for one in itertools.product(range(3), repeat=2)]
)


@pytest.fixture(scope="module")
def model():
    return tiny.denoiser(
        tiny.model_settings(
            codes_per_token=4, style_parts=PARTS, style_groups=1, style_values=VALUES
        )
    )


@pytest.fixture(scope="module")
def grouped():
    """A model with three groups of values for each of its parts."""
    return tiny.denoiser(
        tiny.model_settings(codes_per_token=4, style_parts=2, style_groups=3, style_values=2)
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
    np.testing.assert_array_equal(code.sum(axis=(1, 2)), [PARTS, 0, 0])

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

    @jax.jit
    def nats(code):
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
    noise = jax.random.gumbel(jax.random.key(0), (count, PARTS, VALUES))
    rows = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), 2, axis=0), batch)

    @jax.jit
    def drawn(noise):
        draws = style.StyleDraws(jnp.repeat(noise[None], 2, 0), jnp.array([True, False]))
        return style.coded(model, rows, None, draws)[:2]

    codes, costs = jax.lax.map(drawn, noise, batch_size=200)
    np.testing.assert_array_equal(codes[:, 1], 0)
    np.testing.assert_array_equal(costs[:, 1], 0)
    shares = jnp.einsum("tnc,znc->zt", codes[:, 0], every) > PARTS - 0.5
    np.testing.assert_allclose(shares.mean(axis=1), jnp.exp(posterior), atol=0.03)
    divergence = (jnp.exp(posterior) * (posterior - prior)).sum()
    np.testing.assert_allclose(costs[:, 0].mean(), divergence, rtol=0.05)


def test_every_parameter_of_a_code_gets_a_gradient_whatever_the_microbatches(model):
    requests = [*asked(model, 3), tiny.request("image", model.settings, 3, words=3, source=True)]
    batch, _ = plan_batch(model, requests, [one.response for one in requests])
    draws = style.StyleDraws(
        jax.random.gumbel(jax.random.key(1), (4, PARTS, VALUES)),
        jnp.array([True, True, False, True]),
    )
    found = []
    for parts in (1, 4):
        gradient_of = jax.jit(functools.partial(step.gradient, microbatches=parts))
        value, logged, gradient = gradient_of(
            model, batch, draws=draws, warmth=style.Warmth(1.0, 0.5)
        )
        assert logged["style_nll"] > 0
        found.append((value, parameters.by_name(gradient.style_code)))
    moves = {name: np.abs(leaf).max() > 0 for name, leaf in found[0][1].items()}
    assert {name for name, does in moves.items() if not does} == {"seen_mean", "seen_whitening"}
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
    one, other = logits(queries(model.settings, start, hidden))
    assert np.abs(one - other).max() < 0.1


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
    six = dataclasses.replace(model.settings, style_parts=6, grid_size=4)
    found = np.asarray(part_of(six, np.arange(16))).reshape(4, 4)
    np.testing.assert_array_equal(found, [[0, 0, 1, 2]] * 2 + [[3, 3, 4, 5]] * 2)


@pytest.mark.parametrize("group", range(6))
def test_registers_carry_the_whole_code_and_masked_cells_that_of_their_part(grouped, group):
    """A group of three, of the first part or of the second, has another value."""
    requests = asked(grouped, 1)
    batch, masked = plan_batch(grouped, requests, [requests[0].response])
    stream, values = batch.generation, np.array([0, 1, 1, 0, 1, 0])
    code = np.eye(2)[values]
    other = np.eye(2)[np.where(np.arange(6) == group, 1 - values, values)]
    added = [
        np.asarray(grouped.style_code.carried(grouped.settings, jnp.array(each[None]), stream))[0]
        for each in (code, other)
    ]
    differs = (added[0] != added[1]).any(axis=-1)
    block, index = np.asarray(stream.tags.block)[0], np.asarray(stream.index)[0]
    is_masked = (block >= min(masked[0])) & (block < 100)
    is_in_part = np.asarray(part_of(grouped.settings, index)) == group // 3
    np.testing.assert_array_equal(differs, is_masked & ((index < 0) | is_in_part))
    nothing = grouped.style_code.carried(grouped.settings, jnp.zeros((1, 6, 2)), stream)
    np.testing.assert_array_equal(nothing, 0)


def test_a_code_is_drawn_group_by_group(grouped):
    """Each group's value is the likeliest given those before it, with its own noise."""
    code, rows = grouped.style_code, 40
    hidden = jax.random.normal(jax.random.key(0), (rows, 2, grouped.settings.generation_width))
    keys, free = jax.random.split(jax.random.key(1), rows), np.full((rows, 1), -1)
    drawn = np.asarray(code.drawn(hidden, keys, free))
    noise = np.stack([jax.random.gumbel(key, (6, 2)) for key in keys])
    scores = np.asarray(code.prior_logits(hidden, jnp.array(drawn))) + noise
    np.testing.assert_array_equal(drawn, np.eye(2)[scores.argmax(axis=-1)])
    assert 0.3 < drawn.mean(axis=(0, 1))[0] < 0.7
    fixed = np.array([[1, -1, 0, -1, -1, 1]] * rows)
    values = np.asarray(code.drawn(hidden, keys, fixed)).argmax(axis=-1)
    np.testing.assert_array_equal(values[:, [0, 2, 5]], [[1, 0, 1]] * rows)
    assert 0 < values[:, 1].mean() < 1


def test_what_queries_see_is_whitened_by_what_was_measured(grouped, monkeypatch):
    monkeypatch.setattr(style, "MEASURED", 12)
    made = [
        plan_batch(grouped, requests, [np.roll(one.response, shift, 0) for one in requests])[0]
        for shift, requests in enumerate([asked(grouped, 4)] * 9)
    ]
    batches = iter(made)
    found = style.measured(grouped, batches)
    assert len([*batches]) == 6  # three were enough
    rows = []
    for batch in made[:3]:
        states = grouped.style_states(batch.understanding, style.asked(batch, grouped.settings))
        rows.append(np.asarray(seen(*states)).reshape(-1, grouped.settings.generation_width))
    rows = np.concatenate(rows).astype(float)
    mean, whitening = found["style_code/seen_mean"], found["style_code/seen_whitening"]
    np.testing.assert_allclose(mean, rows.mean(axis=0), atol=1e-5)
    sizes = np.linalg.eigvalsh(np.cov(rows.T, bias=True))
    white = np.linalg.eigvalsh(np.cov((rows @ whitening).T, bias=True))
    np.testing.assert_allclose(white.mean(), 1, rtol=1e-3)
    assert sizes[-1] / sizes.mean() > 2 * white[-1]  # no direction has most of the variance
    # Likewise over a mesh.
    mesh = sharding.automatic({"fsdp": 2, "tensor": -1})
    spread = sharding.place_state(jax.tree.map(jnp.copy, grouped), mesh)
    with jax.set_mesh(mesh):
        same = style.measured(spread, (sharding.place_batch(batch, mesh) for batch in made))
    np.testing.assert_allclose(same["style_code/seen_mean"], mean, atol=1e-5)
    np.testing.assert_allclose(same["style_code/seen_whitening"], whitening, atol=1e-3)
    # Rows that show an image have no code: they are not counted.
    shown = [tiny.request("image", grouped.settings, 0, words=4, source=True)]
    with pytest.raises(config.ConfigError, match="draw no image that it could be measured on"):
        style.measured(grouped, [plan_batch(grouped, shown, [shown[0].response])[0]])


def test_draws_harden_before_codes_have_their_full_cost(model):
    found = [
        style.warmth(config.Optimizer(style_warmup_steps=100), jnp.int32(step))
        for step in (0, 39, 66, 89, 99, 500)
    ]
    np.testing.assert_allclose([one.hardness for one in found], [0, 0, 0.54, 1, 1, 1], atol=1e-6)
    np.testing.assert_allclose([one.weight for one in found], [0, 0, 0.01, 0.7, 1, 1], atol=1e-5)
    assert style.warmth(config.Optimizer(), jnp.int32(0)) == style.WARM
    requests = asked(model, 2)
    batch, _ = plan_batch(model, requests, [one.response for one in requests])
    noise = jax.random.gumbel(jax.random.key(1), (2, PARTS, VALUES))
    draws = style.StyleDraws(noise, jnp.array([True, True]))
    soft, hard = (style.coded(model, batch, None, draws, hardness).code for hardness in (0.0, 1.0))
    np.testing.assert_allclose(soft.sum(axis=-1), 1, rtol=1e-6)
    assert (soft.max(axis=-1) < 0.999).all()
    np.testing.assert_allclose(np.sort(hard, axis=-1)[..., -1], 1, rtol=1e-6)
