# SPDX-License-Identifier: Apache-2.0
"""Matrices in 8 bits: how far a product moves, and what stays as it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import config
from sparse_lavida_jax.models import fuse, quantize

SETTINGS = tiny.model_settings()
# Largest difference over the largest value: of a column of a product (measured 0.018, 0.028 and
# 0.072), and of logits after three layers.
ERROR = {"int8": (0.03, 0.06), "w8a8": (0.04, 0.1), "fp8": (0.1, 0.4)}


@pytest.mark.parametrize("method", config.QUANTIZED)
def test_a_product_in_8_bits_is_close(method):
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(64, 48)) * np.geomspace(0.1, 10, 48), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 5, 64)), jnp.float32)
    linear = quantize.QuantizedLinear(fuse.Matrix(kernel), method)
    assert linear.kernel.dtype.itemsize == 1
    error = jnp.abs(linear(x) - x @ kernel).max(axis=(0, 1)) / jnp.abs(x @ kernel).max(axis=(0, 1))
    assert 0 < error.max() < ERROR[method][0]
    np.testing.assert_allclose(linear(x, 7), linear(x)[..., :7], rtol=0, atol=1e-5)
    assert linear(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_nothing_is_rounded_to_nothing():
    values, scale = quantize.rounded(jnp.zeros((3, 4)), jnp.dtype("int8"), axis=0)
    assert not values.any() and not scale.any()


@pytest.mark.slow
@pytest.mark.parametrize("method", config.QUANTIZED)
def test_logits_stay_close_and_only_layers_change(method):
    model = tiny.denoiser(SETTINGS)
    ours = quantize.quantized(fuse.for_inference(model, by_layer=True), method)
    assert {x.dtype.itemsize for x in jax.tree.leaves(ours.joint_layers)} == {1, 4}
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((ours.image_head, ours.vision)))
    asked = tiny.batch(["image"], SETTINGS)

    @tiny.quick_jit
    def logits(model):
        hidden, _ = model(asked.understanding, asked.generation, wanted="generation")
        return model.image_logits(hidden["generation"])

    # The same of the stacked, unfused model: a method changes numbers, not where they lie.
    stacked = logits(quantize.quantized(model, method))
    plain, fused = logits(model), logits(ours)
    assert 0 < jnp.abs(fused - plain).max() / jnp.abs(plain).max() < ERROR[method][1]
    assert jnp.abs(stacked - plain).max() / jnp.abs(plain).max() < ERROR[method][1]


def test_a_response_may_be_sampled_in_8_bits():
    model = quantize.quantized(tiny.denoiser(SETTINGS), "int8")
    settings = traces.settings_of("sparse", "image", SETTINGS)
    asked = [tiny.request("image", SETTINGS, 0, words=3)]
    canvas = traces.finished(model, asked, traces.plan(asked, settings, num_steps=2), settings)
    assert (canvas < SETTINGS.codebook_size).all()


def test_what_cannot_be_is_told():
    model = tiny.denoiser(SETTINGS)
    with pytest.raises(config.ConfigError, match="quantize='int4' is unknown: use one of int8,"):
        quantize.quantized(model, "int4")
    with pytest.raises(config.ConfigError, match="quantize"):
        config.Sampling(quantize="int4")
    once = quantize.quantized(model, "int8")
    with pytest.raises(config.ConfigError, match="quantise merged parameters once"):
        quantize.quantized(once, "int8")
    with pytest.raises(ValueError, match="call for_inference first"):
        fuse.for_inference(once)
    assert dataclasses.asdict(config.Sampling())["quantize"] == ""
