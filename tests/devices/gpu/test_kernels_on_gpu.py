# SPDX-License-Identifier: Apache-2.0
"""Kernel and blockwise attention on this GPU against the reference: outputs and gradients."""

import functools

import einops
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import TAGS, as_arrays

from sparse_lavida_jax.kernels import attention, shapes
from sparse_lavida_jax.kernels.common import NOTHING_SEEN_LSE

HEADS, TOKENS = 4, 16  # repetitions of every token of a case
TOLERANCE = 2e-2  # of bfloat16
LAYERS, LAYER = 3, 2


@pytest.fixture(params=["pallas_gpu", "pallas_triton", "blockwise"])
def implementation(request, gpu):
    """Triton's kernel runs on Hopper too, where it is not the first choice."""
    own = attention.device_kernel()
    if request.param == "pallas_gpu" != own or (request.param == "pallas_triton" and own is None):
        pytest.skip(f"this kernel is not for {gpu.device_kind} with jax {jax.__version__}")
    return request.param


@functools.partial(jax.jit, static_argnames=("implementation", "heads"))
def both_ways(q, k, v, pulled, tags, implementation, heads):
    def attend(q, k, v):
        return attention.step_causal_attention(
            q, k, v, *tags[:3], num_heads=heads, query_segment=tags[3], key_segment=tags[4],
            implementation=implementation, return_lse=True,
        )  # fmt: skip

    (out, lse), pull_back = jax.vjp(attend, q, k, v)
    return out, lse, *pull_back((pulled, jnp.zeros_like(lse)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", TAGS)
def test_output_and_gradients_are_those_of_the_reference(implementation, name, head_dim):
    rng = np.random.default_rng(0)
    tags = as_arrays(
        None if tag is None else np.repeat(tag, TOKENS, axis=1) for tag in TAGS[name](rng)
    )
    lengths = (tags[0].shape[1], tags[2].shape[1], tags[2].shape[1], tags[0].shape[1])
    given = [jnp.asarray(rng.normal(size=(2, n, HEADS * head_dim)), jnp.bfloat16) for n in lengths]
    out, lse, *gradients = both_ways(*given, tags, implementation, HEADS)
    again = both_ways(*given, tags, implementation, HEADS)
    for first, second in zip((out, lse, *gradients), again, strict=True):
        np.testing.assert_array_equal(first, second)
    wide = [x.astype(jnp.float32) for x in given]
    with jax.default_matmul_precision("highest"):
        wanted, wanted_lse, *wanted_gradients = both_ways(*wide, tags, "reference", HEADS)
    seen = np.asarray(wanted_lse) < NOTHING_SEEN_LSE
    np.testing.assert_allclose(
        np.where(seen, lse, 0), np.where(seen, wanted_lse, 0), rtol=1e-3, atol=1e-3
    )
    assert not np.asarray(einops.rearrange(out, "b s (h d) -> b h s d", h=HEADS))[~seen].any()
    for found, expected in zip((out, *gradients), (wanted, *wanted_gradients), strict=True):
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected, rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["decode_early", "decode_mid", "decode_late", "t2i_1536"])
def test_a_layer_of_a_stacked_cache_is_attended_to_as_by_the_reference(
    implementation, name, head_dim
):
    """A batch of two equal rows: of early, middle and late sampler steps, and of a training row."""
    frozen = shapes.tags(name)
    tags = [
        np.stack([tag] * 2) for tag in (frozen.query_block, frozen.query_horizon, frozen.key_block)
    ]
    rng, width = np.random.default_rng(0), HEADS * head_dim
    q = jnp.asarray(rng.normal(size=(2, tags[0].shape[1], width)), jnp.bfloat16)
    stacked = (LAYERS, 2, tags[2].shape[1], width)
    k, v = (jnp.asarray(rng.normal(size=stacked), jnp.bfloat16) for _ in range(2))

    @functools.partial(jax.jit, static_argnames="implementation")
    def attend(q, k, v, layer, implementation):
        return attention.step_causal_attention(
            q, k, v, *tags, num_heads=HEADS, layer=layer, implementation=implementation
        )

    found, again = (attend(q, k, v, LAYER, implementation) for _ in range(2))
    np.testing.assert_array_equal(found, again)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        wanted = attend(*wide, LAYER, "reference")
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=TOLERANCE, atol=TOLERANCE)
