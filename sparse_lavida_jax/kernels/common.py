# SPDX-License-Identifier: Apache-2.0
"""Shared by the attention implementations: the shape of a call, and some constants."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

LOWEST = -1e30  # a masked logit: not infinite, so that differences are not NaN
LOG2_E = 1.4426950408889634

# The log-sum-exp of a row that attends to nothing: exp(logit - this) is 0, as a backward pass
# needs.
NOTHING_SEEN_LSE = 1e30

STEP_LANES = 512  # widths that `step_gpu` takes are multiples of it: four numbers for each thread

Attended = tuple[Float[Array, "b s hd"], Float[Array, "b h s"]]  # output and log-sum-exp
Tags = tuple[Any, ...]  # query block and horizon, key block, query and key segment or None


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static parameters of a kernel.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the call.
        scale: of the logits.
        sizes: of tiles; None for the reference.
        interpret: False, or the parameters of the kernel's interpreter.
        splits: programs that share the keys of a row, in a forward pass of `pallas_gpu` over a
            cache (`devices.splits_of`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sizes: Any = None
    interpret: Any = False
    splits: int = 1

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


def whole_tiles(x: Float[Array, "*n t hd"], multiple: int) -> Float[Array, "*n t2 hd"]:
    """Pads the tokens of [... t (h d)] to whole tiles."""
    missing = -x.shape[-2] % multiple
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, missing), (0, 0))) if missing else x


def row_sums(
    out: Float[Array, "b s hd"],
    cotangents: tuple[Float[Array, "b s hd"], Float[Array, "b h *one s"]],
    num_heads: int,
) -> Float[Array, "b h *one s"]:
    """Returns the value to subtract from every dP of a row (FlashAttention's delta).

    Args:
        cotangents: of the output and of its log-sum-exp.
    """
    dout, dlse = cotangents
    products = out.astype(jnp.float32) * dout.astype(jnp.float32)
    sums = products.reshape(*out.shape[:2], num_heads, -1).sum(axis=-1).swapaxes(1, 2)
    return sums.reshape(dlse.shape) - dlse
