# SPDX-License-Identifier: Apache-2.0
"""Kernels between the products of a decoding step: alone, in the sampler, and in admission."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces
from flax import nnx
from kernel_cases import records_of_races

from sparse_lavida_jax.kernels import admission, trial
from sparse_lavida_jax.models import fuse, layers, quantize, stack
from sparse_lavida_jax.models.cache import KVCache

HAS_KERNELS = jax.__version_info__ >= (0, 11)
if HAS_KERNELS:
    from sparse_lavida_jax.kernels import pallas_gpu, step_gpu
needs_kernels = pytest.mark.skipif(
    not HAS_KERNELS, reason="the kernels need jax 0.11: run the tests with Python 3.12 or later"
)
B, S = 2, 12


def drawn(*shape, dtype="bfloat16", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_same(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def assert_near(found, wanted):
    """Asserts that few tokens in float8 differ, by one step.

    An exponential may differ by a bit, and the compiler for CPUs leaves out roundings to bfloat16.
    """
    np.testing.assert_allclose(found[1], wanted[1], rtol=2**-7)
    values, others = (x[0].astype("float32") for x in (found, wanted))
    np.testing.assert_allclose(values, others, rtol=0.13, atol=2**-8)
    assert (values == others).mean() > 0.95


@needs_kernels
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["joint", "split"])
def test_queries_and_keys_are_rotated_and_stored_as_by_the_layers(kind, head_dim):
    """Also in an understanding region of a cache, after which other slots follow."""
    heads, decodes = 32, "understanding" if kind == "joint" else "generation"
    settings = tiny.model_settings(
        num_heads=heads, head_dim=head_dim, width=512, num_layers=5, compute_dtype="bfloat16"
    )
    cache = KVCache.empty(settings, B, 20, 24, decodes).advance(jnp.int32(5))
    qkv = drawn(B, S, 3 * heads * head_dim)
    turn = layers.rotary(jnp.arange(B * S).reshape(B, S) % 17, head_dim, 5e5)

    @jax.jit
    def plain(qkv, cache):
        q, k, v = jnp.split(qkv, 3, axis=-1)
        q, k = (layers.rotate(x, turn, heads) for x in (q, k))
        if kind == "joint":
            return q, cache.write_joint(jnp.int32(1), decodes, k, v)
        return q, cache.write_split(jnp.int32(1), k, v)

    def by_kernel(rotated, qkv, cache):
        def write(pair, first):
            return rotated(
                qkv, turn, pair, jnp.int32(1), cache.offset, first=first, head_dim=head_dim
            )

        return cache.write_decoded(kind, write)

    kernel = functools.partial(step_gpu.rotated, interpret=pallas_gpu.interpreted())
    wanted = plain(qkv, cache)
    for function in (kernel, step_gpu.reference_rotated):
        assert_same(jax.jit(functools.partial(by_kernel, function))(qkv, cache), wanted)


@needs_kernels
@pytest.mark.parametrize("residual", ["bfloat16", "float32"])
def test_a_sum_and_its_norm_are_those_of_the_layers(residual):
    x, parts = drawn(B, S, 512, dtype=residual), drawn(4, B, S, 512, dtype="float32", seed=1)
    norm = layers.RmsNorm(512, 1e-5)
    norm.weight = nnx.Param(drawn(512, seed=2))

    def plain(x, parts):  # not compiled: the compiler for CPUs would leave roundings out
        total = x + functools.reduce(jnp.add, parts).astype("bfloat16")
        return total, norm(total).astype("bfloat16")

    how = {"eps": 1e-5, "dtype": "bfloat16"}
    found = step_gpu.added(x, parts, norm.weight[...], **how, interpret=pallas_gpu.interpreted())
    assert_same(found, plain(x, parts))
    (product,) = one = parts[:1].astype("bfloat16")  # of a quantised matrix: not in parts
    found = step_gpu.added(x, one, norm.weight[...], **how, interpret=pallas_gpu.interpreted())
    assert_same(found, plain(x, product[None]))
    assert_same(step_gpu.reference_added(x, one, norm.weight[...], **how), plain(x, product[None]))


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
def test_tokens_are_rounded_to_float8_as_without_the_kernels(gated):
    """Also a token of zeros; and inputs that are products still to be scaled."""
    x = drawn(B, S, 2048 if gated else 1024).at[0, 0].set(0)
    scales = jnp.exp(drawn(B, S, 1, dtype="float32")), jnp.exp(drawn(x.shape[-1], dtype="float32"))
    for own in (None, scales):
        found = step_gpu.narrowed(
            x, own, dtype="bfloat16", gated=gated, interpret=pallas_gpu.interpreted()
        )
        wanted = step_gpu.reference_narrowed(x, own, dtype="bfloat16", gated=gated)
        assert found[0].dtype == jnp.float8_e4m3fn and found[1].shape == (B, S, 1)
        assert_near(found, wanted)
        if not gated and own is None:
            assert_same(found, quantize.rounded(x, jnp.dtype(jnp.float8_e4m3fn), axis=-1))


@needs_kernels
def test_a_sum_is_scaled_and_its_norm_rounded_to_float8():
    x, product, weight = drawn(B, S, 512), drawn(1, B, S, 512, seed=1), drawn(512, seed=2)
    scales = jnp.exp(drawn(B, S, 1, dtype="float32")), jnp.exp(drawn(512, dtype="float32"))
    how = {"eps": 1e-5, "dtype": "bfloat16", "narrow": True}
    total, normed = step_gpu.added(
        x, product, weight, scales, **how, interpret=pallas_gpu.interpreted()
    )
    scaled = (product[0].astype("float32") * scales[0] * scales[1][None, None]).astype("bfloat16")
    wanted = step_gpu.added(
        x, scaled[None], weight, eps=1e-5, dtype="bfloat16", interpret=pallas_gpu.interpreted()
    )
    assert_same(total, wanted[0])
    assert_near(normed, quantize.rounded(wanted[1], jnp.dtype(jnp.float8_e4m3fn), axis=-1))


def test_a_product_in_parts_is_the_product():
    matrix = fuse.Matrix(drawn(256, 64, dtype="float32"))
    x = drawn(B, S, 256, dtype="float32", seed=1)
    parts = fuse._in_parts(matrix, x)
    assert parts.shape == (fuse.PRODUCT_PARTS, B, S, 64)
    np.testing.assert_allclose(parts.sum(axis=0), matrix(x), rtol=1e-5, atol=1e-5)
    many = drawn(1, fuse.MOST_TOKENS_IN_PARTS + 1, 256, dtype="float32")
    assert_same(fuse._in_parts(matrix, many), matrix(many)[None])


@needs_kernels
@pytest.mark.parametrize(("modality", "method"), [("image", ""), ("text", ""), ("image", "fp8")])
def test_the_sampler_decodes_the_same_with_and_without(modality, method, monkeypatch):
    found, used, added = {}, [], step_gpu.added

    def counted(*given, **how):
        used.append(given)
        return added(*given, **how)

    monkeypatch.setattr(step_gpu, "added", counted)
    for way in ("plain", "pallas_gpu"):
        settings = tiny.model_settings(
            num_heads=32, head_dim=64, width=512, generation_width=512, compute_dtype="bfloat16",
            mlp_hidden=512, generation_mlp_hidden=512,
            attention_implementation="reference", step_implementation=way,
        )  # fmt: skip
        model = fuse.for_inference(tiny.denoiser(settings), task=modality, by_layer=True)
        model = quantize.as_asked(model, method)
        assert stack.step_implementation_of(model) == way
        how = traces.settings_of("sparse", modality, settings, guidance=2.0)
        asked = [tiny.request(modality, settings, 0, words=3)]
        plan = traces.plan(asked, how, num_steps=2, block_len=tiny.TEXT_LEN)
        found[way] = traces.finished(model, asked, plan, how, stop_early=False)
        assert bool(used) == (way == "pallas_gpu")
    np.testing.assert_array_equal(found["plain"], found["pallas_gpu"])


@needs_kernels
def test_nothing_is_overwritten_while_it_is_read(monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    records = records_of_races(monkeypatch, gpu_callbacks, "GPURaceDetectionState")
    interpret = pallas_gpu.interpreted(detect_races=True)
    pair, turn = (drawn(2, 1, 16, 4096), drawn(2, 1, 16, 4096)), jnp.ones((2, 1, 3, 64))
    place = jnp.int32(1), jnp.int32(2)
    how = {"first": 4, "head_dim": 128, "interpret": interpret}
    found = step_gpu.rotated(drawn(1, 3, 3 * 4096), turn, pair, *place, **how)
    sums = drawn(1, 3, 512), drawn(2, 1, 3, 512, dtype="float32")
    made = step_gpu.added(*sums, drawn(512), eps=1e-5, dtype="bfloat16", interpret=interpret)
    jax.block_until_ready((found, made))
    assert [record.races_found for record in records] == [False] * 2


def test_models_that_the_kernels_do_not_take_run_without():
    asked = {"step_implementation": "pallas_gpu"} if HAS_KERNELS else {}
    model = tiny.denoiser(tiny.model_settings(**asked))  # four heads, in float32
    for one in (model, fuse.for_inference(model, by_layer=True)):
        assert stack.step_implementation_of(one) == "plain"


@pytest.mark.skipif(HAS_KERNELS, reason="this jax has the kernels")
def test_without_the_kernels_the_setting_says_what_it_needs():
    settings = tiny.model_settings(step_implementation="pallas_gpu")
    model = fuse.for_inference(tiny.denoiser(settings), by_layer=True)
    with pytest.raises(ValueError, match=r"needs jax 0\.11"):
        stack.step_implementation_of(model)


@needs_kernels
def test_the_trial_of_the_kernels_passes_interpreted():
    interpret = pallas_gpu.interpreted()
    for name, run in trial.step_checks(rows=1, tokens=2, calls=1, interpret=interpret):
        found = run()
        assert name.startswith(admission.STEP)
        assert found["same_bits"] and found["off"] < admission.MOST_OFF
        assert min(found["kernel_us"], found["plain_us"]) > 0


GPU = {"device": "a GPU", "kernel": "pallas_gpu"}
RIGHT = {"off": 0.0, "same_bits": True, "kernel_us": 10.0, "plain_us": 30.0}


@pytest.mark.parametrize(
    ("found", "ended", "why"),
    [
        (RIGHT, "", ""),
        (RIGHT | {"off": 0.3}, "", "it is off by 0.3 on step: a"),
        (RIGHT | {"same_bits": False}, "", "it gives other bits the second time on step: a"),
        (RIGHT | {"kernel_us": 60.0}, "", "it takes 2.00 times as long as the step without it"),
        ({}, "ended with status -6", "the check ended with status -6, at step: a"),
    ],
)
def test_these_kernels_are_refused_apart_from_attention(found, ended, why):
    attention = {"check": "t2i", "off": 0.0, "same_bits": True}
    verdict = admission.judged([GPU, attention, {"check": "step: a", **found}], ended)
    assert verdict.why == "" and [one["check"] for one in verdict.checks] == ["t2i", "step: a"]
    assert verdict.step_why == (why and f"step_gpu is refused on a GPU: {why}")
    assert verdict.admits_step != bool(why)


def test_kernels_that_were_never_checked_do_not_run():
    verdict = admission.judged([GPU, {"check": "t2i", "off": 0.0}], "")
    assert not verdict.why and not verdict.step_why and not verdict.admits_step
