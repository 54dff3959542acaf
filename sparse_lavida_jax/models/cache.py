# SPDX-License-Identifier: Apache-2.0
"""The key/value cache of a response being decoded.

Two static buffers: the joint layers' holds two regions, understanding tokens [0:u) then generation
tokens [u:t); the split layers' holds only the region of the stream that is decoded. Heads are
merged in the last axis. Keys are stored rotated. Tags are the real step numbers, append-only.
Every pass writes its tokens contiguously at one offset shared by all rows; what it leaves after the
committed ones is overwritten by the next pass, and until then no token sees it.
"""

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.kernels.sharded import place_cache
from sparse_lavida_jax.visibility import PAD_BLOCK, AnyArray

StreamName = Literal["understanding", "generation"]


@flax.struct.dataclass
class KVCache:
    """Keys and values of committed tokens, and room for the tokens of one step.

    Attributes:
        joint_keys, joint_values: of the joint layers, both regions.
        split_keys, split_values: of the split layers, the decoded stream's region.
        block: tags of the joint buffer; `PAD_BLOCK` where a slot is empty.
        offset: next free slot of the decoded stream, counted from the start of its region.
        understanding_len: slots of the understanding region (u), static.
        decodes: the stream that is decoded, static.
    """

    joint_keys: Float[Array, "n b t hd"]
    joint_values: Float[Array, "n b t hd"]
    split_keys: Float[Array, "m b r hd"]
    split_values: Float[Array, "m b r hd"]
    block: Int[Array, "b t"]
    offset: Int[Array, ""]
    understanding_len: int = flax.struct.field(pytree_node=False)
    decodes: StreamName = flax.struct.field(pytree_node=False)

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
        joint = (settings.num_joint_layers, batch, total, width)
        split = (settings.num_split_layers, batch, region, width)
        return cls(
            *(jnp.zeros(joint, dtype) for _ in range(2)),
            *(jnp.zeros(split, dtype) for _ in range(2)),
            block=jnp.full((batch, total), PAD_BLOCK, jnp.int32),
            offset=jnp.int32(0),
            understanding_len=understanding_len,
            decodes=decodes,
        )

    def _start(self, stream: StreamName) -> Int[Array, ""] | int:
        """Slot of the joint buffer where tokens of `stream` are written now."""
        region = 0 if stream == "understanding" else self.understanding_len
        return region + (self.offset if stream == self.decodes else 0)

    def _end(self, stream: StreamName) -> int:
        return self.understanding_len if stream == "understanding" else self.block.shape[1]

    def placed(self, num_heads: int) -> "KVCache":
        """Lays keys and values out over the mesh as attention reads them."""
        names = ("joint_keys", "joint_values", "split_keys", "split_values")
        return dataclasses.replace(
            self, **{name: place_cache(getattr(self, name), num_heads) for name in names}
        )

    def begin(self, stream: StreamName, block: Int[AnyArray, "b s"]) -> "KVCache":
        """Tags the slots that this pass writes, and empties the rest of the region."""
        start, end = self._start(stream), self._end(stream)
        slots = jnp.arange(self.block.shape[1])
        later = (slots >= start) & (slots < end)
        tags = jnp.where(later[None], jnp.int32(PAD_BLOCK), self.block)
        return dataclasses.replace(
            self, block=jax.lax.dynamic_update_slice(tags, block, (0, start))
        )

    def write_joint(self, layer: Int[Array, ""], stream: StreamName, keys, values) -> "KVCache":
        """Writes [b s (h d)] keys and values of one stream into joint layer `layer`."""
        start = (layer, 0, self._start(stream), 0)
        return dataclasses.replace(
            self,
            joint_keys=_put(self.joint_keys, keys, start),
            joint_values=_put(self.joint_values, values, start),
        )

    def write_split(self, layer: Int[Array, ""], keys, values) -> "KVCache":
        """Writes keys and values of the decoded stream into split layer `layer`."""
        start = (layer, 0, self.offset, 0)
        return dataclasses.replace(
            self,
            split_keys=_put(self.split_keys, keys, start),
            split_values=_put(self.split_values, values, start),
        )

    @property
    def split_block(self) -> Int[Array, "b r"]:
        """Tags of the decoded stream's region."""
        if self.decodes == "understanding":
            return self.block[:, : self.understanding_len]
        return self.block[:, self.understanding_len :]

    def with_rows(self, first: int, rows: "KVCache") -> "KVCache":
        """Puts what a smaller cache holds into the rows from `first` on, each region at its start.

        Args:
            rows: with no more slots in either region.
        """
        put, text, changed = jax.lax.dynamic_update_slice, rows.understanding_len, {}
        for name in ("joint_keys", "joint_values"):
            given = getattr(rows, name)
            whole = put(getattr(self, name), given[:, :, :text], (0, first, 0, 0))
            start = (0, first, self.understanding_len, 0)
            changed[name] = put(whole, given[:, :, text:], start)
        for name in ("split_keys", "split_values"):
            changed[name] = put(getattr(self, name), getattr(rows, name), (0, first, 0, 0))
        block = put(self.block, rows.block[:, :text], (first, 0))
        block = put(block, rows.block[:, text:], (first, self.understanding_len))
        return dataclasses.replace(self, block=block, **changed)

    def commit(self, count: Int[Array, ""] | int) -> "KVCache":
        """Keeps the first `count` slots of this pass; the next pass overwrites the others."""
        return dataclasses.replace(self, offset=self.offset + count)


def _put(buffer, update, start):
    return jax.lax.dynamic_update_slice(buffer, update.astype(buffer.dtype)[None], start)
