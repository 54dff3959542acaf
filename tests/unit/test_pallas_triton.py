# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels: interpreted against the reference, and lowered for an absent GPU."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    TAGS,
    TOLERANCE,
    S,
    T,
    any_blocks,
    as_arrays,
    draw,
    horizons,
    packed_tags,
    reference,
    reference_and_gradients,
    sorted_tags,
)  # fmt: skip

from sparse_lavida_jax.kernels import attention, devices, tables
from sparse_lavida_jax.kernels.attention import run_kernel, step_causal_attention
from sparse_lavida_jax.kernels.common import NOTHING_SEEN_LSE, Shape

HAS_TRITON = attention._has_triton()
if HAS_TRITON:
    from sparse_lavida_jax.kernels import pallas_triton
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="this jax has no Triton any more")
RULE = devices.gpu_rule("pallas_triton")
OTHER = tables.GpuSizes(128, 2, 128, 2, 128, 2)
TIMES = 4  # every token, so that rows have tiles of each class


def longer(tags):
    return as_arrays(None if tag is None else np.repeat(tag, TIMES, axis=1) for tag in tags)


def shape_of(heads, kv_heads, head_dim, sizes=RULE):
    return Shape(heads, kv_heads, head_dim, head_dim**-0.5, sizes, True)


@functools.partial(jax.jit, static_argnames="shape")
def kernel_and_gradients(q, k, v, pulled, pulled_lse, tags, shape):
    found, pull_back = jax.vjp(lambda *qkv: run_kernel(pallas_triton, *qkv, tags, shape), q, k, v)
    return found, pull_back((pulled, pulled_lse))


def check(tags, shape, dtype=jnp.float32, tolerance=TOLERANCE, times=1):
    """Checks output, log-sum-exp and gradients, and that every further run gives the same bits."""
    heads = shape.num_heads, shape.num_kv_heads
    *qkv, pulled = draw(
        np.random.default_rng(0), *heads, shape.head_dim, dtype, (TIMES * S, TIMES * T)
    )
    wide = [x.astype(jnp.float32) for x in (*qkv, pulled)]
    seen = np.asarray(reference(*wide[:3], tags, shape.head_dim)[1]) < NOTHING_SEEN_LSE
    pulled_lse = jnp.asarray(np.random.default_rng(1).normal(size=seen.shape) * seen, jnp.float32)
    found, *again = (
        kernel_and_gradients(*qkv, pulled, pulled_lse, tags, shape) for _ in range(times)
    )
    for other in again:
        jax.tree.map(np.testing.assert_array_equal, found, other)
    wanted = reference_and_gradients(*wide, pulled_lse, tags, shape.head_dim)
    (out, lse), _ = found
    assert not np.asarray(out)[~seen.any(axis=1)].any()
    assert (np.asarray(lse)[~seen] == np.float32(NOTHING_SEEN_LSE)).all()
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        ours = np.asarray(ours, np.float32)
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)


@needs_triton
@pytest.mark.parametrize("name", TAGS)
def test_output_and_gradients_are_those_of_the_reference(name):
    check(longer(TAGS[name](np.random.default_rng(0))), shape_of(4, 2, 8))


@needs_triton
def test_heads_of_the_release_in_other_tiles():
    check(longer(sorted_tags(np.random.default_rng(0))), shape_of(1, 1, 128, OTHER))


@needs_triton
def test_bfloat16_is_close_and_gives_the_same_bits_twice():
    tags = longer(packed_tags(np.random.default_rng(0)))
    check(tags, shape_of(2, 1, 64), jnp.bfloat16, 2e-2, times=2)


@needs_triton
@hypothesis.settings(max_examples=20)
@hypothesis.given(any_blocks(S, T))
def test_whatever_the_tags(drawn):
    query_block, key_block, num_clean = drawn
    horizon = horizons(query_block, num_clean)
    check(longer((query_block, horizon, key_block, None, None)), shape_of(1, 1, 8))


@needs_triton
@pytest.mark.parametrize("name", ["cache_tags", "sorted_tags"])
def test_the_entry_runs_the_kernel_on_a_layer_of_a_stacked_cache(name):
    tags = longer(TAGS[name](np.random.default_rng(0)))[:3]
    rng, slots = np.random.default_rng(1), tags[2].shape[1]
    q, *_ = draw(rng, 2, 1, 64, jnp.bfloat16, (tags[0].shape[1], slots))
    k, v = (jnp.asarray(rng.normal(size=(3, 2, slots, 64)), q.dtype) for _ in range(2))
    attend = functools.partial(
        step_causal_attention, num_heads=2, num_kv_heads=1, layer=jnp.int32(2)
    )
    found = attend(q, k, v, *tags, implementation="pallas_triton").astype(jnp.float32)
    wanted = attend(q, k, v, *tags, implementation="reference").astype(jnp.float32)
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-2)


@needs_triton
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("segments", [False, True])
def test_it_lowers_for_an_a100_through_a_loop_over_layers(segments):
    """Forward and both gradients; no GPU, no CUDA."""
    from jax.sharding import AbstractDevice, AbstractMesh

    wide = jax.ShapeDtypeStruct((1, 512, 4 * 128), jnp.bfloat16)
    tag = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    shape = Shape(4, 4, 128, 128**-0.5, RULE)

    def loss(x, tags):
        def layer(x, _):
            return run_kernel(pallas_triton, x, x, x, tags, shape)[0], None

        return jax.lax.scan(layer, x, None, length=3)[0].astype(jnp.float32).sum()

    given = (tag,) * 5 if segments else (tag,) * 3 + (None,) * 2
    device = AbstractDevice(device_kind="NVIDIA A100", num_cores=108, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        program = jax.jit(jax.grad(loss)).trace(wide, given)
        lowered = program.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3


@needs_triton
@pytest.mark.parametrize(("dtype", "head_dim"), [(jnp.float32, 64), (jnp.bfloat16, 32)])
def test_what_does_not_fit_its_tiles_is_refused(dtype, head_dim):
    tags = longer(sorted_tags(np.random.default_rng(0)))[:3]
    q, k, v, _ = draw(np.random.default_rng(0), 1, 1, head_dim, dtype, (TIMES * S, TIMES * T))
    with pytest.raises(ValueError, match="takes bfloat16 or float16 and heads of 64 or 128"):
        step_causal_attention(q, k, v, *tags, num_heads=1, implementation="pallas_triton")
