# SPDX-License-Identifier: Apache-2.0
"""Tags that attention kernels must handle, checked against the dense reference."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax.kernels import reference as dense
from sparse_lavida_jax.kernels.common import Shape
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON

S, T = 40, 70  # queries and keys; neither a whole number of any tile
TOLERANCE = 2e-6


def horizons(block, num_clean):
    return np.where(block == PAD_BLOCK, PAD_HORIZON, np.minimum(block, num_clean))


def sorted_tags(rng):
    block = np.sort(rng.integers(0, 7, (2, T)), axis=1)
    return block[:, :S], horizons(block, 3)[:, :S], block, None, None


def unsorted_tags(rng):
    block = rng.integers(0, 7, (2, T))
    return block[:, -S:], horizons(block, 3)[:, -S:], block, None, None


def several_horizons(rng):
    """Masked blocks, each with a horizon of its own (`diffusion.Blocks.horizons`)."""
    block = np.sort(rng.integers(0, 9, (2, T)), axis=1)
    return block[:, :S], np.minimum(block, (block * 5) % 4 + 1)[:, :S], block, None, None


def padded_tags(rng):
    """Padding in the middle and at the end, also a whole tile, and a row of only padding."""
    query_block, _, block, *_ = sorted_tags(rng)
    block[:, 5:9], block[:, -20:], query_block[:, 16:35] = PAD_BLOCK, PAD_BLOCK, PAD_BLOCK
    query_block[1] = PAD_BLOCK
    return query_block, horizons(query_block, 3), block, None, None


def packed_tags(rng):
    segment = np.sort(rng.integers(0, 3, (2, T)), axis=1)
    block = np.concatenate([np.sort(rng.integers(0, 5, (2, T // 2)), axis=1)] * 2, axis=1)
    block[:, S - 3 : S], block[:, -5:] = PAD_BLOCK, PAD_BLOCK
    return block[:, :S], horizons(block, 2)[:, :S], block, segment[:, :S], segment


def one_block(rng):
    del rng
    block = np.zeros((2, T), int)
    return block[:, :S], block[:, :S], block, None, None


def cache_tags(rng):
    """[cache | new | decode | registers]: empty slots, then the step's own tokens."""
    block = np.full((2, T), PAD_BLOCK)
    block[:, :9], block[:, 9:20], block[:, 20:30], block[:, 30:45] = 0, 1, 2, 3
    query_block = np.concatenate([block[:, 20:45], np.full((2, S - 25), PAD_BLOCK)], axis=1)
    return query_block, horizons(query_block, 2), block, None, None


def nothing_seen(rng):
    """Queries whose own block has no key and whose horizon is before all keys."""
    block = np.sort(rng.integers(2, 7, (2, T)), axis=1)
    query_block = np.full((2, S), 9)
    query_block[:, ::3] = 4
    return query_block, np.full((2, S), 1), block, None, None


TAGS = {
    f.__name__: f
    for f in (
        sorted_tags, unsorted_tags, several_horizons, padded_tags, packed_tags, one_block,
        cache_tags, nothing_seen,
    )
}  # fmt: skip


@st.composite
def any_blocks(draw, s, t):
    """Blocks of queries and keys [2 s], [2 t], in runs of any length, and a last clean block."""
    block, run = st.one_of(st.integers(0, 4), st.just(PAD_BLOCK)), draw(st.integers(1, t))
    found = (draw(st.lists(block, min_size=n, max_size=n)) for n in (s, t))
    query_block, key_block = (
        np.repeat(blocks, run)[None, :n].repeat(2, axis=0)
        for blocks, n in zip(found, (s, t), strict=True)
    )
    return query_block, key_block, draw(st.integers(-1, 4))


def as_arrays(tags):
    return tuple(None if tag is None else jnp.asarray(tag, jnp.int32) for tag in tags)


def draw(rng, heads, kv_heads, head_dim, dtype=jnp.float32, lengths=(S, T), rows=2):
    """Returns q, k, v and the gradient of the output."""
    s, t = lengths
    shapes = [(s, heads), (t, kv_heads), (t, kv_heads), (s, heads)]
    return tuple(jnp.asarray(rng.normal(size=(rows, n, h * head_dim)), dtype) for n, h in shapes)


def reference(q, k, v, tags, head_dim):
    heads = (q.shape[-1] // head_dim, k.shape[-1] // head_dim)
    return dense.reference(q, k, v, tags, Shape(*heads, head_dim, head_dim**-0.5))


@functools.partial(jax.jit, static_argnames="head_dim")
def reference_and_gradients(q, k, v, pulled, pulled_lse, tags, head_dim):
    found, pull_back = jax.vjp(lambda *qkv: reference(*qkv, tags, head_dim), q, k, v)
    return found, pull_back((pulled, pulled_lse))


def records_of_races(monkeypatch, module, name: str) -> list:
    """Returns a list that collects the record of every kernel: JAX keeps only the last one."""
    records, made = [], getattr(module, name)

    def recorded(*args, **kwargs):
        records.append(made(*args, **kwargs))
        records[-1].on_race = "warn"  # jax 0.12 would raise and stop the program halfway
        return records[-1]

    monkeypatch.setattr(module, name, recorded)
    return records
