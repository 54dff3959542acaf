# SPDX-License-Identifier: Apache-2.0
"""The loss equals its definition, by enumeration: six tokens, a table in place of the model.

The table gives every (token, known tokens, predicted tokens) its own negative log likelihood, so
two losses that agree on it agree on every model. Random numbers are replaced by all their cases.
"""

import collections
import itertools
import math

import numpy as np
import pytest

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.sampling import plans

LENGTH = 6
NONE_GIVEN = np.zeros(LENGTH, bool)
TOLERANCE = 1e-6


class Scripted(np.random.Generator):
    """A generator with predetermined draws."""

    def __init__(self, uniforms=(), permutations=()):
        super().__init__(np.random.PCG64(0))
        self._uniforms, self._permutations = iter(uniforms), iter(permutations)

    def random(self, size=None):
        value = next(self._uniforms)
        if size is None or np.size(value) > 1:
            assert np.size(value) == (size or 1)
            return value
        return np.full(size, value)

    def permutation(self, values):
        return np.asarray(values)[list(next(self._permutations))]


def likelihood_table():
    """Returns a table [key] with an arbitrary number for every key."""
    rng = np.random.default_rng(0)
    return collections.defaultdict(lambda: rng.random())


def training_loss(table, blocks: diffusion.Blocks, key) -> float:
    """Returns the loss of one training pass: weights, table, division by `total`."""
    token, loss = blocks.token, 0.0
    for number in blocks.masked_blocks:
        last = blocks.horizons.get(number, blocks.num_clean)
        known = {
            int(token[j]): int(blocks.block[j])
            for j in np.flatnonzero(~blocks.masked)
            if diffusion.ABSENT != blocks.block[j] <= last
        }
        asked = np.flatnonzero(blocks.block == number)
        for i in asked:
            seen = key(int(token[i]), known, frozenset(token[asked].tolist()))
            loss += blocks.weight[i] * table[seen]
    assert set(blocks.block[blocks.masked]) == set(blocks.masked_blocks)
    assert not blocks.weight[~blocks.masked].any()
    return loss / blocks.total


def with_history(i, known, asked):
    """All that a step-causal model sees: known tokens with their steps, and predicted tokens."""
    steps = sorted(set(known.values()))
    return i, frozenset((j, steps.index(at)) for j, at in known.items()), asked


def with_known(i, known, asked):
    """All that Eq. 1 conditions on: the known tokens."""
    del asked
    return i, frozenset(known)


def each_token_once(length: int) -> np.ndarray:
    """Returns a uniform number for each interval of `length`."""
    return (np.arange(length) + 0.5) / length


# ---------------------------------------------------------------------------------------------
# `schedule`: images.

PLANS = [
    ("shift", 3, NONE_GIVEN),
    ("linear", 2, NONE_GIVEN),
    ("cosine", 6, NONE_GIVEN),
    ("shift", 1, NONE_GIVEN),
    ("shift", 3, np.array([False, True, False, False, True, False])),
]


@pytest.mark.parametrize(("schedule", "num_steps", "given"), PLANS)
def test_image_loss_is_the_negative_log_likelihood_of_the_sampler(schedule, num_steps, given):
    """N = 1, the sampler's own sizes: E weight * nll = -log p of what the plan decodes, over L."""
    table = likelihood_table()
    cells = np.array([4, 0, 5, 2, 1, 3])
    sampler = sampled_image(table, cells, schedule, num_steps, given)
    order = cells[~given[cells]]
    sizes = orders.counts(schedule, num_steps, len(order), 3.0)
    losses = [
        training_loss(
            table,
            diffusion.schedule_blocks(
                Scripted([u, 0.75]), order, sizes, given, settings(num_masked_blocks=1), 4
            ),
            with_history,
        )
        for u in each_token_once(len(order))
    ]
    assert np.mean(losses) == pytest.approx(sampler / len(order), abs=TOLERANCE)


def sampled_image(table, cells, schedule, num_steps, given, merge=0) -> float:
    """Returns the negative log likelihood of the sampler's plan over an image."""
    options = {"schedule": schedule, "num_steps": num_steps, "shift": 3.0, "merge": merge}
    plan = plans.image_plan(cells[None], given=given[None], **options)
    nll = 0.0
    for k, decode in enumerate(plan.decode[:, 0]):
        decode = frozenset(decode[decode >= 0].tolist())
        known = {j: int(at) for j, at in enumerate(plan.decoded_at[0])}
        known = {j: at for j, at in known.items() if at < plan.block[0] + k}
        nll += sum(table[with_history(i, known, decode)] for i in decode)
    return nll


@pytest.mark.parametrize(("num_masked_blocks", "merge"), [(1, 0.75), (4, 0.25)])
def test_image_loss_of_random_orders_one_token_a_step_is_equation_1(num_masked_blocks, merge):
    """For any number of rival blocks, also with merged steps."""
    table = likelihood_table()
    losses = [
        training_loss(
            table,
            diffusion.schedule_blocks(
                Scripted([u, merge]),
                np.array(order),
                np.ones(LENGTH, int),
                NONE_GIVEN,
                settings(num_masked_blocks=num_masked_blocks),
                3,
            ),
            with_known,
        )
        for order in itertools.permutations(range(LENGTH))
        for u in each_token_once(LENGTH)
    ]
    assert np.mean(losses) == pytest.approx(equation_1(table, LENGTH), abs=TOLERANCE)


