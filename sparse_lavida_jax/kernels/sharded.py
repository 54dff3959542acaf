# SPDX-License-Identifier: Apache-2.0
"""Attention over a mesh: a kernel is one device's program, so it runs inside `shard_map`.

Rows go over `data` and `fsdp`, heads over `tensor`, queries over `sequence`; keys, values and their
tags are gathered along `sequence`, except for a cache, which every device of that axis holds. What
an axis does not divide stays whole, and its devices all compute the same.

Who sees whom is in the tags, so any order of tokens is legal. In one sorted by block the last
tokens see most: training deals the tokens out in turn (`Deal`), once at the entry of the layers,
so that all devices of `sequence` get early and late ones and have as much to compute. Gathered keys
are put back in order, which leaves their tiles as tight as on one device.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree, Shaped

from sparse_lavida_jax.kernels.common import Tags
from sparse_lavida_jax.kernels.tables import GpuTables, Tables
from sparse_lavida_jax.visibility import AnyArray

BATCH_AXES, HEADS_AXIS, TOKENS_AXIS = ("data", "fsdp"), "tensor", "sequence"

Name = TypeVar("Name")


@dataclasses.dataclass(frozen=True)
class Deal:
    """How the tokens of a stream are dealt out to the devices of `sequence`: in turn, by stripes.

    On each device they keep their order. What is left of whole stripes is dealt out in shorter
    ones. 14 tokens over 2 devices in stripes of 3:

        0 1 2 3 4 5 6 7 8 9 10 11 12 13  ->  0 1 2 6 7 8 12 | 3 4 5 9 10 11 13

    Attributes:
        devices: as many; 1 where the tokens stay as they are.
        length: of the stream, a multiple of `devices`.
        stripe: tokens; a tile of queries, so that no tile holds tokens from far apart.
    """

    devices: int
    length: int
    stripe: int

    def out(self, x: Shaped[AnyArray, "b s *e"]) -> Array:
        """Deals the tokens out: those of the first device come first."""
        if self.devices == 1:
            return jnp.asarray(x)
        b, _, *e = x.shape
        dealt, start = [], 0
        for own, stripe in self._stripes:
            part = jnp.asarray(x[:, start : start + self.devices * own])
            part = part.reshape(b, -1, self.devices, stripe, *e)
            dealt.append(part.swapaxes(1, 2).reshape(b, self.devices, own, *e))
            start += self.devices * own
        return jnp.concatenate(dealt, axis=2).reshape(x.shape)

    def back(self, x: Shaped[AnyArray, "b s *e"]) -> Array:
        """Undoes `out`."""
        if self.devices == 1:
            return jnp.asarray(x)
        b, _, *e = x.shape
        x, taken, start = jnp.asarray(x).reshape(b, self.devices, -1, *e), [], 0
        for own, stripe in self._stripes:
            part = x[:, :, start : start + own].reshape(b, self.devices, -1, stripe, *e)
            taken.append(part.swapaxes(1, 2).reshape(b, -1, *e))
            start += own
        return jnp.concatenate(taken, axis=1)

    @property
    def _stripes(self) -> list[tuple[int, int]]:
        """Pairs: tokens of a device, and of each of their stripes."""
        own = self.length // self.devices
        rest = own % self.stripe
        pairs = [(own - rest, self.stripe), (rest, rest)]
        return [pair for pair in pairs if pair[0]]


def joined(streams: Sequence[Shaped[AnyArray, "b _s *e"]], deals: Sequence[Deal]) -> Array:
    """Concatenates streams [b _s *e] along their tokens: on every device its own, moving none."""
    devices = deals[0].devices
    if devices == 1:
        return jnp.concatenate(streams, axis=1)
    b, _, *e = streams[0].shape
    own = [x.reshape(b, devices, -1, *e) for x in streams]
    return jnp.concatenate(own, axis=2).reshape(b, -1, *e)


def parted(x: Shaped[AnyArray, "b s *e"], deals: Sequence[Deal]) -> list[Array]:
    """Undoes `joined`."""
    b, _, *e = x.shape
    x, parts, start = jnp.asarray(x).reshape(b, deals[0].devices, -1, *e), [], 0
    for deal in deals:
        stop = start + deal.length // deal.devices
        parts.append(x[:, :, start:stop].reshape(b, deal.length, *e))
        start = stop
    return parts


def in_order(x: Shaped[AnyArray, "b t *e"], deals: Sequence[Deal]) -> Array:
    """Puts the tokens of joined streams in the order that they had before."""
    if not deals or deals[0].devices == 1:
        return jnp.asarray(x)
    parts = parted(x, deals)
    return jnp.concatenate([d.back(part) for d, part in zip(deals, parts, strict=True)], axis=1)


@dataclasses.dataclass(frozen=True)
class Split:
    """Which axes of the mesh split the rows and the queries of a call; None where they are whole.

    Attributes:
        axes: all axes that no `shard_map` around the call has taken.
    """

    rows: tuple[str, ...] | None
    queries: str | None
    axes: frozenset[str]

    def tags(self, keys: str | None) -> tuple[PartitionSpec, ...]:
        query, key = PartitionSpec(self.rows, self.queries), PartitionSpec(self.rows, keys)
        return query, query, key, query, key

    @property
    def tables(self) -> PartitionSpec:
        """Of the first axis of every table, which counts devices."""
        return PartitionSpec((*(self.rows or ()), *([self.queries] if self.queries else [])))

    def run(self, local: Callable, in_specs, out_specs) -> Callable:
        # A kernel says nothing of what varies over which axis, so that cannot be checked.
        return jax.shard_map(
            local, in_specs=in_specs, out_specs=out_specs, axis_names=self.axes, check_vma=False
        )


def split_of(rows: int, queries: int) -> Split | None:
    """Returns how a call is split by the mesh of `jax.set_mesh`; None on a single device.

    Raises:
        ValueError: the mesh has explicit axes, under which nothing may be split unasked.
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
    return Split(_rows_axes(rows, free), _divides(TOKENS_AXIS, free, queries), frozenset(free))


