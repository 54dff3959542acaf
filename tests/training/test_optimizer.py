# SPDX-License-Identifier: Apache-2.0
"""Which parameters decay, and the learning rate over a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.models import lora
from sparse_lavida_jax.training import muon, optimizer


def named(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def first_update(settings, params, gradient):
    def update(params, gradient):
        chain = optimizer.make_optimizer(settings)
        return chain.update(gradient, chain.init(params), params)[0]

    return tiny.quick_jit(update)(params, gradient)


def test_vectors_are_no_weights_that_decay_in_stacked_layers_either():
    params = tiny.denoiser(tiny.model_settings())
    decays = named(optimizer._decays(params))
    for name, leaf in named(params).items():
        is_vector = any(word in name for word in ("norm", "register", "bias"))
        assert decays[name] == (not is_vector), name
        assert not decays[name] or leaf.ndim >= 2
    stacked = {name: decays[name] for name in decays if "layers" in name}
    assert {True, False} == {*stacked.values()}
    assert any("vision" in name and "bias" in name for name in stacked)


def test_the_first_update_is_adam_on_the_clipped_gradient_and_decay():
    params = {"kernel": jnp.full((2, 3), 2.0), "norm": jnp.full((2, 3), 2.0)}
    gradient = {"kernel": jnp.arange(6.0).reshape(2, 3), "norm": jnp.zeros((2, 3))}
    settings = config.Optimizer(clip_norm=1.0, weight_decay=0.5, b1=0.9, b2=0.99)
    update = first_update(settings, params, gradient)
    clipped = np.arange(6.0).reshape(2, 3) / np.sqrt(55)
    # Both moments are those of one gradient, with bias correction.
    adam = clipped / (abs(clipped) + 1e-8)
    np.testing.assert_allclose(update["kernel"], adam + 0.5 * 2.0, rtol=1e-5)
    np.testing.assert_array_equal(update["norm"], np.zeros((2, 3)))


@pytest.fixture(scope="module")
def updates():
    """A gradient and the first update, for a stack of two layers and other parameters."""
    rng = np.random.default_rng(0)
    shapes = {"layers": {"kernel": (2, 6, 4), "norm": (2, 6)}, "table": (5, 3), "head": (3, 5)}
    params = jax.tree.map(lambda s: jnp.ones(s), shapes, is_leaf=lambda s: isinstance(s, tuple))
    gradient = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    settings = config.Optimizer(kind="muon", weight_decay=0.0, clip_norm=1.0)
    decayed = dataclasses.replace(settings, weight_decay=0.5)
    first = first_update(settings, params, gradient)
    decay = jax.tree.map(jnp.subtract, first_update(decayed, params, gradient), first)
    return jax.tree.map(np.asarray, (gradient, first, decay))


def test_muon_makes_the_step_of_each_layer_orthogonal(updates):
    """Newton-Schulz leaves singular values within about a third of 1."""
    gradient, first, _ = updates
    for before, after in zip(gradient["layers"]["kernel"], first["layers"]["kernel"], strict=True):
        u, _, v = np.linalg.svd(before, full_matrices=False)
        scale = muon.RMS * np.sqrt(6)
        np.testing.assert_allclose(np.diag(u.T @ after @ v.T), np.full(4, scale), rtol=0.4)
        assert np.linalg.svd(after)[1].max() < 1.4 * scale


def test_muon_leaves_everything_else_to_adam_with_nesterov_momentum(updates):
    gradient, first, _ = updates
    size = 1 + 0.99 / (1 + 0.99)  # in the first step, for b1 = 0.99
    for name in ("table", "head"):
        np.testing.assert_allclose(first[name], size * np.sign(gradient[name]), rtol=1e-3)
    norm = np.sign(gradient["layers"]["norm"])
    np.testing.assert_allclose(first["layers"]["norm"], size * norm, rtol=1e-3)


def test_muon_decays_its_matrices_only(updates):
    decay = updates[2]
    np.testing.assert_allclose(decay["layers"]["kernel"], np.full((2, 6, 4), 0.5), atol=1e-5)
    for leaf in (decay["layers"]["norm"], decay["table"], decay["head"]):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_muon_takes_the_matrices_inside_the_network():
    params = tiny.denoiser(tiny.model_settings())
    inside = [name for name, leaf in named(optimizer._matrices(params)).items() if leaf]
    words = (
        "joint_layers",
        "split_layers",
        "tower.layers",
        "patch_embedding",
        "image_embedding.code",
    )
    for word in words:
        assert any(word in name for name in inside), word
    for word in ("text_embedding", "text_head", "logits", "norm", "register"):
        assert not any(word in name for name in inside), word


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


# ---------------------------------------------------------------------------------------------
# Groups, frozen parameters, narrow moments.

VISION_AND_REST = (("^vision/tower/", 0.25), ("understanding", 0.0))


@pytest.fixture(scope="module")
def grouped():
    """Settings whose groups slow the vision tower down and freeze half of the rest."""
    return config.Config(
        model=tiny.model_settings(),
        optimizer=config.Optimizer(
            learning_rate=1.0, groups=VISION_AND_REST, weight_decay=0.5, frozen_dtype="bfloat16"
        ),
    )


def test_a_group_takes_steps_of_its_own_size(grouped):
    params, _ = optimizer.parted(grouped, tiny.denoiser(grouped.model))
    gradient = jax.tree.map(jnp.ones_like, params)
    plain = dataclasses.replace(grouped.optimizer, groups=())
    with_groups = named(first_update(grouped.optimizer, params, gradient))
    without = named(first_update(plain, params, gradient))
    slowed = [name for name in without if "vision.tower" in name]
    assert 5 < len(slowed) < len(without)
    for name, update in without.items():
        factor = 0.25 if name in slowed else 1.0
        np.testing.assert_allclose(with_groups[name], factor * update, rtol=1e-6, err_msg=name)


def test_what_is_frozen_has_no_gradient_and_no_moments(grouped):
    whole = tiny.denoiser(grouped.model)
    params, frozen = optimizer.parted(grouped, whole)
    assert frozen is not None
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}
    assert all("understanding" in name for name in named(frozen))
    # The first matching group applies to the tower, not the second one.
    assert any("vision.tower" in name for name in named(params))
    state = jax.eval_shape(lambda p: optimizer.init(grouped.optimizer, p), params)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) - 1 == 2 * size
    assert size < 0.7 * sum(leaf.size for leaf in jax.tree.leaves(whole))


def test_with_adapters_everything_else_is_frozen_but_registers_and_groups():
    settings = config.Config(
        model=tiny.model_settings(),
        lora=config.Lora(rank=2),
        optimizer=config.Optimizer(groups=(("^vision/projector/", 1e-6),)),
    )
    model = lora.attach(tiny.denoiser(settings.model), settings.lora, jax.random.key(0))
    params, _ = optimizer.parted(settings, model)
    words = ("lora_", "register_", "vision.projector")
    assert all(any(word in name for word in words) for name in named(params))
    assert all(any(word in name for name in named(params)) for word in words)
    chosen = optimizer.dtypes(dataclasses.replace(
        settings, optimizer=config.Optimizer(frozen_dtype="bfloat16")
    ))  # fmt: skip
    assert chosen("register_generation") == "float32"
    assert chosen("joint_layers/attn_out/kernel") == "bfloat16"


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        ((("^vison/", 1e-6),), r"'\^vison/', which is found in no parameter"),
        ((("", 0.0),), "freezes every parameter"),
    ],
)
def test_groups_that_cannot_be_meant_are_refused(groups, complaint):
    settings = config.Config(model=tiny.model_settings(), optimizer=config.Optimizer(groups=groups))
    with pytest.raises(config.ConfigError, match=complaint):
        optimizer.parted(settings, tiny.denoiser(settings.model))


@pytest.mark.parametrize("groups", [(("(", 1.0),), ("^vision/", 1.0), (("a", -1.0),), (("a",),)])
def test_groups_are_pairs(groups):
    with pytest.raises(config.ConfigError, match=r"Optimizer\.groups=.* pairs of a regular"):
        config.build(config.Optimizer, {"groups": groups})


def test_narrow_moments_are_half_as_large_and_follow_the_wide_ones():
    """After a thousand gradients, compared with Adam's own moments in float64."""
    narrow = config.Optimizer(moments_dtype="bfloat16", clip_norm=1e9)
    params = {"kernel": jnp.zeros((64, 64))}
    rng, b1, b2 = np.random.default_rng(0), narrow.b1, narrow.b2
    gradients = rng.normal(1.0, 0.3, (50, 64, 64)).astype(np.float32)

    @jax.jit
    def twenty_times(params):
        def step(state, gradient):
            direction, state = optimizer.update(narrow, {"kernel": gradient}, state, params)
            return state, direction["kernel"]

        start = optimizer.init(narrow, params)
        return jax.lax.scan(step, start, jnp.tile(gradients, (20, 1, 1)))

    state, directions = twenty_times(params)
    adam = state[1][0]
    assert adam.mu["kernel"].dtype == adam.nu["kernel"].dtype == jnp.bfloat16
    mu = nu = np.zeros((64, 64))
    for gradient in np.tile(gradients.astype(np.float64), (20, 1, 1)):
        mu, nu = b1 * mu + (1 - b1) * gradient, b2 * nu + (1 - b2) * gradient**2
    # With rounding to nearest, the second moment would stop growing at about a quarter.
    np.testing.assert_allclose(np.mean(np.float64(adam.nu["kernel"])), nu.mean(), rtol=0.01)
    assert np.abs(np.float64(adam.nu["kernel"]) / nu - 1).mean() < 0.1
    expected = (mu / (1 - b1**1000)) / np.sqrt(nu / (1 - b2**1000))
    np.testing.assert_allclose(np.mean(directions[-1]), expected.mean(), rtol=0.02)


def test_narrow_moments_have_the_same_bits_twice():
    narrow = config.Optimizer(moments_dtype="bfloat16")
    params = {"kernel": jnp.ones((16, 16))}
    gradient = {"kernel": jnp.linspace(0.1, 1.0, 256).reshape(16, 16)}
    states = [
        optimizer.update(narrow, gradient, optimizer.init(narrow, params), params)[1]
        for _ in range(2)
    ]
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one, two)
