# SPDX-License-Identifier: Apache-2.0
"""The rule is the paper's pseudo-code, and its two lemmas hold: exhaustively, up to six tokens."""

import itertools

import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from sparse_lavida_jax.tags import make_tags
from sparse_lavida_jax.visibility import PAD_BLOCK, visible

LAST_BLOCK = 4
LENGTHS = range(1, 7)
ROUNDS = 4  # of message passing; a longest chain of visibility has five blocks
PRIME = 2**31 - 1


def assignments(length: int) -> np.ndarray:
    """Returns all assignments of `length` tokens to blocks 0..4 [a s]."""
    return np.array(list(itertools.product(range(LAST_BLOCK + 1), repeat=length)))


def sees(block: np.ndarray, num_clean: int) -> np.ndarray:
    """Returns what each token of each assignment sees by our rule [a s s]; padding sees nothing."""
    tags = make_tags(np.zeros_like(block), block, num_clean)
    mask = visible(
        jnp.asarray(tags.block)[:, :, None],
        jnp.asarray(tags.horizon)[:, :, None],
        jnp.asarray(tags.block)[:, None, :],
    )
    return np.asarray(mask) & (block != PAD_BLOCK)[:, :, None]


def network(mask: np.ndarray) -> np.ndarray:
    """Returns the result [a s] of a deep network in exact arithmetic: rounds of x <- f(seen).

    Two tokens that receive different multisets of messages in any round get different results,
    barring coincidences modulo a prime.
    """
    x = np.broadcast_to(np.arange(2, 2 + mask.shape[-1]), mask.shape[:2]).astype(np.int64)
    for step in range(ROUNDS):
        message = (x * x + 7 * x + step) % PRIME
        x = (31 * x + (mask * message[:, None, :]).sum(axis=-1)) % PRIME
    return x


@pytest.mark.parametrize("length", LENGTHS)
def test_rule_is_algorithm_1(length):
    blocks = assignments(length)
    for num_clean in range(LAST_BLOCK + 1):
        ours = sees(blocks, num_clean)
        for block, mask in zip(blocks.tolist(), ours, strict=True):
            np.testing.assert_array_equal(mask, oracles.algorithm_1(block, num_clean))


@pytest.mark.parametrize("lengths", [(1, 3), (2, 2), (3, 2), (2, 4)])
def test_examples_of_a_row_see_what_each_would_alone(lengths):
    """All pairs of assignments, mixed in one row: so both lemmas hold for packed rows."""
    first, second = map(assignments, lengths)
    pairs = [np.repeat(first, len(second), axis=0), np.tile(second, (len(first), 1))]
    mixed = np.random.default_rng(0).permutation(sum(lengths))
    block = np.concatenate(pairs, axis=1)[:, mixed]
    segment = np.repeat([0, 1], lengths)[mixed]
    for clean in itertools.product(range(LAST_BLOCK + 1), repeat=2):
        tags = make_tags(
            np.zeros_like(block),
            block,
            np.array(clean)[segment],
            np.broadcast_to(segment, block.shape),
        )
        query, key = (slice(None), slice(None), None), (slice(None), None, slice(None))
        mask = visible(
            tags.block[query], tags.horizon[query], tags.block[key],
            tags.segment[query], tags.segment[key],
        )  # fmt: skip
        assert not mask[:, segment[:, None] != segment[None]].any()
        for i in (0, 1):
            own = np.flatnonzero(segment == i)
            alone = sees(block[:, own], clean[i])
            np.testing.assert_array_equal(mask[:, own[:, None], own[None]], alone)


@pytest.mark.parametrize("length", LENGTHS)
def test_truncation_lemma(length):
    """A masked block and all clean ones form a closed set; removing rivals changes nothing."""
    block = assignments(length)
    for num_clean in range(LAST_BLOCK):
        whole = sees(block, num_clean)
        computed = network(whole)
        for number in range(num_clean + 1, LAST_BLOCK + 1):
            inside = (block <= num_clean) | (block == number)
            assert not (whole & inside[:, :, None] & ~inside[:, None, :]).any()
            alone = network(sees(np.where(inside, block, PAD_BLOCK), num_clean))
            np.testing.assert_array_equal(alone[inside], computed[inside])


@pytest.mark.parametrize("length", LENGTHS)
def test_caching_lemma(length):
    """Tokens up to block j compute in step j+1, with nothing later present, their final values."""
    block = assignments(length)
    for last in range(LAST_BLOCK + 1):
        held = block <= last
        then = network(sees(np.where(held, block, PAD_BLOCK), last))
        for num_clean in range(last, LAST_BLOCK + 1):
            later = sees(block, num_clean)
            assert not (later & held[:, :, None] & ~held[:, None, :]).any()
            np.testing.assert_array_equal(network(later)[held], then[held])


def test_a_masked_block_depends_on_every_clean_token_and_on_itself():
    """Otherwise the lemmas would also hold for a rule under which no token sees another."""
    block = np.array([[0, 1, 2, 3, 3, 4]])
    mask = sees(block, 2)[0]
    np.testing.assert_array_equal(mask[3], [True, True, True, True, True, False])
    np.testing.assert_array_equal(mask[5], [True, True, True, False, False, True])


def test_nobody_sees_padding():
    block = np.array([[0, 1, 2, 3, PAD_BLOCK, PAD_BLOCK]])
    for num_clean in range(LAST_BLOCK + 1):
        assert not sees(block, num_clean)[:, :, 4:].any()


def test_segments_never_see_each_other():
    block = jnp.zeros((6, 6), jnp.int32)
    segment = jnp.array([0, 0, 1, 1, 1, 2])
    mask = visible(block, block, block, segment[:, None], segment[None, :])
    np.testing.assert_array_equal(mask, np.equal.outer(segment, segment))
