# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels: programs that share keys, lists of tiles, and copies that do not race."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    TAGS,
    as_arrays,
    draw,
    packed_tags,
    records_of_races,
    reference,
    reference_and_gradients,
    sorted_tags,
)  # fmt: skip

from sparse_lavida_jax.kernels import devices, tile_lists
from sparse_lavida_jax.kernels.attention import run_kernel, step_causal_attention
from sparse_lavida_jax.kernels.common import NOTHING_SEEN_LSE, Shape
from sparse_lavida_jax.visibility import PAD_BLOCK

HAS_KERNEL = jax.__version_info__ >= (0, 11)
if HAS_KERNEL:
    from sparse_lavida_jax.kernels import pallas_gpu
needs_kernel = pytest.mark.skipif(
    not HAS_KERNEL, reason="the GPU kernel needs jax 0.11: run the tests with Python 3.12 or later"
)
TOLERANCE = 2e-2  # of bfloat16
HEAD_DIM = 64
OTHER_SIZES = tile_lists.GpuSizes(64, 3, 128, 2, 128, 2)


def shape_of(heads, kv_heads, head_dim=HEAD_DIM, **interpreted):
    interpret = pallas_gpu.interpreted(**interpreted)
    sizes = tile_lists.GpuSizes()
    return Shape(heads, kv_heads, head_dim, head_dim**-0.5, sizes, interpret)


def longer(tags, times=4):
    """Tags with every token repeated, so that there are several tiles of each class."""
    return tuple(None if tag is None else np.repeat(tag, times, axis=1) for tag in tags)


def long_row(make):
    """One row, long enough for every kernel to overwrite tiles that it has read."""
    tags = longer(make(np.random.default_rng(0)), 8)
    return as_arrays(None if tag is None else tag[:1] for tag in tags)


def numbers_of(tags, heads, kv_heads, head_dim):
    """Returns q, k, v and the gradient of the output in bfloat16, of as many rows as the tags."""
    lengths = tags[0].shape[1], tags[2].shape[1]
    drawn = draw(np.random.default_rng(0), heads, kv_heads, head_dim, jnp.bfloat16, lengths)
    return [x[: tags[0].shape[0]] for x in drawn]


def kernel_and_gradients(q, k, v, pulled, pulled_lse, tags, shape):
    def attend(q, k, v):
        return run_kernel(pallas_gpu, q, k, v, tags, shape)

    found, pull_back = jax.vjp(attend, q, k, v)
    return found, pull_back((pulled, pulled_lse))


quick = jax.jit(kernel_and_gradients, static_argnames="shape")


def check_output_and_gradients(tags, shape, times=1):
    """Checks the kernels against the reference, and that results are reproducible bit for bit."""
    *qkv, pulled = numbers_of(tags, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    wide = [x.astype(jnp.float32) for x in (*qkv, pulled)]
    seen = np.asarray(reference(*wide[:3], tags, shape.head_dim)[1]) < NOTHING_SEEN_LSE
    pulled_lse = jnp.asarray(np.random.default_rng(1).normal(size=seen.shape) * seen, jnp.float32)
    found, *again = (quick(*qkv, pulled, pulled_lse, tags, shape=shape) for _ in range(times))
    for other in again:
        jax.tree.map(np.testing.assert_array_equal, found, other)
    (wanted, wanted_lse), wanted_gradients = reference_and_gradients(
        *wide, pulled_lse, tags, shape.head_dim
    )
    (out, lse), gradients = found
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)
    assert not np.asarray(out)[~seen.any(axis=1)].any()
    for ours, expected in zip((out, *gradients), (wanted, *wanted_gradients), strict=True):
        np.testing.assert_allclose(
            ours.astype(jnp.float32), expected, rtol=TOLERANCE, atol=TOLERANCE
        )


@needs_kernel
@pytest.mark.parametrize("splits", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_programs_that_share_the_keys_of_a_row_agree_with_the_reference(splits):
    """Some rows have fewer tiles than programs; others only padding, or nothing that they see."""
    for name in ("cache_tags", "nothing_seen", "padded_tags"):
        tags = as_arrays(longer(TAGS[name](np.random.default_rng(0)), 8))
        q, *_ = numbers_of(tags, 1, 1, HEAD_DIM)
        rng, slots = np.random.default_rng(1), tags[2].shape[1]
        k, v = (jnp.asarray(rng.normal(size=(3, 2, slots, HEAD_DIM)), q.dtype) for _ in range(2))
        shape = dataclasses.replace(shape_of(1, 1), splits=splits)
        run = jax.jit(functools.partial(run_kernel, pallas_gpu), static_argnums=4)
        out, lse = jax.block_until_ready(run(q, k, v, tags, shape, jnp.int32(2)))
        wanted, wanted_lse = reference(q, k[2], v[2], tags, HEAD_DIM)
        np.testing.assert_allclose(
            out.astype(jnp.float32), wanted.astype(jnp.float32), rtol=TOLERANCE, atol=TOLERANCE
        )
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)
        assert not np.asarray(out)[~(np.asarray(lse) < NOTHING_SEEN_LSE).any(axis=1)].any()