def equation_1(table, length: int) -> float:
    """Returns E_t E_mask 1/t sum of nll over L: all mask sets, the integral over t in closed form.

    A set of n of the L tokens is masked with probability t^n (1-t)^(L-n); the integral of that
    over t is a Beta function.
    """
    loss = 0.0
    for n in range(1, length + 1):
        integral = math.factorial(n - 1) * math.factorial(length - n) / math.factorial(length)
        for masked in itertools.combinations(range(length), n):
            known = dict.fromkeys(set(range(length)) - set(masked))
            loss += integral * sum(table[with_known(i, known, None)] for i in masked)
    return loss / length


def settings(**changes) -> config.Diffusion:
    return config.Diffusion(**changes)


# ---------------------------------------------------------------------------------------------
# `plan`.


@pytest.mark.parametrize("merge", [0, 2, 4, 9])
@pytest.mark.parametrize(("schedule", "num_steps", "given"), PLANS)
def test_one_row_of_a_plan_is_the_negative_log_likelihood_of_the_sampler(
    schedule, num_steps, given, merge
):
    """Row by row, not only on average: for every order, also with merged steps."""
    table = likelihood_table()
    for cells in map(np.array, itertools.permutations(range(LENGTH))):
        order = cells[~given[cells]]
        sizes = orders.counts(schedule, num_steps, len(order), 3.0)
        blocks = diffusion.plan_blocks(order, sizes, given, merge)
        loss = training_loss(table, blocks, with_history)
        sampler = sampled_image(table, cells, schedule, num_steps, given, merge)
        assert loss == pytest.approx(sampler / len(order), abs=TOLERANCE)
        # Every cell is predicted once, and is clean once, except for those of the last step.
        assert sorted(blocks.token[blocks.masked]) == sorted(order)
        assert set(blocks.weight[blocks.masked]) == {1.0}
        last = orders.merged(sizes, merge)[-1]
        assert len(blocks.block) == given.sum() + 2 * len(order) - last


def test_rows_of_plans_of_random_orders_one_cell_a_step_are_equation_1():
    table = likelihood_table()
    losses = [
        training_loss(
            table,
            diffusion.plan_blocks(np.array(order), np.ones(LENGTH, int), NONE_GIVEN, 1),
            with_known,
        )
        for order in itertools.permutations(range(LENGTH))
    ]
    assert np.mean(losses) == pytest.approx(equation_1(table, LENGTH), abs=TOLERANCE)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("given", [NONE_GIVEN, np.isin(np.arange(LENGTH), [1, 2, 4])])
def test_text_rows_of_a_plan_are_the_negative_log_likelihood_of_the_sampler(given, steps):
    """Only the tokens that a step commits are drawn: a random order in both."""
    table = likelihood_table()
    sampler, losses = [], []
    for ranked, permutations in orders_of_text(given):
        sampler.append(sampled_text(table, ranked, 3, steps, given))
        blocks = diffusion.semi_autoregressive_blocks(
            Scripted([], permutations),
            LENGTH,
            3,
            steps,
            given,
            settings(blocks="plan", text_masked_blocks=6),
        )
        losses.append(training_loss(table, blocks, with_history))
    expected = np.mean(sampler) / (~given).sum()
    assert np.mean(losses) == pytest.approx(expected, abs=TOLERANCE)


def orders_of_text(given):
    """Yields every order inside two text blocks of three: as tokens, and as permutations."""
    masked = [[i for i in range(start, start + 3) if not given[i]] for start in (0, 3)]
    for permutations in itertools.product(*[itertools.permutations(range(len(m))) for m in masked]):
        pairs = zip(masked, permutations, strict=True)
        yield [[inside[p] for p in permutation] for inside, permutation in pairs], permutations


# ---------------------------------------------------------------------------------------------
# `schedule`: text.


