# SPDX-License-Identifier: Apache-2.0
"""Which tiles of queries and keys a kernel computes: from tags, in jit, once per forward pass.

A tile is skipped if it has no visible pair, computed without a mask if every pair is visible, and
masked otherwise. The forward kernels of GPUs clear the results of queries that are padding, so
there only the pairs of real queries count. The classes come from the least and largest tags of each
tile, so they are exact for tokens sorted by (segment, block) and conservative for others: unsorted
input computes more tiles, with the same results.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, AnyArray

SKIP, PARTIAL, FULL = 0, 1, 2
FIRST, LAST = 1, 2  # flags of an entry: first, last of its row
CLASS_SHIFT, CLASS_BITS = 2, 2  # in higher bits, the class of each part of the tile
MAX_PARTS = 14  # classes that fit into one word

_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tokens of a tile.

    Attributes:
        queries, keys: loaded by a program at a time.
        part: keys that are classified, and computed, at a time; divides `keys`. Small parts skip
            more work, large tiles load faster.
    """

    queries: int
    keys: int
    part: int

    def __post_init__(self):
        if min(self.queries, self.keys, self.part) < 1 or self.keys % self.part:
            raise ValueError(f"a tile of keys is a whole number of parts, got {self}.")
        if self.keys // self.part > MAX_PARTS:
            raise ValueError(f"a tile of keys has at most {MAX_PARTS} parts, got {self}.")


@flax.struct.dataclass
class TileList:
    """The `count` tiles to compute, row by row; the arrays have room for all tiles.

    Under a mesh all arrays of a table have a first axis that counts devices.

    Attributes:
        batch, row, col: position of each tile.
        flags: FIRST and LAST of its row, and the classes of its parts.
        count: number of used entries. Every row has at least one, so that its output is written.
    """

    batch: Int[Array, "*devices a"]
    row: Int[Array, "*devices a"]
    col: Int[Array, "*devices a"]
    flags: Int[Array, "*devices a"]
    count: Int[Array, "*devices"]


@flax.struct.dataclass
class Tables:
    """Tile lists of one forward pass, shared by all its layers.

    Attributes:
        by_query: rows are tiles of queries: forward, and the gradient of the queries.
        by_key: rows are tiles of keys: the gradient of keys and values. None without gradients.
        sizes: static.
        tags: in the form that the kernel reads.
    """

    by_query: TileList
    by_key: TileList | None
    sizes: TileSizes = flax.struct.field(pytree_node=False)
    tags: Any = None


