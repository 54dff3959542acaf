# SPDX-License-Identifier: Apache-2.0
"""Norms, projections and rotary positions against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from sparse_lavida_jax.models import layers, quantize
from sparse_lavida_jax.models.denoiser import Denoiser

TOLERANCE = 2e-6
SETTINGS = tiny.model_settings(width=64, mlp_hidden=128)


@pytest.fixture(scope="module")
def layer():
    return tiny.quick_jit(lambda: layers.Layer(SETTINGS, rngs=nnx.Rngs(0)))()


def arbitrary(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rotated(x, position, heads=1, theta=100.0):
    turn = layers.rotary(jnp.asarray(position), x.shape[-1] // heads, theta)
    return np.asarray(layers.rotate(jnp.asarray(x), turn, heads))


def test_rotation_turns_half_split_pairs_as_complex_numbers():
    x, position = arbitrary(2, 3, 2 * 8), np.array([[0, 5, 1000], [3, 3, 7]])
    turned = rotated(x, position, heads=2)
    for b, s, h in np.ndindex(2, 3, 2):
        head = x[b, s, h * 8 : (h + 1) * 8].astype(np.float64)
        angle = position[b, s] * 100.0 ** (-np.arange(4) / 4)
        pairs = (head[:4] + 1j * head[4:]) * np.exp(1j * angle)
        expected = np.concatenate([pairs.real, pairs.imag])
        np.testing.assert_allclose(turned[b, s, h * 8 : (h + 1) * 8], expected, atol=1e-4)


def test_rotated_products_depend_on_the_distance_only():
    q, k = arbitrary(1, 1, 16), arbitrary(1, 1, 16, seed=1)

    def product(at, to):
        return (rotated(q, np.array([[at]])) * rotated(k, np.array([[to]]))).sum()

    assert product(3, 8) == pytest.approx(product(40, 45), abs=1e-4)
    assert product(3, 8) != pytest.approx(product(3, 9), abs=1e-2)


def test_norm_divides_by_the_root_mean_square():
    norm, x = layers.RmsNorm(8, 1e-5), arbitrary(2, 3, 8)
    norm.weight[...] = jnp.asarray(arbitrary(8, seed=1))
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    expected *= arbitrary(8, seed=1)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, atol=TOLERANCE)


def test_norm_of_a_narrow_vector_is_that_of_the_zero_padded_one():
    norm, x = layers.RmsNorm(8, 1e-5), arbitrary(2, 3, 5)
    norm.weight[...] = jnp.asarray(arbitrary(8, seed=1))
    padded = np.pad(x, ((0, 0), (0, 0), (0, 3)))
    wide = np.asarray(norm(jnp.asarray(padded)))
    np.testing.assert_allclose(norm(jnp.asarray(x), 8), wide[..., :5], atol=TOLERANCE)
    assert not wide[..., 5:].any()


def test_first_outputs_of_a_matrix_are_those_of_the_whole():
    matrix, x = layers.Linear(6, 8, rngs=nnx.Rngs(0)), jnp.asarray(arbitrary(2, 3, 6))
    assert matrix(x, 5).shape == (2, 3, 5)
    np.testing.assert_allclose(matrix(x, 5), matrix(x)[..., :5], atol=TOLERANCE)
    np.testing.assert_allclose(matrix(x), x @ matrix.kernel[...], atol=TOLERANCE)


def test_swiglu_is_down_of_silu_gate_times_up():
    mlp, x = layers.SwiGlu(4, 6, rngs=nnx.Rngs(0)), arbitrary(1, 2, 4)
    gate, up, down = (np.asarray(m.kernel[...], np.float64) for m in (mlp.gate, mlp.up, mlp.down))
    opened = x @ gate
    expected = (opened / (1 + np.exp(-opened)) * (x @ up)) @ down
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, atol=TOLERANCE)


def test_a_generation_token_reads_only_its_share_of_the_common_projection(layer):
    x = jnp.asarray(arbitrary(1, 2, SETTINGS.generation_width))
    attended = jnp.asarray(arbitrary(1, 2, SETTINGS.num_heads * SETTINGS.head_dim))
    before = layer.finish(layer.generation, x, attended)
    assert before.shape == x.shape
    changed = jax.tree.map(lambda p: p, layer)
    kernel = changed.attn_out.kernel
    kernel[...] = kernel[...].at[:, SETTINGS.generation_width :].set(1e3)
    np.testing.assert_array_equal(changed.finish(changed.generation, x, attended), before)


def test_matrices_start_with_the_deviation_of_one_over_the_root_of_their_inputs(layer):
    for matrix in (layer.understanding.q, layer.understanding.mlp.down, layer.attn_out):
        kernel = np.asarray(matrix.kernel[...])
        assert kernel.std() * kernel.shape[0] ** 0.5 == pytest.approx(1.0, rel=0.1)


def test_keys_start_as_queries_so_that_attention_starts_by_likeness(layer):
    for branch in (layer.understanding, layer.generation):
        np.testing.assert_array_equal(branch.k.kernel[...], branch.q.kernel[...])


@pytest.mark.parametrize("residual", [jnp.bfloat16, jnp.float32])
def test_products_are_in_the_compute_dtype_and_the_stream_keeps_its_own(residual):
    settings = dataclasses.replace(SETTINGS, compute_dtype="bfloat16")
    layer = layers.Layer(settings, rngs=nnx.Rngs(0))
    x = jnp.asarray(arbitrary(1, 2, SETTINGS.width), residual)
    q, k, v = layer.understanding.qkv(
        x, layers.rotary(jnp.array([[0, 1]]), SETTINGS.head_dim, 100.0)
    )
    assert q.dtype == k.dtype == v.dtype == jnp.bfloat16
    assert layer.finish(layer.understanding, x, v).dtype == residual


def test_gradients_of_a_matrix_are_those_of_the_plain_product():
    linear, x = layers.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.asarray(arbitrary(2, 5, 4))
    pulled = jnp.asarray(arbitrary(2, 5, 3, seed=1))

    def product(x, linear):
        return (linear(x) * pulled).sum()

    def plain(x, linear):
        return (x @ linear.kernel[...] * pulled).sum()

    for which in (0, 1, (0, 1)):
        found, expected = (jax.grad(each, which)(x, linear) for each in (product, plain))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_of_a_frozen_matrix_no_input_is_kept():
    linear, x = layers.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.asarray(arbitrary(2, 5, 4))
    kept = jax.tree.leaves(jax.vjp(linear, x)[1])
    assert {leaf.shape for leaf in kept} == {(4, 3)}


def test_gradients_of_matrices_are_summed_in_float32():
    """With bfloat16 activations, nothing is rounded before the sum over all tokens."""
    plain = layers.Linear(16, 8, rngs=nnx.Rngs(0))
    wide = layers.Linear(16, 8, rngs=nnx.Rngs(0))
    wide.wide_gradient = True
    x, pulled = (
        jax.random.normal(jax.random.key(i), (2, 64, width), jnp.bfloat16)
        for i, width in enumerate((16, 8))
    )
    for width in (None, 5):  # all outputs, and the first of them
        out, back = jax.vjp(lambda m, x, w=width: m(x, w), wide, x)
        same, plain_back = jax.vjp(lambda m, x, w=width: m(x, w), plain, x)
        np.testing.assert_array_equal(out, same)
        to_wide, to_x = back(pulled[..., :width])
        to_plain, to_same = plain_back(pulled[..., :width])
        np.testing.assert_array_equal(to_x, to_same)
        exact = jnp.einsum(
            "bsi,bso->io", x.astype(jnp.float32), pulled[..., :width].astype(jnp.float32)
        )
        found = to_wide.kernel[...][:, :width]
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)
        rounded = to_plain.kernel[...][:, :width]
        assert jnp.abs(rounded - exact).max() > 10 * jnp.abs(found - exact).max()


def test_gradients_of_adapters_are_summed_in_float32():
    """With bfloat16 factors, each as returned by a product of the forward or backward pass."""
    plain, wide = (layers.Linear(16, 8, rngs=nnx.Rngs(0)) for _ in range(2))
    wide.wide_gradient = True
    x, pulled, a, b = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate(((2, 64, 16), (2, 64, 8), (16, 4), (4, 8)))
    )
    for linear in (plain, wide):
        linear.lora_a, linear.lora_b = (nnx.Param(m.astype(jnp.float32)) for m in (a, b))
        linear.lora_scale = 2.0  # exact in any dtype
    (out, back), (same, plain_back) = (jax.vjp(lambda m: m(x), m) for m in (wide, plain))
    np.testing.assert_array_equal(out, same)
    (found,), (rounded,) = back(pulled), plain_back(pulled)
    exact = {
        "lora_a": (x, (2 * pulled) @ b.T),
        "lora_b": (x @ a, 2 * pulled),
    }
    for name, factors in exact.items():
        left, right = (factor.astype(jnp.float32) for factor in factors)
        sums = jnp.einsum("bsi,bso->io", left, right)
        error, plain_error = (
            jnp.abs(getattr(each, name)[...] - sums).max() for each in (found, rounded)
        )
        assert plain_error > 10 * error, name


def test_a_model_in_bfloat16_sums_in_the_dtype_of_its_settings():
    for settings, expected in (
        ({"compute_dtype": "bfloat16"}, True),
        ({"compute_dtype": "bfloat16", "grad_reduce_dtype": "compute"}, False),
        ({}, False),
    ):
        model = jax.eval_shape(
            lambda s=settings: Denoiser(tiny.model_settings(**s), rngs=nnx.Rngs(0))
        )
        linear = model.joint_layers.understanding.q
        assert linear.wide_gradient is expected
        assert model.split_layers.generation.mlp.up.wide_gradient is expected
        assert model.image_embedding.code.wide_gradient is expected
        assert model.image_head.cell.wide_gradient is expected
        rounded = jax.eval_shape(lambda m: quantize.quantized(m, "int8"), model)
        assert rounded.joint_layers.understanding.q.wide_gradient is expected
