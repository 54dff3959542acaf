# SPDX-License-Identifier: Apache-2.0
"""What decays and what does not, and how the learning rate follows the run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sparse_lavida_jax import config, optimizer


def named(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def first_update(settings, params, gradient):
    def update(params, gradient):
        chain = optimizer.make_optimizer(settings)
        return chain.update(gradient, chain.init(params), params)[0]

    return tiny.quick_jit(update)(params, gradient)


def test_weight_decay_leaves_vectors_alone_in_stacked_layers_too():
    """Without a gradient, the update is the decay."""
    params = tiny.denoiser(tiny.model_settings())
    settings = config.Optimizer(weight_decay=0.1)
    update = first_update(settings, params, jax.tree.map(jnp.zeros_like, params))
    sizes = named(params)
    decayed = {name for name, leaf in named(update).items() if np.any(leaf)}
    for name in sizes:
        is_vector = any(word in name for word in ("norm", "register", "bias"))
        assert (name in decayed) == (not is_vector), name
    assert any("joint_layers" in name for name in decayed)
    assert any("joint_layers" in name for name in sizes.keys() - decayed)
    assert any("vision" in name and "bias" in name for name in sizes.keys() - decayed)


def test_the_first_update_is_adam_on_the_clipped_gradient():
    params = {"kernel": jnp.full((2, 3), 2.0)}
    gradient = {"kernel": jnp.arange(6.0).reshape(2, 3)}
    settings = config.Optimizer(clip_norm=1.0, weight_decay=0.5, b1=0.9, b2=0.99)
    update = np.asarray(first_update(settings, params, gradient)["kernel"])
    clipped = np.arange(6.0).reshape(2, 3) / np.sqrt(55)
    # Both moments are those of one gradient, and their start at zero is corrected for.
    np.testing.assert_allclose(update, clipped / (abs(clipped) + 1e-8) + 0.5 * 2.0, rtol=1e-5)


@pytest.fixture
def settings():
    return config.Optimizer(learning_rate=4.0, warmup_steps=10, final_fraction=0.25)


def test_the_learning_rate_rises_linearly_by_steps(settings):
    rates = [optimizer.learning_rate(settings, step, 0.0) for step in range(12)]
    np.testing.assert_allclose(rates[:10], 4.0 * np.arange(1, 11) / 10)
    assert rates[10:] == [4.0, 4.0]
    without = dataclasses.replace(settings, warmup_steps=0)
    assert optimizer.learning_rate(without, 0, 0.0) == 4.0


def test_the_learning_rate_falls_by_a_half_cosine_to_its_final_fraction(settings):
    late = 1000
    assert optimizer.learning_rate(settings, late, 0.0) == 4.0
    assert optimizer.learning_rate(settings, late, 0.5) == pytest.approx(4.0 * (1 + 0.25) / 2)
    assert optimizer.learning_rate(settings, late, 1.0) == pytest.approx(1.0)
    assert optimizer.learning_rate(settings, late, 1.5) == pytest.approx(1.0)
    rates = [optimizer.learning_rate(settings, late, share / 20) for share in range(21)]
    assert rates == sorted(rates, reverse=True)
