# SPDX-License-Identifier: Apache-2.0
"""What heads of `Model.neighbour_heads` attend to before any training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.models.layers import rotary, rotate

OFFSETS = (1, 2, 3, -1, -2, -3)
MODEL = config.Model(
    vocab_size=80, width=96, mlp_hidden=64, num_layers=3, dual_tower_layers=1, num_heads=6,
    head_dim=16, rope_theta=10_000.0, generation_width=32, generation_mlp_hidden=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def models() -> tuple[Denoiser, Denoiser]:
    """A model with neighbour heads, and the same model without."""
    with_them = dataclasses.replace(MODEL, neighbour_heads=OFFSETS)
    return tuple(Denoiser(each, rngs=nnx.Rngs(3)) for each in (with_them, MODEL))


def attention(model: Denoiser, words: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the attention weights of every head of the first layer, [heads query key]."""
    branch = jax.tree.map(lambda leaf: leaf[0], model.joint_layers.understanding)
    turn = rotary(jnp.asarray(positions)[None], MODEL.head_dim, MODEL.rope_theta)
    q, k, _ = branch.qkv(model.text_embedding[words][None], turn)
    q, k = (x[0].reshape(len(words), MODEL.num_heads, -1) for x in (q, k))
    logits = jnp.einsum("qhd,khd->hqk", q, k) / MODEL.head_dim**0.5
    return np.asarray(jax.nn.softmax(logits, axis=-1))


def test_each_head_looks_at_its_neighbour_whatever_the_words(models):
    rng = np.random.default_rng(0)
    for first in (0, 1000):
        words, positions = rng.integers(0, MODEL.vocab_size, 40), first + np.arange(40)
        found, without = (attention(model, words, positions) for model in models)
        for head, offset in enumerate(OFFSETS):
            query = np.arange(5, 35)
            given = found[head, query, query + offset]
            assert (found[head, query].argmax(axis=1) == query + offset).all()
            assert given.min() > 0.3
            assert without[head, query, query + offset].mean() < 0.1


def test_masked_words_and_registers_share_it(models):
    model, _ = models
    masks = np.full(40, MODEL.text_mask_id)
    found = attention(model, masks, np.arange(40))
    assert (found[0, 5:35].argmax(axis=1) == np.arange(6, 36)).all()
    np.testing.assert_allclose(
        model.register_understanding[...], model.text_embedding[MODEL.text_mask_id], rtol=1e-5
    )


def test_nothing_else_of_the_model_changes(models):
    changed = {
        jax.tree_util.keystr(path)
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(models[0]), jax.tree.leaves(models[1]), strict=True
        )
        if not np.array_equal(one, other)
    }
    assert {name.split(".")[1] for name in changed} == {
        "text_embedding", "register_understanding", "joint_layers",
    }  # fmt: skip
    assert sum("joint_layers" in name for name in changed) == 2  # q and k
    kernels = (model.joint_layers.understanding.q.kernel for model in models)
    later = [np.asarray(kernel[1]) for kernel in kernels]
    np.testing.assert_array_equal(*later)


def test_rotations_of_a_turned_key_meet_the_query_at_the_offset():
    """The definition that `neighbour_kernels` uses, by hand, for one rotation."""
    one = jnp.zeros((1, 2, 2)).at[:, :, 0].set(1.0)
    turned = jnp.array([[[np.cos(2.0), -np.sin(2.0)]] * 2])
    turn = rotary(jnp.array([[0, 2]]), 2, 10_000.0)
    q, k = (rotate(x, turn, 1)[0] for x in (one, turned))
    assert float(q[0] @ k[1]) == pytest.approx(1.0, abs=1e-5)


def test_no_more_than_there_are_heads():
    with pytest.raises(config.ConfigError, match="no more numbers than num_heads=2"):
        dataclasses.replace(MODEL, num_heads=2, neighbour_heads=(1, 2, 3))