def make_tables(
    make: Callable[..., Tables | GpuTables], tags: Tags, key_deals: Sequence[Deal], split: Split
) -> Tables | GpuTables:
    """Returns the tables of every device, along a new first axis: of its rows and its queries."""

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
        tables: of `make_tables`, or None: each device then makes its own.
        key_deals: how the streams that the keys were joined from are dealt out; none if not.
    """
    free = _free_axes()
    axis = _divides(HEADS_AXIS, free, *heads)
    own_heads = tuple(number // free[axis] for number in heads) if axis else heads
    keys = _divides(TOKENS_AXIS, free, k.shape[1]) if layer is None and split.queries else None

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
        # tokens for every layer; the output is kept, so that the kernel does not run again.
        kept = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
        local = jax.checkpoint(local, policy=kept)
    queries = PartitionSpec(split.rows, split.queries, axis)
    stored = PartitionSpec(split.rows, keys, axis)
    if layer is not None:
        stored, layer = PartitionSpec(None, *stored), jnp.asarray(layer, jnp.int32)
    in_specs = (queries, stored, stored, split.tags(keys), PartitionSpec(), split.tables)
    out_specs = (queries, PartitionSpec(split.rows, axis, split.queries))
    return split.run(local, in_specs, out_specs)(q, k, v, tags, layer, tables)


def mesh_in_use(params: PyTree) -> contextlib.AbstractContextManager:
    """Returns the context in which programs see the mesh that parameters lie on, if they do.

    Without it a kernel does not know that it has to be split, and the compiler cannot split it.
    """
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            if isinstance(mesh, Mesh) and mesh.size > 1:
                return jax.set_mesh(mesh)
    return contextlib.nullcontext()


# ---------------------------------------------------------------------------------------------
# Where the arrays of a forward pass lie.


def deals_of(
    lengths: Mapping[Name, int], stripe_of: Callable[[int], int] | None
) -> dict[Name, Deal]:
    """Returns how streams of these lengths are dealt out; not at all if one does not divide.

    Args:
        stripe_of: the tile of queries of a call of so many tokens; None to leave all as they are.
    """
    devices = _free_axes().get(TOKENS_AXIS, 1)
    if stripe_of is None or any(length % devices for length in lengths.values()):
        return {name: Deal(1, length, length) for name, length in lengths.items()}
    return {
        name: Deal(devices, length, stripe_of(length // devices))
        for name, length in lengths.items()
    }


def dealt_out(
    streams: Mapping[Name, Float[Array, "b _s _e"]], deals: Mapping[Name, Deal]
) -> dict[Name, Array]:
    """Deals the tokens of every stream out."""
    return {name: _over_tokens(deals[name].out(x), deals[name]) for name, x in streams.items()}


def taken_back(
    streams: Mapping[Name, Float[Array, "b _s _e"]], deals: Mapping[Name, Deal]
) -> dict[Name, Array]:
    """Undoes `dealt_out`; the tokens stay split over `sequence`."""
    return {name: _over_tokens(deals[name].back(x), deals[name]) for name, x in streams.items()}


def over_rows(x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
    """Keeps the rows of a residual stream where they are, and its tokens split over `sequence`.

    Of a matrix product whose rows and whose matrix are both split over `fsdp` the compiler gathers
    what it takes for the smaller; this says that it is the matrix. The width is left to it.
    """
    free = _free_axes()
    rows = _rows_axes(x.shape[0], free)
    if math.prod(free.values()) == 1 or rows is None:
        return x
    tokens = _divides(TOKENS_AXIS, free, x.shape[1])
    spec = PartitionSpec(rows, tokens, PartitionSpec.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, spec)


def place_cache(stored: Float[Array, "n b t hd"], num_heads: int) -> Float[Array, "n b t hd"]:
    """Lays a stacked cache out as `attend` reads it, so that no step moves it."""
    free = _free_axes()
    if math.prod(free.values()) == 1:
        return stored
    heads = _divides(HEADS_AXIS, free, num_heads)
    spec = PartitionSpec(None, _rows_axes(stored.shape[1], free), None, heads)
    return jax.lax.with_sharding_constraint(stored, spec)


def _over_tokens(x: Array, deal: Deal) -> Array:
    if deal.devices == 1:
        return x
    spec = PartitionSpec(_rows_axes(x.shape[0], _free_axes()), TOKENS_AXIS)
    return jax.lax.with_sharding_constraint(x, spec)


def _free_axes() -> dict[str, int]:
    """Sizes of the axes of the mesh in use, except for those that a `shard_map` has taken."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    return {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}


def _rows_axes(rows: int, free: dict[str, int]) -> tuple[str, ...] | None:
    taken, parts = [], 1
    for axis in BATCH_AXES:
        if free.get(axis, 1) > 1 and rows % (parts * free[axis]) == 0:
            taken.append(axis)
            parts *= free[axis]
    return tuple(taken) or None


def _divides(axis: str, free: dict[str, int], *sizes: int) -> str | None:
    size = free.get(axis, 1)
    return axis if size > 1 and not any(other % size for other in sizes) else None
