# SPDX-License-Identifier: Apache-2.0
"""8-bit matrices: the error of a product, and what stays unchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces

from sparse_lavida_jax import config, main
from sparse_lavida_jax.checkpoints import manifest, model_folder, stores
from sparse_lavida_jax.models import fuse, parameters, quantize
from sparse_lavida_jax.scenes.tokenizer import SHIPPED

SETTINGS = tiny.model_settings()
# Largest difference divided by the largest value: for a column of a product (measured 0.018, 0.028
# and 0.072), and for logits after three layers.
ERROR = {"int8": (0.03, 0.06), "w8a8": (0.04, 0.1), "fp8": (0.1, 0.4)}


@pytest.mark.parametrize("method", config.QUANTIZED)
def test_a_product_in_8_bits_is_close(method):
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(64, 48)) * np.geomspace(0.1, 10, 48), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 5, 64)), jnp.float32)
    linear = quantize.QuantizedLinear(fuse.Matrix(kernel), method)
    assert linear.dtype.itemsize == 1 and linear.kernel_t.shape == (48, 64)
    error = jnp.abs(linear(x) - x @ kernel).max(axis=(0, 1)) / jnp.abs(x @ kernel).max(axis=(0, 1))
    assert 0 < error.max() < ERROR[method][0]
    np.testing.assert_allclose(linear(x, 7), linear(x)[..., :7], rtol=0, atol=1e-5)
    assert linear(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    stack = quantize.QuantizedLinear(fuse.Matrix(kernel[None]), method)
    of_stack = jax.tree.map(lambda leaf: leaf[0], stack)
    assert not of_stack.is_transposed
    np.testing.assert_allclose(of_stack(x), linear(x), rtol=1e-5, atol=1e-5)


def test_zeros_are_rounded_to_zeros():
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

    # The same for the stacked, unfused model: a method changes numbers, not their layout.
    stacked = logits(quantize.quantized(model, method))
    plain, fused = logits(model), logits(ours)
    assert 0 < jnp.abs(fused - plain).max() / jnp.abs(plain).max() < ERROR[method][1]
    assert jnp.abs(stacked - plain).max() / jnp.abs(plain).max() < ERROR[method][1]


def test_a_response_may_be_sampled_in_8_bits():
    model = quantize.quantized(tiny.denoiser(SETTINGS), "int8")
    settings = traces.settings_of("sparse", "image", SETTINGS)
    asked = [tiny.request("image", SETTINGS, 0, words=3)]
    responses = traces.finished(model, asked, traces.plan(asked, settings, num_steps=2), settings)
    assert (responses < SETTINGS.codebook_size).all()


def test_what_cannot_be_is_reported():
    model = tiny.denoiser(SETTINGS)
    with pytest.raises(config.ConfigError, match="quantize='int4' is unknown: use one of int8,"):
        quantize.quantized(model, "int4")
    with pytest.raises(config.ConfigError, match="quantize"):
        config.Sampling(quantize="int4")
    once = quantize.quantized(model, "int8")
    with pytest.raises(config.ConfigError, match="quantise merged parameters once"):
        quantize.quantized(once, "int8")
    with pytest.raises(config.ConfigError, match="whose matrices are int8: leave it out"):
        quantize.as_asked(once, "fp8")
    assert dataclasses.asdict(config.Sampling())["quantize"] == ""


def equal(one, other):
    expected, found = parameters.by_name(one), parameters.by_name(other)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert found[name].dtype == leaf.dtype
        np.testing.assert_array_equal(found[name], leaf)


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_matrices_in_8_bits_are_fused_as_they_are(method):
    model = tiny.denoiser(SETTINGS)
    first = quantize.quantized(fuse.for_inference(model, by_layer=True), method)
    equal(first, fuse.for_inference(quantize.quantized(model, method), by_layer=True))


def test_the_same_numbers_may_be_multiplied_by_another_method():
    once = quantize.quantized(tiny.denoiser(SETTINGS), "int8")
    assert quantize.as_asked(once, "") is once
    assert quantize.as_asked(once, "int8") is once
    other = quantize.as_asked(once, "w8a8")
    assert (quantize.method_of(other), quantize.method_of(once)) == ("w8a8", "int8")
    equal(other, once)


# ---------------------------------------------------------------------------------------------
# On disk.


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize") / "base"
    more = {"tokenizer_path": SHIPPED, "vq_folder": None, "readme": "# base\n"}
    model_folder.save_model(folder, tiny.denoiser(SETTINGS), config.Config(model=SETTINGS), **more)
    return folder


@pytest.mark.parametrize(("dtype", "method"), quantize.DTYPES.items())
def test_8_bits_on_disk_are_those_of_rounding_after_loading(base, tmp_path, dtype, method):
    narrow = tmp_path / "narrow"
    model_folder.copy(base, narrow, dtype=dtype)
    assert stores.narrow_dtype(narrow) == dtype
    sizes = [(each / "model.safetensors").stat().st_size for each in (narrow, base)]
    assert sizes[0] < 0.6 * sizes[1]  # the tables of this model are as large as its layers
    loaded = model_folder.load_model(narrow).model
    expected = quantize.quantized(model_folder.load_model(base).model, method)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    equal(loaded, expected)
    half = parameters.by_name(model_folder.load_model(narrow, dtype="bfloat16").model)
    kernel = half["joint_layers/attn_out/kernel"]
    assert kernel.dtype.itemsize == 1
    assert half["joint_layers/attn_out/scale"].dtype == jnp.float32
    assert half["text_head/kernel"].dtype == jnp.bfloat16


def test_logits_of_8_bits_on_disk_are_those_of_rounding_after_loading(base, tmp_path):
    model_folder.copy(base, tmp_path / "narrow", dtype="int8")
    asked = tiny.batch(["image"], SETTINGS)

    @tiny.quick_jit
    def logits(model):
        hidden, _ = model(asked.understanding, asked.generation, wanted="generation")
        return model.image_logits(hidden["generation"])

    wide = model_folder.load_model(base).model
    ours = logits(model_folder.load_model(tmp_path / "narrow").model)
    np.testing.assert_array_equal(ours, logits(quantize.quantized(wide, "int8")))


def test_8_bits_are_not_trained_nor_rounded_twice_nor_released(base, tmp_path):
    narrow = tmp_path / "narrow"
    words = ["--mode=export", f"--src={base}", f"--dst={narrow}", "--dtype=int8"]
    assert main.main(["main", *words]) == 0
    told = r"in 8 bits \(int8\), which is for sampling"
    with pytest.raises(model_folder.CheckpointError, match=told):
        model_folder.load_model(narrow, make_model=model_folder.make_denoiser)
    with pytest.raises(model_folder.CheckpointError, match="in 8 bits already"):
        model_folder.copy(narrow, tmp_path / "again", dtype="float8")
    assert model_folder.lineage(narrow)[1:] == [manifest.digest(base)]
    model_folder.copy(narrow, tmp_path / "again")
    assert model_folder.lineage(tmp_path / "again")[1:] == model_folder.lineage(narrow)
    words = ["--mode=convert", "--src=a", f"--dst={tmp_path / 'b'}", "--dtype=int8"]
    assert main.main(["main", *words]) == 2
