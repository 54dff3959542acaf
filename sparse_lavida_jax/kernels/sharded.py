# SPDX-License-Identifier: Apache-2.0
"""Attention over a mesh: a kernel is one device's program, so it runs inside `shard_map`.

Rows are split over `data` and `fsdp`, heads over `tensor`, queries over `sequence`; keys, values
and their tags are gathered along `sequence`, except for a cache, of which every device of that axis
has a copy. A dimension that its axis does not divide stays whole, and all devices of the axis
compute the same.

The tags decide who sees whom, so any order of tokens is legal. If they are sorted by block, the
last tokens see most: training deals out the tokens in turn (`Deal`), once at the entry of the
layers, so that all devices of `sequence` get early and late ones and equal work. Gathered keys are
put back in order, so that their tiles are as compact as on one device.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from sparse_lavida_jax.kernels.common import Tags
from sparse_lavida_jax.kernels.tile_lists import GpuTables, Tables
from sparse_lavida_jax.visibility import AnyArray

BATCH_AXES, HEADS_AXIS, TOKENS_AXIS = ("data", "fsdp"), "tensor", "sequence"

Name = TypeVar("Name")


@dataclasses.dataclass(frozen=True)
class Deal:
    """How the tokens of a stream are dealt out to the devices of `sequence`: stripes in turn.

    Within each device they keep their order. 12 tokens over 2 devices in stripes of 3:

        0 1 2 3 4 5 6 7 8 9 10 11  ->  0 1 2 6 7 8 | 3 4 5 9 10 11

    Attributes:
        devices: their number.
        length: of the stream, a whole number of stripes for every device.
        stripe: its tokens: a tile of queries, or at least half of one, so that a tile has tokens
            from few places.
    """

    devices: int
    length: int
    stripe: int

    def out(self, x: Shaped[AnyArray, "b s *e"]) -> Array:
        """Deals out the tokens: those of the first device come first."""
        by_device = "b (n d stripe) ... -> b (d n stripe) ..."
        return einops.rearrange(jnp.asarray(x), by_device, d=self.devices, stripe=self.stripe)

    def back(self, x: Shaped[AnyArray, "b s *e"]) -> Array:
        """Undoes `out`."""
        in_order = "b (d n stripe) ... -> b (n d stripe) ..."
        return einops.rearrange(jnp.asarray(x), in_order, d=self.devices, stripe=self.stripe)


def joined(streams: Sequence[Shaped[AnyArray, "b _s *e"]], deals: Sequence[Deal]) -> Array:
    """Concatenates streams [b _s *e] along tokens, on each device its own, without transfers."""
    devices = deals[0].devices
    own = [einops.rearrange(jnp.asarray(x), "b (d s) ... -> b d s ...", d=devices) for x in streams]
    return einops.rearrange(jnp.concatenate(own, axis=2), "b d s ... -> b (d s) ...")


def parted(x: Shaped[AnyArray, "b s *e"], deals: Sequence[Deal]) -> list[Array]:
    """Undoes `joined`."""
    own = einops.rearrange(jnp.asarray(x), "b (d s) ... -> b d s ...", d=deals[0].devices)
    ends = np.cumsum([deal.length // deal.devices for deal in deals])[:-1]
    parts = jnp.split(own, ends, axis=2)
    return [einops.rearrange(part, "b d s ... -> b (d s) ...") for part in parts]


def in_order(x: Shaped[AnyArray, "b t *e"], deals: Sequence[Deal]) -> Array:
    """Puts the tokens of joined streams back in their original order."""
    if not deals:
        return jnp.asarray(x)
    parts = zip(deals, parted(x, deals), strict=True)
    return jnp.concatenate([deal.back(part) for deal, part in parts], axis=1)


@dataclasses.dataclass(frozen=True)
class Split:
    """Which axes of the mesh split the rows and the queries of a call; None if they are whole.

    Attributes:
        axes: all axes that are not used by an enclosing `shard_map`.
    """

    rows: tuple[str, ...] | None
    queries: tuple[str, ...] | None
    axes: frozenset[str]

    def tags(self, keys: tuple[str, ...] | None) -> tuple[PartitionSpec, ...]:
        query, key = PartitionSpec(self.rows, self.queries), PartitionSpec(self.rows, keys)
        return query, query, key, query, key

    @property
    def tables(self) -> PartitionSpec:
        """The spec of the first axis of every table, which counts devices."""
        return PartitionSpec((*(self.rows or ()), *(self.queries or ())))

    def run(self, local: Callable, in_specs, out_specs) -> Callable:
        # Kernels do not declare which values vary over which axis, so that cannot be checked.
        return jax.shard_map(
            local, in_specs=in_specs, out_specs=out_specs, axis_names=self.axes, check_vma=False
        )


def split_of(rows: int, queries: int) -> Split | None:
    """Returns how a call is split by the mesh of `jax.set_mesh`; None on a single device.

    Raises:
        ValueError: the mesh has explicit axes, under which nothing may be split implicitly.
    """
    free = _free_axes()
    if math.prod(free.values()) == 1:
        return None
    explicit = set(free) & set(jax.sharding.get_abstract_mesh().explicit_axes)
    if explicit:
        raise ValueError(
            f"the mesh has explicit axes {sorted(explicit)}, attention splits over automatic ones:"
            " make it with jax.sharding.Mesh(devices, names), or with axis_types=AxisType.Auto."
        )
    tokens = _dividing((TOKENS_AXIS,), free, queries)
    return Split(_dividing(BATCH_AXES, free, rows), tokens, frozenset(free))


def make_tables(
    make: Callable[..., Tables | GpuTables], tags: Tags, key_deals: Sequence[Deal], split: Split
) -> Tables | GpuTables:
    """Returns the tables of every device, for its rows and queries, along a new first axis."""

    def local(query_block, horizon, key_block, query_segment, key_segment):
        key_block = in_order(key_block, key_deals)
        key_segment = None if key_segment is None else in_order(key_segment, key_deals)
        made = make(query_block, horizon, key_block, query_segment, key_segment)
        return jax.tree.map(lambda x: x[None], made)

    return split.run(local, split.tags(keys=None), split.tables)(*tags)


def attend(
    kernel: Callable[..., tuple[Array, Array]],
    q: Float[Array, "b s hd"],
    k: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    v: Float[Array, "b t hkd"] | Float[Array, "n b t hkd"],
    tags: Tags,
    heads: tuple[int, int],
    layer: Int[Array, ""] | int | None,
    tables: Tables | GpuTables | None,
    key_deals: Sequence[Deal],
    split: Split,
) -> tuple[Float[Array, "b s hd"], Float[Array, "b h s"]]:
    """Runs `kernel(q, k, v, tags, heads, layer, tables)` on every device's part.

    Args:
        heads: of queries, and of keys and values.
        tables: from `make_tables`, or None: each device then makes its own.
        key_deals: how the streams that make up the keys are dealt out; empty if they are not.
    """
    free = _free_axes()
    axis = _dividing((HEADS_AXIS,), free, *heads)
    own_heads = tuple(number // free[HEADS_AXIS] for number in heads) if axis else heads
    whole = layer is not None or not split.queries
    keys = None if whole else _dividing((TOKENS_AXIS,), free, k.shape[1])

    def gathered(x):
        if x is None or keys is None:
            return x
        return in_order(jax.lax.all_gather(x, keys, axis=1, tiled=True), key_deals)

    def local(q, k, v, tags, layer, tables):
        query_block, horizon, key_block, query_segment, key_segment = tags
        tags = (query_block, horizon, gathered(key_block), query_segment, gathered(key_segment))
        if tables is not None:
            tables = jax.tree.map(lambda x: x[0], tables)
        k, v = gathered(k), gathered(v)
        return kernel(q, k, v, tags, own_heads, layer, tables)

    if keys:
        # The backward pass gathers keys and values again, so that no device keeps those of all
        # tokens for every layer; the output is kept, so that the kernel is not run again.
        kept = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
        local = jax.checkpoint(local, policy=kept)
    queries = PartitionSpec(split.rows, split.queries, axis)
    stored = PartitionSpec(split.rows, keys, axis)
    if layer is not None:
        stored, layer = PartitionSpec(None, *stored), jnp.asarray(layer, jnp.int32)
    in_specs = (queries, stored, stored, split.tags(keys), PartitionSpec(), split.tables)
    out_specs = (queries, PartitionSpec(split.rows, axis, split.queries))
    return split.run(local, in_specs, out_specs)(q, k, v, tags, layer, tables)


# ---------------------------------------------------------------------------------------------
# Placement of the arrays of a forward pass.


def deals_of(lengths: Mapping[Name, int], tile_of: Callable[[int], int]) -> dict[Name, Deal]:
    """Returns how streams of these lengths are dealt out.

    They use the longest stripes, of at most a tile, that divide the tokens of a device. If one
    stream does not divide, or only into stripes of less than half a tile, none is dealt out.

    Args:
        tile_of: from the tokens of a call to its queries per tile.
    """
    devices = _free_axes().get(TOKENS_AXIS, 1)
    if devices == 1 or any(length % devices for length in lengths.values()):
        return {}
    deals = {}
    for name, length in lengths.items():
        own = length // devices
        largest = min(tile_of(own), own)
        stripe = next(size for size in range(largest, 0, -1) if own % size == 0)
        if 2 * stripe < largest:
            return {}
        deals[name] = Deal(devices, length, stripe)
    return deals


def over_rows(x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
    """Keeps the rows of a residual stream in place, and its tokens split over `sequence`.

    In a matrix product whose rows and matrix are both split over `fsdp`, the compiler gathers the
    one that it takes for smaller; this forces it to gather the matrix. The width is left to it.
    """
    free = _free_axes()
    rows = _dividing(BATCH_AXES, free, x.shape[0])
    tokens = _dividing((TOKENS_AXIS,), free, x.shape[1])
    if rows is None and tokens is None:
        return x
    spec = PartitionSpec(rows, tokens, PartitionSpec.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, spec)


def place_cache(stored: Float[Array, "n b t hd"], num_heads: int) -> Float[Array, "n b t hd"]:
    """Places a stacked cache as `attend` reads it, so that no step moves it."""
    free = _free_axes()
    if math.prod(free.values()) == 1:
        return stored
    rows = _dividing(BATCH_AXES, free, stored.shape[1])
    heads = _dividing((HEADS_AXIS,), free, num_heads)
    return jax.lax.with_sharding_constraint(stored, PartitionSpec(None, rows, None, heads))


def _free_axes() -> dict[str, int]:
    """Sizes of the axes of the mesh in use, except those used by a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    return {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}


def _dividing(axes: Sequence[str], free: dict[str, int], *sizes: int) -> tuple[str, ...] | None:
    """Returns the axes that together divide all sizes; None if there are none."""
    taken, parts = [], 1
    for axis in axes:
        more = parts * free.get(axis, 1)
        if more > parts and not any(size % more for size in sizes):
            taken.append(axis)
            parts = more
    return tuple(taken) or None
