# SPDX-License-Identifier: Apache-2.0
"""A kernel's forward and backward pass as one program, to be compiled for absent devices."""

import jax
import jax.numpy as jnp

from sparse_lavida_jax.kernels.attention import run_kernel


def traced(kernel, shape, sharding, length: int, num_tags: int):
    """Traces the kernel of a module over a row of tokens; five tags have segments."""

    def attend(q, k, v, tags, pulled):
        def forward(q, k, v):
            return run_kernel(kernel, q, k, v, (*tags, *[None] * (5 - num_tags)), shape)

        (out, lse), pull_back = jax.vjp(forward, q, k, v)
        return out, pull_back((pulled, jnp.zeros_like(lse)))

    def given(heads):
        width = heads * shape.head_dim
        return jax.ShapeDtypeStruct((1, length, width), jnp.bfloat16, sharding=sharding)

    wide, keys = given(shape.num_heads), given(shape.num_kv_heads)
    tag = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)
    return jax.jit(attend).trace(wide, keys, keys, (tag,) * num_tags, wide)