def part_classes(
    query_block: Int[AnyArray, "b s"],
    query_horizon: Int[AnyArray, "b s"],
    key_block: Int[AnyArray, "b t"],
    query_segment: Int[AnyArray, "b s"] | None = None,
    key_segment: Int[AnyArray, "b t"] | None = None,
    *,
    sizes: TileSizes,
    mask_padding: bool = True,
) -> Int[Array, "b rows cols parts"]:
    """Returns SKIP, PARTIAL or FULL of every part of every tile.

    Args:
        mask_padding: whether a tile with queries that are padding is PARTIAL. A kernel that clears
            the results of such queries needs no mask for them. Without this, no tile of a decoding
            step would be FULL, since its queries rarely fill a tile.
    """
    blocks = padded_tags(query_block, sizes.queries, PAD_BLOCK)
    keys = padded_tags(key_block, sizes.keys, PAD_BLOCK)

    def of_queries(tags) -> _Range:  # down
        made = _Range.of(tags, blocks != PAD_BLOCK, sizes.queries)
        return jax.tree.map(lambda x: x[:, :, None], made)

    def of_keys(tags) -> _Range:  # across
        made = _Range.of(tags, keys != PAD_BLOCK, sizes.part)
        return jax.tree.map(lambda x: x[:, None], made)

    block, key = of_queries(blocks), of_keys(keys)
    horizon = of_queries(padded_tags(query_horizon, sizes.queries, PAD_HORIZON))
    meets, one_segment = block.any_real & key.any_real, key.all_real
    if mask_padding:
        one_segment &= block.all_real
    if query_segment is not None and key_segment is not None:
        a = of_queries(padded_tags(query_segment, sizes.queries, 0))
        b = of_keys(padded_tags(key_segment, sizes.keys, 0))
        meets &= (a.least <= b.most) & (b.least <= a.most)
        one_segment &= (a.least == b.most) & (b.least == a.most)
    sees = (key.least <= horizon.most) | ((key.least <= block.most) & (block.least <= key.most))
    all_see = (key.most <= horizon.least) | (
        (key.least == key.most) & (block.least == key.most) & (block.most == key.most)
    )
    classes = jnp.where(meets & sees, jnp.where(one_segment & all_see, FULL, PARTIAL), SKIP)
    return classes.reshape(*classes.shape[:2], -1, sizes.keys // sizes.part)


def padded_tags(tags: Int[AnyArray, "b s"], multiple: int, fill: int) -> Int[Array, "b s2"]:
    """Returns tags padded to a whole number of tiles."""
    tags = jnp.asarray(tags, jnp.int32)
    return jnp.pad(tags, ((0, 0), (0, -tags.shape[1] % multiple)), constant_values=fill)


@flax.struct.dataclass
class _Range:
    """Least and largest tag of the real tokens of a tile; whether it has any, and any padding."""

    least: Int[Array, "*n"]
    most: Int[Array, "*n"]
    any_real: Bool[Array, "*n"]
    all_real: Bool[Array, "*n"]

    @classmethod
    def of(cls, tags: Int[Array, "b s"], real: Bool[Array, "b s"], size: int) -> "_Range":
        tags, real = (x.reshape(x.shape[0], -1, size) for x in (tags, real))
        return cls(
            jnp.where(real, tags, _LARGEST).min(axis=-1),
            jnp.where(real, tags, -_LARGEST).max(axis=-1),
            real.any(axis=-1),
            real.all(axis=-1),
        )


def _tile_list(classes: Int[Array, "b rows cols parts"]) -> TileList:
    cols, parts = classes.shape[2:]
    active = (classes != SKIP).any(axis=-1)
    # A row without active tiles gets one whose parts are all skipped.
    alone = ~active.any(axis=-1, keepdims=True) & (jnp.arange(cols) == 0)[None, None]
    active |= alone
    so_far = jnp.cumsum(active, axis=-1)
    first, last = so_far == 1, so_far == so_far[..., -1:]
    flags = first * FIRST + last * LAST
    for part in range(parts):
        flags += classes[..., part] << (CLASS_SHIFT + CLASS_BITS * part)
    (at,) = jnp.nonzero(active.reshape(-1), size=active.size, fill_value=0)
    b, row, col = jnp.unravel_index(at, active.shape)
    return TileList(
        *(x.astype(jnp.int32) for x in (b, row, col, flags.reshape(-1)[at], active.sum()))
    )


# ---------------------------------------------------------------------------------------------
# For GPUs: a list per row, since each program computes one row and the grid is static.


GPU_ROWS = 128  # per program: two warpgroups of 64


@dataclasses.dataclass(frozen=True)
class GpuSizes:
    """Tiles that the three kernels read, and how many of them are in flight at a time.

    Larger ones do not fit the shared memory of Hopper, or spill registers
    (`tests/devices/gpu_aot`).

    Attributes:
        forward_keys, forward_stages: keys per tile in the forward pass; number of tile buffers.
        dq_keys, dq_stages: the same for the gradient of the queries.
        dkv_queries, dkv_stages: likewise queries per tile, for the gradient of keys and values.
    """

    forward_keys: int = 128
    forward_stages: int = 2
    dq_keys: int = 64
    dq_stages: int = 2
    dkv_queries: int = 64
    dkv_stages: int = 3

    def __post_init__(self):
        for name in ("forward_keys", "dq_keys", "dkv_queries"):
            if (size := getattr(self, name)) not in (64, GPU_ROWS):
                raise ValueError(f"{name}={size}: a tile has 64 or {GPU_ROWS} tokens.")
        for name in ("forward_stages", "dq_stages", "dkv_stages"):
            if (stages := getattr(self, name)) < 2:
                raise ValueError(f"{name}={stages}: one tile is read while another arrives.")

    @property
    def queries(self) -> int:
        return GPU_ROWS

    @property
    def forward(self) -> TileSizes:
        return TileSizes(GPU_ROWS, self.forward_keys, self.forward_keys)

    @property
    def dq(self) -> TileSizes:
        return TileSizes(GPU_ROWS, self.dq_keys, self.dq_keys)

    @property
    def dkv(self) -> TileSizes:
        return TileSizes(self.dkv_queries, GPU_ROWS, GPU_ROWS)


@flax.struct.dataclass
class RowLists:
    """The tiles of every row: first those without a mask, then the masked ones.

    Attributes:
        cols: their columns; the first `num_active` are computed, the others skipped.
        num_full, num_active: number of tiles without a mask, and of all computed tiles.
        order: the order in which programs take the rows: the longest first, so that no long one
            is left at the end. None: rows in order. That is used for rows of keys, where the first
            are the longest anyway, and the look-up would spill registers.
    """

    cols: Int[Array, "*devices b rows cols"]
    num_full: Int[Array, "*devices b rows"]
    num_active: Int[Array, "*devices b rows"]
    order: Int[Array, "*devices b rows"] | None


@flax.struct.dataclass
class GpuTables:
    """Row lists of the three kernels; rows are tiles of queries, but of keys in `for_dkv`.

    Without gradients, their lists are None.
    """

    forward: RowLists
    for_dq: RowLists | None
    for_dkv: RowLists | None
    sizes: GpuSizes = flax.struct.field(pytree_node=False)
    tags: Any = None  # as in `Tables`


def make_tables(
    query_block: Int[AnyArray, "b s"],
    query_horizon: Int[AnyArray, "b s"],
    key_block: Int[AnyArray, "b t"],
    query_segment: Int[AnyArray, "b s"] | None = None,
    key_segment: Int[AnyArray, "b t"] | None = None,
    *,
    sizes: TileSizes | GpuSizes,
    gradients: bool = True,
) -> Any:
    """Returns the `Tables` of one set of tags, or `GpuTables` for `GpuSizes`.

    Lengths need not be whole numbers of tiles.

    Args:
        gradients: whether there are lists for gradients.
    """
    tags = (query_block, query_horizon, key_block, query_segment, key_segment)
    if isinstance(sizes, TileSizes):
        classes = part_classes(*tags, sizes=sizes)
        by_key = _tile_list(classes.swapaxes(1, 2)) if gradients else None
        return Tables(_tile_list(classes), by_key, sizes)
    fills = (PAD_BLOCK, PAD_HORIZON, PAD_BLOCK, 0, 0)
    whole: list[Any] = [  # all arrays are padded to whole rows
        None if tag is None else padded_tags(tag, GPU_ROWS, fill)
        for tag, fill in zip(tags, fills, strict=True)
    ]

    def classes_of(tile: TileSizes, mask_padding: bool = True) -> Int[Array, "b rows cols"]:
        return part_classes(*whole, sizes=tile, mask_padding=mask_padding)[..., 0]

    forward = _row_lists(classes_of(sizes.forward, mask_padding=False))
    if not gradients:
        return GpuTables(forward, None, None, sizes)
    for_dkv = dataclasses.replace(_row_lists(classes_of(sizes.dkv).swapaxes(1, 2)), order=None)
    return GpuTables(forward, _row_lists(classes_of(sizes.dq)), for_dkv, sizes)


def _row_lists(classes: Int[Array, "b rows cols"]) -> RowLists:
    num_full = (classes == FULL).sum(axis=-1).astype(jnp.int32)
    num_active = (classes != SKIP).sum(axis=-1).astype(jnp.int32)
    cols, order = (
        jnp.argsort(-x, axis=-1, stable=True).astype(jnp.int32) for x in (classes, num_active)
    )
    return RowLists(cols, num_full, num_active, order)


def active_share(tables: Tables) -> Array:
    """Returns the share of tile parts that are computed, including padding; for reports."""
    flags, parts = tables.by_query.flags, tables.sizes.keys // tables.sizes.part
    used = jnp.arange(flags.size) < tables.by_query.count
    shifts = CLASS_SHIFT + CLASS_BITS * jnp.arange(parts)
    classes = (flags[:, None] >> shifts[None]) & (2**CLASS_BITS - 1)
    return ((classes != SKIP) & used[:, None]).sum() / (flags.size * parts)