@needs_kernel
def test_the_bits_of_a_row_do_not_depend_on_its_batch():
    """Rows of a step over a cache, each with other tokens, and other tiles without a mask."""
    rows, queries, slots = 8, 64, 512
    block = np.full((rows, slots), PAD_BLOCK)
    for row in range(rows):
        block[row, : 400 - 50 * row], block[row, 400 - 50 * row : 432 - 50 * row] = 1, 2
    tags = as_arrays((np.full((rows, queries), 2), np.full((rows, queries), 1), block))
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(rows, queries, HEAD_DIM)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.normal(size=(1, rows, slots, HEAD_DIM)), q.dtype) for _ in range(2))
    shape = dataclasses.replace(shape_of(1, 1), splits=2)

    def attended(number: int):
        own = [tag[:number] for tag in tags]
        inputs = q[:number], k[:, :number], v[:, :number], (*own, None, None)
        run = jax.jit(functools.partial(run_kernel, pallas_gpu), static_argnums=4)
        return jax.device_get(run(*inputs, shape, jnp.int32(0)))

    every = attended(rows)
    for number in (1, 2, 4, 8):
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, y[: len(x)]), attended(number), every
        )


@needs_kernel
@pytest.mark.parametrize("rows", [1, 8])
def test_a_call_over_a_cache_chooses_the_same_number_of_programs_for_every_batch(rows):
    tags = [jnp.zeros((rows, length), jnp.int32) for length in (40, 40, 4096)]
    q, cache = (
        jnp.zeros((*of, 8 * HEAD_DIM), jnp.bfloat16) for of in ((rows, 40), (1, rows, 4096))
    )
    attend = functools.partial(
        step_causal_attention, num_heads=8, layer=0, implementation="pallas_gpu"
    )
    text = str(jax.make_jaxpr(attend)(q, cache, cache, *tags))
    assert f"bf16[{devices.MOST_SPLITS},{rows},40,512]" in text


def test_few_programs_share_the_keys_of_rows_and_many_do_not():
    assert [devices.splits_of(32, 80, slots) for slots in (256, 1792, 3840)] == [1, 2, 2]
    assert devices.splits_of(32, 160, 1792) == 1  # two tiles of queries
    assert devices.splits_of(8, 80, 4096) == devices.MOST_SPLITS


@needs_kernel
def test_lengths_that_eight_divides_are_neither_padded_nor_sliced():
    """The kernel is the only operation on features: no other is launched per layer."""
    tags = [jnp.zeros((2, length), jnp.int32) for length in (40, 40, 72)]
    q, cache = (jnp.zeros((*of, HEAD_DIM), jnp.bfloat16) for of in ((2, 40), (3, 2, 72)))

    def attend(q, cache):
        return run_kernel(pallas_gpu, q, cache, cache, (*tags, None, None), shape_of(1, 1), 1)[0]

    made = [x for x in jax.make_jaxpr(attend)(q, cache).eqns if x.outvars[0].aval.dtype == q.dtype]
    assert len(made) == 1, made


@pytest.mark.skipif(HAS_KERNEL, reason="this jax has the GPU kernel")
def test_without_the_kernel_the_entry_says_what_it_needs():
    rng = np.random.default_rng(0)
    tags = as_arrays(sorted_tags(rng))[:3]
    *qkv, _ = draw(rng, 1, 1, HEAD_DIM, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"needs jax 0\.11"):
        step_causal_attention(*qkv, *tags, num_heads=1, implementation="pallas_gpu")


