# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels: lists of tiles, costs, and copies that do not race."""

import functools

import einops
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from kernel_cases import (
    TAGS,
    TOLERANCE,
    S,
    T,
    as_arrays,
    draw,
    packed_tags,
    padded_tags,
    records_of_races,
    reference_and_gradients,
    sorted_tags,
)  # fmt: skip

from sparse_lavida_jax.kernels import pallas_tpu, tile_lists
from sparse_lavida_jax.kernels.attention import run_kernel, step_causal_attention
from sparse_lavida_jax.kernels.common import Shape
from sparse_lavida_jax.visibility import is_padding, visible

SIZES = tile_lists.TileSizes(queries=16, keys=32, part=16)


def shape_of(heads, kv_heads, head_dim, sizes=SIZES, interpret=True):
    return Shape(heads, kv_heads, head_dim, head_dim**-0.5, sizes, interpret)


@functools.partial(jax.jit, static_argnames="shape")
def kernel_and_gradients(q, k, v, pulled, pulled_lse, tags, shape):
    def attend(q, k, v):
        return run_kernel(pallas_tpu, q, k, v, tags, shape)

    found, pull_back = jax.vjp(attend, q, k, v)
    return found, pull_back((pulled, pulled_lse))


part_classes = tiny.quick_jit(functools.partial(tile_lists.part_classes, sizes=SIZES))


@pytest.mark.parametrize("name", TAGS)
def test_tiles_are_classed_by_what_is_visible_in_them(name):
    tags = as_arrays(TAGS[name](np.random.default_rng(1)))
    query_block, query_horizon, key_block, query_segment, key_segment = (
        None if tag is None else np.asarray(tag) for tag in tags
    )
    sees = np.asarray(visible(
        query_block[:, :, None], query_horizon[:, :, None], key_block[:, None],
        *(() if query_segment is None else (query_segment[:, :, None], key_segment[:, None])),
    ))  # fmt: skip
    real = ~np.asarray(is_padding(query_block))[:, :, None]
    sees = np.pad(sees & real, ((0, 0), (0, -S % 16), (0, -T % 32)))
    parts = einops.rearrange(sees, "b (i q) (j k) -> b i j q k", q=16, k=16)
    classes = np.asarray(part_classes(*tags)).reshape(parts.shape[:3])
    assert (classes[parts.any(axis=(-2, -1))] != tile_lists.SKIP).all()
    assert parts[classes == tile_lists.FULL].all()
    if name in ("sorted_tags", "one_block", "cache_tags"):  # and no tile is computed needlessly
        assert parts.any(axis=(-2, -1))[classes != tile_lists.SKIP].all()
        assert (classes[parts.all(axis=(-2, -1))] == tile_lists.FULL).all()


def test_every_row_of_tiles_is_opened_and_closed_once():
    make = tiny.quick_jit(functools.partial(tile_lists.make_tables, sizes=SIZES))
    made = make(*as_arrays(padded_tags(np.random.default_rng(0))))
    for tile_list, rows in ((made.by_query, 2 * 3), (made.by_key, 2 * 3)):
        used = slice(int(tile_list.count))
        place = np.stack([tile_list.batch, tile_list.row])[:, used]
        flags = np.asarray(tile_list.flags)[used]
        assert len(np.unique(place, axis=1).T) == rows
        for flag in (tile_lists.FIRST, tile_lists.LAST):
            opened = place[:, flags & flag != 0]
            assert opened.shape[1] == rows == len(np.unique(opened, axis=1).T)


def test_the_compiler_is_told_of_every_product(monkeypatch):
    """Forward: 2; backward: 3 and 4, for recomputed logits and the products of gradients."""
    told, call = [], pallas_tpu.pl.pallas_call

    def listening(kernel, **settings):
        told.append(settings["cost_estimate"])
        return call(kernel, **settings)

    monkeypatch.setattr(pallas_tpu.pl, "pallas_call", listening)
    jax.clear_caches()  # kernels that were traced before do not call it again
    rng = np.random.default_rng(0)
    *qkv, pulled = draw(rng, 1, 1, 8)
    tags, nothing = as_arrays(sorted_tags(rng)), jnp.zeros((2, 1, S))
    jax.eval_shape(kernel_and_gradients, *qkv, pulled, nothing, tags, shape_of(1, 1, 8))
    pairs = 2 * 48 * 96  # two rows, padded to whole tiles
    assert [cost.transcendentals for cost in told] == [pairs] * 3
    assert [cost.flops for cost in told] == [2 * n * pairs * 8 for n in (2, 3, 4)]
    told.clear()
    entry = functools.partial(step_causal_attention, num_heads=1, implementation="pallas_tpu")
    q, k, v = qkv
    jax.eval_shape(entry, q, k, v, *tags[:3])
    jax.eval_shape(
        functools.partial(entry, layer=1), q, jnp.stack([k] * 3), jnp.stack([v] * 3), *tags[:3]
    )
    alone, one_of_three = told
    assert alone.bytes_accessed == one_of_three.bytes_accessed > 0


@pytest.mark.parametrize("sizes", [(16, 24, 16), (0, 16, 16), (16, 15 * 16, 16)])
def test_tiles_that_do_not_fit_together_are_refused(sizes):
    with pytest.raises(ValueError, match="parts"):
        tile_lists.TileSizes(*sizes)


def test_nothing_is_overwritten_while_it_is_read(monkeypatch):
    """The TPU simulator tracks every copy and semaphore."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu as pltpu

    records = records_of_races(monkeypatch, interpret_pallas_call, "RaceDetectionState")
    rng = np.random.default_rng(0)
    tags = as_arrays(packed_tags(rng))
    *qkv, pulled = draw(rng, 1, 1, 128)
    nothing = jnp.zeros((2, 1, S))
    simulated = shape_of(1, 1, 128, interpret=pltpu.InterpretParams(detect_races=True))
    found = kernel_and_gradients(*qkv, pulled, nothing, tags, simulated)
    wanted = reference_and_gradients(*qkv, pulled, nothing, tags, 128)
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=TOLERANCE)
    assert [record.races_found for record in records] == [False] * 3  # forward, dq, dkv


def test_a_race_of_the_first_of_two_kernels_is_found(monkeypatch):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def copied(x, *, waits):
        def kernel(given, out, arrived_in, arrived):
            copy = pltpu.make_async_copy(given, arrived_in, arrived)
            copy.start()
            if waits:
                copy.wait()
            out[...] = arrived_in[...]
            if not waits:
                copy.wait()

        return pl.pallas_call(
            kernel,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
            interpret=pltpu.InterpretParams(detect_races=True),
        )(x)

    records = records_of_races(monkeypatch, interpret_pallas_call, "RaceDetectionState")
    jax.block_until_ready(copied(copied(jnp.ones((8, 128)), waits=False), waits=True))
    assert [record.races_found for record in records] == [True, False]
