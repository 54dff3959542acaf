# SPDX-License-Identifier: Apache-2.0
"""Every plan decodes every masked position exactly once, whatever the grid."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sparse_lavida_jax import orders
from sparse_lavida_jax.sampling import plans

SIDES = range(1, 41)


@pytest.mark.parametrize("name", orders.ORDERS)
def test_every_order_is_a_permutation_of_every_grid(name):
    for h in SIDES:
        for w in SIDES:
            cells = orders.order(name, h, w, 42)
            np.testing.assert_array_equal(np.sort(cells), np.arange(h * w))


@pytest.mark.parametrize("schedule", orders.SCHEDULES)
def test_every_grid_is_decoded_once_with_no_empty_step(schedule):
    for h in SIDES:
        for w in SIDES:
            plan = plans.image_plan(
                orders.raster(h, w), schedule=schedule, num_steps=1 + (h * w) % 67, shift=5.0
            )
            assert (plan.decode >= 0).any(axis=-1).all()
            np.testing.assert_array_equal(np.sort(valid(plan.decode)), np.arange(h * w))


def valid(positions):
    return positions[positions >= 0]


@st.composite
def image_plans(draw):
    h, w, batch = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    name, seed = draw(st.sampled_from(tuple(orders.ORDERS))), draw(st.integers(0, 99))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9]))
    given = rng.random((batch, h * w)) < share
    plan = plans.image_plan(
        orders.order(name, h, w, seed),
        schedule=draw(st.sampled_from(tuple(orders.SCHEDULES))),
        num_steps=draw(st.integers(1, 40)),
        shift=draw(st.sampled_from([0.5, 1.0, 3.0, 5.0])),
        given=given,
    )
    return plan, given


@hypothesis.given(image_plans(), st.sampled_from(["newest", "all"]), st.booleans())
def test_phases_tell_the_story_of_the_plan(plan_and_given, passes_clean, passes_rest):
    """Checks with sets what is clean, decoded and left after each step."""
    plan, given = plan_and_given
    parts = plans.phases(plan, passes_clean=passes_clean, passes_rest=passes_rest)
    assert len(parts) <= 7
    for row, given_row in enumerate(given):
        masked = set(np.flatnonzero(~given_row))
        decoded, newest, block = set(), set(), 2
        for part in parts:
            assert part.decode.shape[-1] in plans.BUCKETS
            for i in range(part.num_steps):
                clean, decode, rest = (
                    [int(p) for p in valid(field[i, row])]
                    for field in (part.clean, part.decode, part.rest)
                )
                assert part.block[i] == block
                assert len(set(decode)) == len(decode) == part.count[i, row]
                assert set(decode) <= masked
                assert set(clean) == (newest if passes_clean == "newest" else decoded)
                masked -= set(decode)
                assert set(rest) == (masked if passes_rest else set())
                assert all(plan.decoded_at[row, p] == block for p in decode)
                decoded |= set(decode)
                newest, block = set(decode), block + 1
        assert not masked
        assert decoded == set(np.flatnonzero(~given_row))
        assert (plan.decoded_at[row][given_row] == 1).all()


@hypothesis.given(
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.3, 0.9]), st.sampled_from(["newest", "all"]), st.booleans(),
)  # fmt: skip
def test_text_plans_commit_every_masked_token(
    num_blocks, block_len, steps, seed, share, passes_clean, passes_rest
):
    length = num_blocks * block_len
    given = np.random.default_rng(seed).random((2, length)) < share
    parts = plans.text_plan(
        length, block_len, steps, given, passes_clean=passes_clean, passes_rest=passes_rest
    )
    blocks = [block for part in parts for block in part.block]
    # Numbers continue over text blocks, whatever is given; a text block may need fewer steps.
    assert blocks == sorted(set(blocks))
    assert all(2 <= block < 2 + num_blocks * steps for block in blocks)
    for row in range(2):
        committed, clean_once = np.zeros(length, int), []
        for part in parts:
            for i in range(part.num_steps):
                current = valid(part.decode[i, row])
                assert not given[row, current].any()
                committed[current // block_len * block_len] += part.count[i, row]
                if len(current) and passes_rest:
                    end = (current[0] // block_len + 1) * block_len
                    later = end + np.flatnonzero(~given[row, end:])
                    np.testing.assert_array_equal(valid(part.rest[i, row]), later)
                if passes_clean == "newest":
                    clean_once += valid(part.clean[i, row]).tolist()
        per_block = (~given[row]).reshape(num_blocks, block_len).sum(axis=1)
        np.testing.assert_array_equal(committed[::block_len], per_block)
        if passes_clean == "newest" and parts:
            clean_once += valid(parts[-1].decode[-1, row]).tolist()
            assert clean_once == np.flatnonzero(~given[row]).tolist()