@pytest.mark.parametrize("name", TAGS)
def test_rows_list_the_tiles_without_a_mask_first_and_none_twice(name):
    tags = as_arrays(longer(TAGS[name](np.random.default_rng(0))))
    made = tile_lists.make_tables(*tags, sizes=tile_lists.GpuSizes())
    short = tile_lists.make_tables(*tags, sizes=tile_lists.GpuSizes(), gradients=False)
    assert short.for_dq is None is short.for_dkv
    np.testing.assert_array_equal(short.forward.cols, made.forward.cols)
    whole = [
        jnp.asarray(tile_lists.padded_tags(tag, 128, fill)) if tag is not None else None
        for tag, fill in zip(tags, (2**30, -1, 2**30, 0, 0), strict=True)
    ]
    for lists, sizes, turned in (
        (made.forward, made.sizes.forward, False),
        (made.for_dq, made.sizes.dq, False),
        (made.for_dkv, made.sizes.dkv, True),
    ):
        how = {"sizes": sizes, "mask_padding": lists is not made.forward}
        classes = np.asarray(tile_lists.part_classes(*whole, **how))[..., 0]
        classes = classes.swapaxes(1, 2) if turned else classes
        listed = np.take_along_axis(classes, np.asarray(lists.cols), axis=-1)
        at = np.arange(classes.shape[-1])
        full, active = (np.asarray(n)[..., None] for n in (lists.num_full, lists.num_active))
        assert (listed[at < full] == tile_lists.FULL).all()
        assert (listed[(at >= full) & (at < active)] == tile_lists.PARTIAL).all()
        assert (listed[at >= active] == tile_lists.SKIP).all()
        np.testing.assert_array_equal(
            np.sort(lists.cols, axis=-1), np.broadcast_to(at, classes.shape)
        )
        if turned:
            assert lists.order is None
            continue
        order, lengths = np.asarray(lists.order), np.asarray(lists.num_active)
        assert (np.diff(np.take_along_axis(lengths, order, axis=-1)) <= 0).all()
        np.testing.assert_array_equal(
            np.sort(order), np.broadcast_to(np.arange(order.shape[-1]), order.shape)
        )


def test_few_queries_leave_the_tiles_of_a_cache_without_a_mask():
    """76 queries do not fill a tile, yet each sees all of the cache but the last tile in use."""
    block = np.full((1, 512), PAD_BLOCK)
    block[:, :400] = 1
    block[:, 300:376] = 2
    queries = np.full((1, 76), 2)
    made = tile_lists.make_tables(queries, queries, block, sizes=tile_lists.GpuSizes())
    assert made.forward.num_full.tolist() == [[3]] and made.forward.num_active.tolist() == [[4]]
    assert made.for_dq.num_full.tolist() == [[0]]


@pytest.fixture
def traced_anew():
    """Clears jax's caches, so that a patch applies to the test, and not to later ones."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@needs_kernel
@pytest.mark.parametrize("sizes", [tile_lists.GpuSizes(), OTHER_SIZES])
def test_nothing_is_overwritten_while_it_is_read(sizes, monkeypatch):
    """The interpreter simulates every barrier, but not wgmma."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    records = records_of_races(monkeypatch, gpu_callbacks, "GPURaceDetectionState")
    shape = dataclasses.replace(shape_of(1, 1, detect_races=True), sizes=sizes)
    check_output_and_gradients(long_row(packed_tags), shape)
    assert [record.races_found for record in records] == [False] * 3  # forward, dq, dkv


@needs_kernel
def test_programs_that_share_keys_overwrite_nothing_that_is_read(monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    records = records_of_races(monkeypatch, gpu_callbacks, "GPURaceDetectionState")
    tags = long_row(TAGS["cache_tags"])
    q, k, v, _ = numbers_of(tags, 1, 1, HEAD_DIM)
    shape = dataclasses.replace(shape_of(1, 1, detect_races=True), splits=2)
    jax.block_until_ready(run_kernel(pallas_gpu, q, k[None], v[None], tags, shape, 0))
    assert [record.races_found for record in records] == [False] * 2  # the parts, and their sum


@needs_kernel
@pytest.mark.parametrize("sizes", [tile_lists.GpuSizes(), OTHER_SIZES])
def test_a_tile_that_is_given_back_too_early_is_found_in_every_kernel(
    sizes, monkeypatch, traced_anew
):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    monkeypatch.setattr(pallas_gpu, "_read", lambda product: product)  # and not committed
    records = records_of_races(monkeypatch, gpu_callbacks, "GPURaceDetectionState")
    shape = dataclasses.replace(shape_of(1, 1, detect_races=True), sizes=sizes)
    tags = long_row(packed_tags)
    *qkv, pulled = numbers_of(tags, 1, 1, HEAD_DIM)
    nothing = jnp.zeros((1, 1, pulled.shape[1]))
    jax.block_until_ready(kernel_and_gradients(*qkv, pulled, nothing, tags, shape))
    assert [record.races_found for record in records] == [True] * 3
