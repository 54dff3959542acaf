# SPDX-License-Identifier: Apache-2.0
"""The vision tower: number of tokens, their receptive fields, and the alignment of the pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.models import vision

SETTINGS = config.Vision(
    image_size=20, patch_size=4, width=16, num_layers=2, num_heads=2, mlp_hidden=24, pool=2
)


@functools.cache
def tiny(**changes) -> vision.VisionEncoder:
    settings = config.Vision(**{**config.to_dict(SETTINGS), **changes})
    return jax.jit(lambda: vision.VisionEncoder(settings, 12, rngs=nnx.Rngs(0)))()


run = jax.jit(lambda model, pixels: model(pixels))


def images(count: int, size: int = 20) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (count, size, size, 3), 0, 256).astype(jnp.uint8)


def test_tokens_are_as_many_as_the_config_says():
    # 5x5 patches: the last row and column fill no pooling window and are dropped.
    assert run(tiny(), images(3)).shape == (3, SETTINGS.num_tokens, 12) == (3, 4, 12)
    default = config.Vision()
    features = jax.eval_shape(
        lambda pixels: vision.VisionEncoder(default, 8, rngs=nnx.Rngs(0))(pixels), images(1, 96)
    )
    assert features.shape == (1, default.num_tokens, 8) == (1, 36, 8)


def test_a_tower_of_no_layers_has_as_many_tokens():
    assert run(tiny(num_layers=0), images(1)).shape == (1, 4, 12)


def test_numbers_between_minus_1_and_1_are_taken_as_they_are():
    seen = images(2)
    numbers = np.asarray(seen, np.float64) / 127.5 - 1
    expected = run(tiny(), seen)
    np.testing.assert_allclose(run(tiny(), jnp.asarray(numbers)), expected, atol=1e-5)


def test_tokens_know_where_they_are():
    plain = jnp.full((1, 20, 20, 3), 77, jnp.uint8)  # every patch is the same
    tokens = np.asarray(run(tiny(), plain))[0]
    assert np.abs(tokens[0] - tokens[1:]).max(axis=-1).min() > 1e-4


def test_every_token_sees_the_whole_image():
    pixels = images(1)
    changed = pixels.at[0, 0, 0].set(255 - pixels[0, 0, 0])
    moved = np.abs(np.asarray(run(tiny(), pixels) - run(tiny(), changed)))[0].max(axis=-1)
    assert (moved > 0).all()
    # Without layers only the token of that patch.
    bare = tiny(num_layers=0)
    moved = np.abs(np.asarray(run(bare, pixels) - run(bare, changed)))[0].max(axis=-1)
    assert moved[0] > 0 and (moved[1:] == 0).all()


def test_rows_of_a_batch_are_independent():
    pixels = images(3)
    together, alone = run(tiny(), pixels), run(tiny(), pixels[1:2])
    np.testing.assert_allclose(together[1:2], alone, atol=2e-6)


def test_the_pool_starts_as_an_average():
    model = tiny()
    x = jax.random.normal(jax.random.key(1), (1, 4, 4, 16))
    expected = np.asarray(x).reshape(1, 2, 2, 2, 2, 16).mean(axis=(2, 4))
    np.testing.assert_allclose(model.pool(x), expected, atol=1e-6)


def test_every_parameter_has_a_gradient():
    gradient = jax.jit(jax.grad(lambda m, x: jnp.sum(m(x) ** 2)))(tiny(), images(1))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        if not name.endswith("k.bias.value"):  # softmax does not see it
            assert float(jnp.abs(leaf).max()) > 0, name


def test_a_wrong_image_size_says_the_right_one():
    with pytest.raises(ValueError, match="16x16 pixels; it takes 20x20"):
        run(tiny(), images(1, 16))
