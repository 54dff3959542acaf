# SPDX-License-Identifier: Apache-2.0
"""The rule applied to the example in its docstring, and the tags of padding."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax import visibility
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, is_padding, visible

# Prompt 0, clean 1 and 2, masked 3 and 4 (M = 2).
MATRIX = """
    x . . . .
    x x . . .
    x x x . .
    x x x x .
    x x x . x
"""


def seen(query_block, query_horizon, key_block):
    return visible(query_block[:, None], query_horizon[:, None], key_block[None, :])


def test_matrix_of_the_docstring():
    block = jnp.arange(5)
    expected = [[mark == "x" for mark in line.split()] for line in MATRIX.strip().splitlines()]
    np.testing.assert_array_equal(seen(block, jnp.minimum(block, 2), block), expected)
    documented = "\n".join(line.strip() for line in visible.__doc__.splitlines())
    for number, line in enumerate(MATRIX.strip().splitlines()):
        assert f"{number}  {line.strip()}" in documented


def test_padding_is_seen_by_padding_only():
    block = jnp.array([0, 1, 2**16, PAD_BLOCK])
    horizon = jnp.array([0, 1, 2**16, PAD_HORIZON])
    np.testing.assert_array_equal(seen(block, horizon, block)[:, 3], [False, False, False, True])
    assert not seen(block, horizon, block)[3, :3].any()
    np.testing.assert_array_equal(is_padding(block), [False, False, False, True])


def test_padding_tags_fit_an_int32_next_to_any_block():
    """Block numbers stay below 2^16; kernels compare tags as int32."""
    assert 2**16 < PAD_BLOCK < 2**31
    assert PAD_HORIZON < 0
    assert jnp.int32(PAD_BLOCK) == PAD_BLOCK


def test_rule_is_made_of_integer_comparisons_so_that_a_kernel_can_trace_it():
    tags = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    jaxpr = jax.make_jaxpr(visibility.visible)(tags, tags, tags, tags, tags)
    assert {equation.primitive.name for equation in jaxpr.eqns} <= {"le", "eq", "or", "and"}


def test_segments_count_only_when_both_sides_have_them():
    block = jnp.zeros((2, 2), jnp.int32)
    segment = jnp.array([0, 1])
    apart = visible(block, block, block, segment[:, None], segment[None, :])
    np.testing.assert_array_equal(apart, np.eye(2, dtype=bool))
    assert visible(block, block, block, segment[:, None], None).all()
