# SPDX-License-Identifier: Apache-2.0
"""Muon over all matrices of one shape at once, against optax's leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import tiny
from optax.contrib import MuonDimensionNumbers

from sparse_lavida_jax.training import muon

EPS = 1e-8
SHAPES = {
    "wide": (2, 4, 6),
    "tall": (3, 6, 4),
    "square": (5, 5),
    "stacked": (1, 5, 5),
    "window": (2, 2, 3, 4),
}


def gradient(step):
    rng = np.random.default_rng(step)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


def axes(leaf):
    window = (0, 1, 2) if leaf.ndim == 4 else leaf.ndim - 2
    return MuonDimensionNumbers(window, leaf.ndim - 1)


def test_it_is_that_of_optax_and_goes_on_from_its_state():
    wanted = optax.contrib.scale_by_muon(
        eps=EPS, weight_dimension_numbers=lambda params: jax.tree.map(axes, params)
    )
    ours = muon.orthogonal_momentum(EPS)
    state = jax.jit(wanted.init)(gradient(0))
    assert jax.tree.structure(state) == jax.tree.structure(ours.init(gradient(0)))
    update = tiny.quick_jit(
        lambda given, state: (wanted.update(given, state), ours.update(given, state))
    )
    for step in range(3):
        (expected, after), (found, own) = update(gradient(step), state)
        for name, leaf in expected.items():
            largest = max(leaf.size // leaf.shape[-1] // stack(leaf), leaf.shape[-1])
            scale = muon.RMS * np.sqrt(largest)
            np.testing.assert_allclose(found[name], scale * leaf, atol=2e-5, err_msg=name)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after, own)
        state = after


def stack(leaf):
    return leaf.shape[0] if leaf.ndim == 3 else 1
