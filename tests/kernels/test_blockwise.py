# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention in plain `lax` stores no mask and computes no tile that nobody sees."""

import math
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import traces
from kernel_cases import (
    as_arrays,
    cache_tags,
    draw,
    sorted_tags,
)  # fmt: skip

from sparse_lavida_jax.kernels import blockwise, devices, tile_lists
from sparse_lavida_jax.kernels.attention import make_tables, run_kernel, step_causal_attention
from sparse_lavida_jax.kernels.common import Shape


def test_tiles_that_nobody_sees_are_not_computed():
    """Keys in unseen tiles have values that would turn products into NaN."""
    rng = np.random.default_rng(0)
    tags = as_arrays(cache_tags(rng))  # slots from 45 on are empty, whole tiles from 64 on
    q, k, v, pulled = draw(rng, 1, 1, 8)
    shape = Shape(1, 1, 8, 8**-0.5, tile_lists.TileSizes(16, 16, 16))
    k, v = (x.at[:, 64:].set(jnp.nan) for x in (k, v))

    @tiny.quick_jit
    def blocks_and_gradients(*qkv):
        result, pull_back = jax.vjp(lambda *qkv: run_kernel(blockwise, *qkv, tags, shape), *qkv)
        return result, pull_back((pulled, jnp.zeros_like(result[1])))

    found = blocks_and_gradients(q, k, v)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_a_layer_of_a_stacked_cache_is_read_without_a_copy():
    rng = np.random.default_rng(0)
    q, *_ = draw(rng, 2, 2, 8)
    long = [jax.ShapeDtypeStruct((2, 2, 1024, 16), jnp.float32)] * 2
    tags = as_arrays((*cache_tags(rng)[:2], np.zeros((2, 1024), int)))
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    for name, copied in (("blockwise", False), ("reference", True)):

        def attend(q, k, v, layer, name=name):
            return step_causal_attention(
                q, k, v, *tags, num_heads=2, layer=layer, implementation=name
            )

        jaxpr = jax.make_jaxpr(attend)(q, *long, layer)
        assert ((2, 1024, 16) in shapes_in(jaxpr.jaxpr)) == copied


def test_tables_of_another_kind_are_refused():
    rng = np.random.default_rng(0)
    tags = as_arrays(sorted_tags(rng))
    *qkv, _ = draw(rng, 1, 1, 8)
    make = tiny.quick_jit(tile_lists.make_tables, static_argnames="sizes")
    other = make(*tags, sizes=tile_lists.GpuSizes())
    with pytest.raises(ValueError, match="of the queries"):
        step_causal_attention(
            *qkv, *tags[:3], num_heads=1, tables=other, implementation="blockwise"
        )


@pytest.mark.parametrize(
    ("length", "tile"), [(40, 128), (512, 512), (600, 384), (1536, 512), (8152, 512)]
)
def test_tiles_are_as_few_as_may_be_and_all_alike(length, tile):
    found = devices.blockwise_sizes(length, 2 * 512)
    assert (found.queries, found.keys, found.part) == (tile, 512, 512)


# ---------------------------------------------------------------------------------------------
# Memory.


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """Returns the shapes of all results, including inner programs."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {var.aval.shape for var in equation.outvars}
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found |= shapes_in(inner)
    return found


def program(implementation, length, **changes):
    """Returns forward and gradients of one row, 2 heads of 8, and shapes of its arguments."""

    def attend(q, k, v, pulled, tags):
        made = make_tables(*tags, implementation=implementation)

        def call(q, k, v):
            return step_causal_attention(
                q, k, v, *tags, num_heads=2, tables=made, implementation=implementation
            )

        out, pull_back = jax.vjp(call, q, k, v)
        return out, pull_back(pulled)

    wide = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    return attend, ((wide,) * 4, (jax.ShapeDtypeStruct((1, length), jnp.int32),) * 3)


@pytest.mark.parametrize(("implementation", "holds"), [("blockwise", False), ("reference", True)])
def test_no_array_has_a_number_for_every_pair_of_tokens(implementation, holds):
    length = 4096
    attend, (numbers, tags) = program(implementation, length)
    traced = jax.make_jaxpr(attend)(*numbers, tags)
    largest = max(map(math.prod, shapes_in(traced.jaxpr)))
    assert (largest >= length**2) == holds
    if not holds:
        hlo = jax.jit(attend).lower(*numbers, tags).compile().as_text()
        in_hlo = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", hlo)]
        assert max(in_hlo) < length**2
        assert 2 * devices.LARGEST_BLOCK**2 in in_hlo  # logits of a tile


def test_memory_grows_with_the_length_and_not_with_its_square():
    def temporary(implementation, length):
        attend, (numbers, tags) = program(implementation, length)
        compiled = tiny.quick_jit(attend).lower(*numbers, tags).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary("blockwise", 8192) < 2.1 * temporary("blockwise", 4096)
    assert temporary("reference", 2048) > 3.5 * temporary("reference", 1024)


# ---------------------------------------------------------------------------------------------
# Whole models.


def test_a_model_makes_its_tables_for_its_own_heads(monkeypatch):
    asked = []

    def watched(*tags, **named):
        asked.append((named["head_dim"], jnp.dtype(named["dtype"])))

    monkeypatch.setattr("sparse_lavida_jax.models.stack.make_tables", watched)
    settings = tiny.model_settings(compute_dtype="bfloat16")
    requests = [tiny.request("image", settings, 0, words=3)]
    asked_of = traces.settings_of("sparse", "image", settings)
    plan = traces.plan(requests, asked_of, num_steps=2)
    traces.moments(tiny.denoiser(settings), requests, plan, asked_of)
    assert set(asked) == {(16, jnp.dtype("bfloat16"))}
    assert devices.RELEASE_HEAD_DIM != 16
