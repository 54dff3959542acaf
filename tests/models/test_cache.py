# SPDX-License-Identifier: Apache-2.0
"""The cache against a list of slots: what is kept, overwritten, and never seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.visibility import PAD_BLOCK

BATCH, UNDERSTANDING, GENERATION = 2, 5, 9
JOINT, SPLIT, WIDTH = 2, 1, 4


def empty(decodes) -> KVCache:
    settings = tiny.model_settings(num_heads=1, head_dim=WIDTH)
    return KVCache.empty(settings, BATCH, UNDERSTANDING, GENERATION, decodes)


def write(cache, stream, tags, value):
    """Writes one pass: all layers, keys of `value` and values of -`value`."""
    tags = jnp.broadcast_to(jnp.asarray(tags, jnp.int32), (BATCH, len(tags)))
    cache = cache.begin(stream, tags)
    keys = jnp.full((BATCH, tags.shape[1], WIDTH), value, jnp.float32)
    for layer in range(JOINT):
        cache = cache.write_joint(jnp.int32(layer), stream, keys + layer / 10, -keys)
    if stream == cache.decodes:
        for layer in range(SPLIT):
            cache = cache.write_split(jnp.int32(layer), keys, -keys)
    return cache


def test_an_empty_cache_holds_padding_only():
    cache = empty("generation")
    assert (cache.block == PAD_BLOCK).all()
    assert cache.joint[0].shape == (JOINT, BATCH, UNDERSTANDING + GENERATION, WIDTH)
    assert cache.split[0].shape == (SPLIT, BATCH, GENERATION, WIDTH)
    assert empty("understanding").split[0].shape == (SPLIT, BATCH, UNDERSTANDING, WIDTH)


@pytest.mark.parametrize("decodes", ["understanding", "generation"])
def test_passes_are_kept_up_to_what_is_committed_and_then_overwritten(decodes):
    """Each pass writes after the committed slots, here as in plain lists of tags and keys."""
    cache = empty(decodes)
    start = 0 if decodes == "understanding" else UNDERSTANDING
    end = UNDERSTANDING if decodes == "understanding" else UNDERSTANDING + GENERATION
    tags, keys = [PAD_BLOCK] * (UNDERSTANDING + GENERATION), [0.0] * (UNDERSTANDING + GENERATION)
    offset = 0
    for value, (block, kept) in enumerate([([0, 0, 0], 2), ([1, 5], 1), ([2, 6], 0), ([7], 1)], 1):
        cache = write(cache, decodes, block, value).advance(kept)
        tags[start + offset : end] = [PAD_BLOCK] * (end - start - offset)
        for i, number in enumerate(block):
            tags[start + offset + i], keys[start + offset + i] = number, float(value)
        offset += kept
        assert int(cache.offset) == offset
        for row in range(BATCH):
            np.testing.assert_array_equal(cache.block[row], tags)
            np.testing.assert_array_equal(cache.joint[0][0, row, :, 0], keys)
            np.testing.assert_array_equal(cache.joint[1][1, row, :, 2], np.negative(keys))
            np.testing.assert_array_equal(cache.split[0][0, row, :, 0], keys[start:end])
            np.testing.assert_array_equal(cache.split_block[row], tags[start:end])
    np.testing.assert_allclose(
        cache.joint[0][1] - cache.joint[0][0], (cache.joint[0][0] > 0) / 10, atol=1e-6
    )


def test_the_other_stream_is_written_at_the_start_of_its_region_every_time():
    cache = write(empty("generation"), "generation", [1, 1], 1.0).advance(2)
    for value in (2.0, 3.0):
        cache = write(cache, "understanding", [0, 0, 0], value)
        np.testing.assert_array_equal(
            cache.joint[0][0, 0, :, 0], [*[value] * 3, 0, 0, 1, 1, *[0] * 7]
        )
    np.testing.assert_array_equal(
        cache.block[0], [0] * 3 + [PAD_BLOCK] * 2 + [1, 1] + [PAD_BLOCK] * 7
    )
    assert int(cache.offset) == 2
    np.testing.assert_array_equal(cache.split[0][0, 0, :, 0], [1, 1, *[0] * 7])


def test_a_region_can_be_filled_to_its_last_slot():
    cache = write(empty("generation"), "generation", [1] * 6, 1.0).advance(6)
    cache = write(cache, "generation", [2, 2, 2], 2.0)
    np.testing.assert_array_equal(cache.split[0][0, 0, :, 0], [1] * 6 + [2] * 3)
    np.testing.assert_array_equal(cache.block[0, UNDERSTANDING:], [1] * 6 + [2] * 3)


def test_cache_is_carried_through_jit_and_loops():
    def body(i, cache):
        return write(cache, "generation", [3, 9], 4.0).advance(1)

    cache = jax.jit(lambda cache: jax.lax.fori_loop(0, 4, body, cache))(empty("generation"))
    assert int(cache.offset) == 4
    np.testing.assert_array_equal(cache.block[0, UNDERSTANDING:], [3, 3, 3, 3, 9, *[PAD_BLOCK] * 4])


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize("decodes", ["understanding", "generation"])
def test_a_program_of_many_steps_runs_the_first_of_them(decodes, number):
    """`tagged` gives the slots of all steps, before they run, the tags that the steps write.

    The last steps find no slot; that must not move the tags of the others.
    """
    kept, steps = (1, 6) if decodes == "understanding" else (2, 6)
    tags = jnp.arange(2, 2 + steps * kept, dtype=jnp.int32)
    first = write(empty(decodes), decodes, [0], 1.0).advance(1)
    whole = jnp.broadcast_to(tags, (BATCH, steps * kept))

    @jax.jit
    def run(cache, number):
        ahead = cache.tagged(whole)

        def body(i, carry):
            cache, same = carry
            own = jax.lax.dynamic_slice(whole, (0, i * kept), (BATCH, kept))
            cache = write(cache, decodes, own[0], 4.0 + i)
            before = jnp.arange(cache.block.shape[1]) < cache._start(decodes) + kept
            return cache.advance(kept), same & jnp.where(before, cache.block == ahead.block, True)

        same = jnp.ones(cache.block.shape, bool)
        return *jax.lax.fori_loop(0, number, body, (cache, same)), ahead

    cache, same, ahead = run(first, number)
    assert same.all() and int(cache.offset) == 1 + number * kept
    one_by_one = first
    for i in range(number):
        one_by_one = write(one_by_one, decodes, tags[i * kept : (i + 1) * kept], 4.0 + i)
        one_by_one = one_by_one.advance(kept)
    for ours, expected in zip(*map(jax.tree.leaves, (cache, one_by_one)), strict=True):
        np.testing.assert_array_equal(ours, expected)
    start, end = (0, UNDERSTANDING) if decodes == "understanding" else (UNDERSTANDING, 14)
    np.testing.assert_array_equal(ahead.block[1, start:end], [0, *tags][: end - start])
    np.testing.assert_array_equal(np.delete(ahead.block, np.s_[start:end], axis=1), PAD_BLOCK)


def test_slots_after_the_tags_are_emptied():
    cache = write(empty("generation"), "generation", [1, 1, 5, 5], 1.0).advance(2)
    ahead = cache.tagged(jnp.full((BATCH, 1), 2))
    np.testing.assert_array_equal(ahead.block[0, UNDERSTANDING:], [1, 1, 2, *[PAD_BLOCK] * 6])


@pytest.mark.parametrize("decodes", ["understanding", "generation"])
def test_only_slots_within_reach_are_read(decodes):
    """The other stream's region is always read whole, if it comes first."""
    cache = write(empty(decodes), decodes, [1, 1, 2], 1.0)
    whole, layer = cache.joint_layer(jnp.int32(1))
    assert whole is cache.joint and layer == 1
    near = cache.replace(reach=3)
    (keys, values), layer = near.split_layer(jnp.int32(0))
    np.testing.assert_array_equal(keys, cache.split[0][0, :, :3])
    np.testing.assert_array_equal(values, cache.split[1][0, :, :3])
    assert layer is None and near.split_block.tolist() == [[1, 1, 2]] * BATCH
    stored, layer = near.joint_layer(jnp.int32(1))
    if decodes == "understanding":  # its region is not the last one
        assert stored is near.joint and layer == 1
        np.testing.assert_array_equal(near.joint_block, cache.block)
    else:
        np.testing.assert_array_equal(stored[0], cache.joint[0][1, :, : UNDERSTANDING + 3])
        np.testing.assert_array_equal(near.joint_block, cache.block[:, : UNDERSTANDING + 3])
        assert layer is None
