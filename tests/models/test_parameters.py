# SPDX-License-Identifier: Apache-2.0
"""Two parts make up one model, and neither contains arrays of the other."""

import chex
import jax
import numpy as np
import pytest
import tiny

from sparse_lavida_jax.models import parameters
from sparse_lavida_jax.programs.program_arguments import taken_apart


@pytest.fixture(scope="module")
def model():
    return tiny.denoiser(tiny.model_settings())


def is_branch(name):
    return "generation" in name


def test_names_are_paths(model):
    names = parameters.by_name(model)
    assert "joint_layers/generation/q/kernel" in names
    assert "vision/tower/layers/fc1/bias" in names
    assert len(names) == len(jax.tree.leaves(model))


def test_a_function_is_given_the_name_of_every_leaf(model):
    named = parameters.mapped(lambda name, leaf: (name, leaf.shape), model)
    expected = [(name, leaf.shape) for name, leaf in parameters.by_name(model).items()]
    assert jax.tree.leaves(named, is_leaf=lambda x: isinstance(x, tuple)) == expected


def test_parts_have_each_parameter_once_and_join_to_the_model(model):
    mine, rest = parameters.parted(model, is_branch)
    ours, theirs = parameters.by_name(mine), parameters.by_name(rest)
    assert ours and theirs and not ours.keys() & theirs.keys()
    assert all(map(is_branch, ours)) and not any(map(is_branch, theirs))
    joined = parameters.joined(mine, rest)
    assert jax.tree.structure(joined) == jax.tree.structure(model)
    assert all(
        one is two for one, two in zip(jax.tree.leaves(joined), jax.tree.leaves(model), strict=True)
    )


def test_the_frozen_part_may_be_half_as_large(model):
    mine, rest = parameters.parted(model, is_branch, "bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(mine)} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(rest)} == {"bfloat16"}


def test_a_model_that_is_trained_whole_is_left_alone(model):
    mine, rest = parameters.parted(model, lambda name: True, "bfloat16")
    assert mine is model and rest is None
    assert parameters.joined(mine, None) is model


def test_what_is_replaced_has_to_be_there_and_to_fit(model):
    changed = parameters.replaced(model, {"final_norm/weight": np.full(32, 3.0)})
    np.testing.assert_array_equal(changed.final_norm.weight[...], np.full(32, 3.0))
    assert model.final_norm.weight[...].max() != 3
    with pytest.raises(ValueError, match="no parameter final_norm/scale"):
        parameters.replaced(model, {"final_norm/scale": np.ones(32)})
    with pytest.raises(ValueError, match=r"\(31,\), and \(32,\) in the model"):
        parameters.replaced(model, {"final_norm/weight": np.ones(31)})


def test_a_program_gets_a_model_that_was_taken_apart_as_a_module(model):
    given = []

    @jax.jit
    def program(one):
        given.append(one)
        return jax.tree.map(lambda x: 2 * x, one)

    apart, again = (taken_apart(tiny.denoiser(model.settings)) for _ in range(2))
    doubled = program(apart)
    program(again)
    assert [type(one) for one in given] == [type(model)], "once for both"
    assert type(doubled) is type(model) and apart.settings == model.settings
    chex.assert_trees_all_close(doubled, jax.tree.map(lambda x: 2 * x, apart))