@pytest.mark.parametrize("masked_blocks", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("given", [NONE_GIVEN, np.isin(np.arange(LENGTH), [1, 2, 4])])
def test_text_loss_is_the_negative_log_likelihood_of_the_sampler(given, steps, masked_blocks):
    """Two text blocks of three tokens; steps commit tokens in a random order in both."""
    table = likelihood_table()
    block_len = 3
    sampler, losses = [], []
    for ranked, permutations in orders_of_text(given):
        sampler.append(sampled_text(table, ranked, block_len, steps, given))
        for u in each_token_once(sum(map(len, ranked))):
            # Later draws choose within the text blocks: one case for each of their tokens. Using
            # the same numbers in all blocks does not change the mean of a sum.
            for inner in each_token_once(math.lcm(*map(len, ranked))):
                blocks = diffusion.semi_autoregressive_blocks(
                    Scripted([u, inner, inner], permutations),
                    LENGTH,
                    block_len,
                    steps,
                    given,
                    settings(text_masked_blocks=masked_blocks),
                )
                losses.append(training_loss(table, blocks, with_history))
    expected = np.mean(sampler) / (~given).sum()
    assert np.mean(losses) == pytest.approx(expected, abs=TOLERANCE)


def sampled_text(table, ranked, block_len, steps, given) -> float:
    """Returns the negative log likelihood of one run of the sampler's text plan."""
    known = {int(i): 1 for i in np.flatnonzero(given)}
    left = [i for inside in ranked for i in inside]
    nll = 0.0
    for segment in plans.text_plan(LENGTH, block_len, steps, given[None]):
        for number, decode, count in zip(segment.block, segment.decode, segment.count, strict=True):
            asked = frozenset(set(decode[decode >= 0].tolist()) - known.keys())
            commit, left = left[: count[0]], left[count[0] :]
            nll += sum(table[with_history(i, known, asked)] for i in commit)
            known = known | {i: int(number) for i in commit}
    assert not left
    return nll


@pytest.mark.parametrize("masked_blocks", [1, 4, 9])
def test_text_loss_of_one_block_one_token_a_step_is_equation_1(masked_blocks):
    table = likelihood_table()
    losses = [
        training_loss(
            table,
            diffusion.semi_autoregressive_blocks(
                Scripted([0.5, u], [order]),
                LENGTH,
                LENGTH,
                LENGTH,
                NONE_GIVEN,
                settings(text_masked_blocks=masked_blocks),
            ),
            with_known,
        )
        for order in itertools.permutations(range(LENGTH))
        for u in each_token_once(LENGTH)
    ]
    assert np.mean(losses) == pytest.approx(equation_1(table, LENGTH), abs=TOLERANCE)


# ---------------------------------------------------------------------------------------------
# `uniform`.


@pytest.mark.parametrize(("policy", "nodes"), [("uniform", 4), ("cosine", 16), ("mode", 16)])
def test_uniform_loss_is_equation_1(policy, nodes):
    """The integral over u by Gauss-Legendre, all mask sets; exact for the uniform policy."""
    table = likelihood_table()
    points, weights = np.polynomial.legendre.leggauss(nodes)
    loss = 0.0
    for u, share in zip((points + 1) / 2, weights / 2, strict=True):
        t, _ = orders.time_from_uniform(policy, u)
        for masked in itertools.product([False, True], repeat=LENGTH):
            probability = t ** sum(masked) * (1 - t) ** (LENGTH - sum(masked))
            apart = np.arange(1, LENGTH + 1) / (LENGTH + 1)
            draws = np.where(masked, t * apart, t + (1 - t) * apart)
            blocks = diffusion.uniform_blocks(
                Scripted([u, draws]),
                NONE_GIVEN,
                settings(blocks="uniform", time_policy=policy),
            )
            loss += share * probability * training_loss(table, blocks, with_known)
    assert loss == pytest.approx(equation_1(table, LENGTH), abs=TOLERANCE)


@pytest.mark.parametrize("policy", ["uniform", "cosine", "logit_normal", "mode"])
def test_density_of_time_is_the_derivative_of_its_draw(policy):
    """p(t) = |du/dt|, by central differences; and t is in [0, 1]."""
    for u in np.linspace(0.005, 0.995, 199):
        t, density = orders.time_from_uniform(policy, u)
        step = 1e-6
        before, after = (orders.time_from_uniform(policy, u + s)[0] for s in (-step, step))
        assert density == pytest.approx(abs(2 * step / (after - before)), rel=1e-4)
        assert 0 < t <= 1


@pytest.mark.parametrize("policy", ["uniform", "cosine", "logit_normal", "mode"])
def test_every_time_is_drawn_once(policy):
    """Time is monotone in u, so the density has one term; it has the right endpoints."""
    times = [orders.time_from_uniform(policy, u)[0] for u in np.linspace(0, 1, 1001)]
    falling = np.diff(times) * (1 if times[-1] > times[0] else -1)
    assert (falling >= 0).all()
    assert min(times) == pytest.approx(orders.MIN_TIME, abs=1e-2)
    assert max(times) == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("policy", ["uniform", "cosine", "logit_normal", "mode"])
def test_weight_of_a_masked_token_is_one_over_t_and_its_density(policy):
    for u in (0.1, 0.5, 0.9):
        t, density = orders.time_from_uniform(policy, u)
        draws = np.array([t / 2, (1 + t) / 2, t / 3, (1 + t) / 2, (1 + t) / 2, t / 4])
        blocks = diffusion.uniform_blocks(
            Scripted([u, draws]), NONE_GIVEN, settings(blocks="uniform", time_policy=policy)
        )
        np.testing.assert_array_equal(blocks.masked, draws < t)
        np.testing.assert_allclose(blocks.weight[blocks.masked], 1 / (t * density))
        assert blocks.total == LENGTH
