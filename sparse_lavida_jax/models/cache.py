# SPDX-License-Identifier: Apache-2.0
"""The key/value cache of a response being decoded.

There are two static buffers. That of the joint layers has two regions, understanding tokens [0:u)
then generation tokens [u:t); that of the split layers has only the region of the decoded stream.
Heads are merged in the last axis. Keys are stored rotated. Tags are the blocks of the tokens. Every
pass writes its tokens contiguously at one offset shared by all rows; what it
leaves after the committed ones is overwritten by the next pass, and no token sees it until then.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.kernels.sharded import place_cache
from sparse_lavida_jax.tags import StreamName
from sparse_lavida_jax.visibility import PAD_BLOCK, AnyArray

Pair = tuple[Array, Array]  # keys and values


@flax.struct.dataclass
class KVCache:
    """Keys and values of committed tokens, and room for the tokens of one step.

    Attributes:
        joint: keys and values of the joint layers, both regions, [n b t (h d)].
        split: those of the split layers, the decoded stream's region, [m b r (h d)].
        block: tags of the joint buffer; `PAD_BLOCK` where a slot is empty.
        offset: next free slot of the decoded stream, counted from the start of its region.
        understanding_len: slots of the understanding region (u), static.
        decodes: the stream that is decoded, static.
        reach: static; only so many slots of the decoded stream's region are read. None: all.
    """

    joint: tuple[Float[Array, "n b t hd"], Float[Array, "n b t hd"]]
    split: tuple[Float[Array, "m b r hd"], Float[Array, "m b r hd"]]
    block: Int[Array, "b t"]
    offset: Int[Array, ""]
    understanding_len: int = flax.struct.field(pytree_node=False)
    decodes: StreamName = flax.struct.field(pytree_node=False)
    reach: int | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def empty(
        cls,
        settings: config.Model,
        batch: int,
        understanding_len: int,
        generation_len: int,
        decodes: StreamName,
    ) -> "KVCache":
        """Returns a cache without tokens. Lengths are capacities in slots."""
        total = understanding_len + generation_len
        region = understanding_len if decodes == "understanding" else generation_len
        width, dtype = settings.num_heads * settings.head_dim, jnp.dtype(settings.compute_dtype)

        def pair(layers: int, slots: int) -> Pair:
            shape = (layers, batch, slots, width)
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

        return cls(
            pair(settings.num_joint_layers, total),
            pair(settings.num_split_layers, region),
            block=jnp.full((batch, total), PAD_BLOCK, jnp.int32),
            offset=jnp.int32(0),
            understanding_len=understanding_len,
            decodes=decodes,
        )

    def _start(self, stream: StreamName) -> Int[Array, ""] | int:
        """The slot of the joint buffer where tokens of `stream` are currently written."""
        return self._first(stream) + (self.offset if stream == self.decodes else 0)

    def _first(self, stream: StreamName) -> int:
        return 0 if stream == "understanding" else self.understanding_len

    def _end(self, stream: StreamName) -> int:
        return self.understanding_len if stream == "understanding" else self.block.shape[1]

    def placed(self, num_heads: int) -> "KVCache":
        """Distributes keys and values over the mesh as attention reads them."""
        joint, split = jax.tree.map(lambda x: place_cache(x, num_heads), (self.joint, self.split))
        return dataclasses.replace(self, joint=joint, split=split)

    def begin(self, stream: StreamName, block: Int[AnyArray, "b s"]) -> "KVCache":
        """Tags the slots that this pass writes, and empties the rest of the region."""
        start, end = self._start(stream), self._end(stream)
        slots = jnp.arange(self.block.shape[1])
        later = (slots >= start) & (slots < end)
        tags = jnp.where(later[None], jnp.int32(PAD_BLOCK), self.block)
        return dataclasses.replace(self, block=_put(tags, block, (0, start)))

    def tagged(self, block: Int[AnyArray, "b s"]) -> "KVCache":
        """Tags the next slots of the decoded stream for all its steps to come.

        The rest of its region is emptied. Tags that find no slot are dropped: a program holds steps
        that may not be run, and where `begin` would shift all tags to make the last ones fit.
        """
        start, end = self._start(self.decodes), self._end(self.decodes)
        slots = jnp.arange(self.block.shape[1])
        filled = jnp.pad(block, ((0, 0), (0, 1)), constant_values=PAD_BLOCK)
        tags = filled[:, jnp.clip(slots - start, 0, block.shape[1])]
        later = (slots >= start) & (slots < end)
        return dataclasses.replace(self, block=jnp.where(later[None], tags, self.block))

    def write_joint(self, layer: Int[Array, ""], stream: StreamName, *pair: Array) -> "KVCache":
        """Writes [b s (h d)] keys and values of one stream into joint layer `layer`."""
        joint = _put_pair(self.joint, pair, (layer, 0, self._start(stream), 0))
        return dataclasses.replace(self, joint=joint)

    def write_split(self, layer: Int[Array, ""], *pair: Array) -> "KVCache":
        """Writes keys and values of the decoded stream into split layer `layer`."""
        split = _put_pair(self.split, pair, (layer, 0, self.offset, 0))
        return dataclasses.replace(self, split=split)

    def write_decoded(
        self, kind: Literal["joint", "split"], write: Callable[[Pair, int], tuple[Array, Pair]]
    ) -> tuple[Array, "KVCache"]:
        """Lets a function write tokens of the decoded stream; returns its other result too.

        Args:
            kind: of the layers whose keys and values are written.
            write: takes these, and the slot of the region's first token (`offset` is added to it).
        """
        joint = kind == "joint"
        pair, first = (self.joint, self._first(self.decodes)) if joint else (self.split, 0)
        result, pair = write(pair, first)
        return result, dataclasses.replace(self, **{kind: pair})

    @property
    def joint_block(self) -> Int[Array, "b t"]:
        """Tags of the slots that are read in joint layers."""
        return self.block[:, : self._joint_end]

    @property
    def split_block(self) -> Int[Array, "b r"]:
        """Tags of the slots that are read in split layers: the decoded stream's region."""
        region = slice(self._first(self.decodes), self._end(self.decodes))
        return self.block[:, region][:, : self.reach]

    @property
    def _joint_end(self) -> int:
        whole = self.block.shape[1]
        # The decoded region must be the last one.
        if self.reach is None or self._end(self.decodes) < whole:
            return whole
        return self._first(self.decodes) + self.reach

    def joint_layer(self, layer: Int[Array, ""]) -> tuple[Pair, Int[Array, ""] | None]:
        """Returns keys and values of all joint layers, and `layer`.

        If only some slots are read, these are returned, of this layer alone, and None.
        """
        return _layer_of(self.joint, layer, self._joint_end)

    def split_layer(self, layer: Int[Array, ""]) -> tuple[Pair, Int[Array, ""] | None]:
        """Returns the same of the split layers."""
        return _layer_of(self.split, layer, self.split_block.shape[1])

    def with_rows(self, first: int, rows: "KVCache") -> "KVCache":
        """Copies a smaller cache into the rows from `first` on, each region to its start.

        Args:
            rows: the smaller cache, with no more slots in either region.
        """
        text = rows.understanding_len

        def put(whole, given):
            return _put(whole, given, (0, first, 0, 0))

        def put_regions(whole, given):
            start = (0, first, self.understanding_len, 0)
            return _put(put(whole, given[:, :, :text]), given[:, :, text:], start)

        block = _put(self.block, rows.block[:, :text], (first, 0))
        return dataclasses.replace(
            self,
            joint=jax.tree.map(put_regions, self.joint, rows.joint),
            split=jax.tree.map(put, self.split, rows.split),
            block=_put(block, rows.block[:, text:], (first, self.understanding_len)),
        )

    def copied(self, copies: int) -> "KVCache":
        """Returns a cache with so many copies of each row, next to each other."""
        joint, split = jax.tree.map(
            lambda x: jnp.repeat(x, copies, axis=1), (self.joint, self.split)
        )
        block = jnp.repeat(self.block, copies, axis=0)
        return dataclasses.replace(self, joint=joint, split=split, block=block)

    def row(self, number: int, lengths: tuple[int, int]) -> "KVCache":
        """Returns one row with the first slots of both regions, so many, and nothing committed."""
        text, image = lengths
        own, start = slice(number, number + 1), self.understanding_len
        region = text if self.decodes == "understanding" else image

        def regions(x, axis: int):
            parts = (jax.lax.slice_in_dim(x, at, at + n, axis=axis)
                     for at, n in ((0, text), (start, image)))  # fmt: skip
            return jnp.concatenate([*parts], axis=axis)

        return dataclasses.replace(
            self,
            joint=jax.tree.map(lambda x: regions(x[:, own], 2), self.joint),
            split=jax.tree.map(lambda x: x[:, own, :region], self.split),
            block=regions(self.block[own], 1),
            offset=jnp.int32(0),
            understanding_len=text,
        )

    def advance(self, count: Int[Array, ""] | int) -> "KVCache":
        """Keeps the first `count` slots of this pass; the next pass overwrites the others."""
        return dataclasses.replace(self, offset=self.offset + count)


_put = jax.lax.dynamic_update_slice


def _layer_of(stored: Pair, layer, slots: int) -> tuple[Pair, Int[Array, ""] | None]:
    _, rows, whole, width = stored[0].shape
    if slots == whole:
        return stored, layer
    size, at = (1, rows, slots, width), (layer, 0, 0, 0)
    keys, values = (jax.lax.dynamic_slice(x, at, size)[0] for x in stored)
    return (keys, values), None


def _put_pair(stored: Pair, given: tuple[Array, ...], start) -> Pair:
    """Writes keys and values of one layer."""
    return jax.tree.map(lambda x, own: _put(x, own.astype(x.dtype)[None], start), stored, given)
