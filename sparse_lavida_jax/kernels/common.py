# SPDX-License-Identifier: Apache-2.0
"""What the implementations share: the shape of a call, and the entry around their two passes.

An implementation is three functions of one signature each, which `entry` makes one function of:

* `prepare(q, k, v, tags, sizes)` returns the first four as the kernels read them.
* `forward(q, k, v, layer, tags, tables, shape)` returns the output [b s (h d)] and its log-sum-exp;
  `k` and `v` are stacked, [n b t (h d)].
* `backward(q, k, v, tags, tables, out, lse, cotangents, shape)` returns those of q, k and v, given
  those of the output and of its log-sum-exp.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from sparse_lavida_jax.kernels.tables import GpuSizes, TileSizes, make_tables

LOWEST = -1e30  # a logit under the mask: not infinite, so that differences stay numbers
LOG2_E = 1.4426950408889634

# What a row that attends to nothing reports as its log-sum-exp: exp(logit - this) is 0, which is
# what a backward pass needs.
NOTHING_SEEN_LSE = 1e30

Tags = tuple[Any, ...]  # query block and horizon, key block, query and key segment or None


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is compiled into a kernel.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the call.
        scale: of the logits.
        sizes: of tiles; None for the reference.
        interpret: False, or what the interpreter of the kernel takes.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sizes: TileSizes | GpuSizes | None = None
    interpret: Any = False

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


def entry(prepare: Callable, forward: Callable, backward: Callable) -> Callable:
    """Returns `attention(q, k, v, *tags, shape, layer=None, tables=None)` of an implementation.

    It returns the output and log-sum-exp of `kernels.attention.step_causal_attention`, and is
    differentiable in q, k and v, except for a stacked cache. Tables are those of the same tags and
    sizes, and made where there are none; it refuses tables of other tiles.
    """

    def run(shape, structure, q, k, v, leaves):
        tags, tables = jax.tree.unflatten(structure, leaves)
        return tuple(forward(q, k[None], v[None], 0, tags, tables, shape))

    def run_and_save(shape, structure, q, k, v, leaves):
        out, lse = run(shape, structure, q, k, v, leaves)
        # Named, so that a rematerialisation policy may keep them and not run the kernel again.
        out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
        return (out, lse), (q, k, v, leaves, out, lse)

    def gradients(shape, structure, saved, cotangents):
        q, k, v, leaves, out, lse = saved
        tags, tables = jax.tree.unflatten(structure, leaves)
        return (*backward(q, k, v, tags, tables, out, lse, cotangents, shape), None)

    differentiable = jax.custom_vjp(run, nondiff_argnums=(0, 1))
    differentiable.defvjp(run_and_save, gradients)

    def attention(q, k, v, *given, shape, layer=None, tables=None):
        tags: Tags = (*given, *[None] * (5 - len(given)))
        tables = tables or make_tables(*tags, sizes=shape.sizes)
        if tables.sizes != shape.sizes:
            raise ValueError(f"the tables are of {tables.sizes}, the call is of {shape.sizes}.")
        length = q.shape[1]
        q, k, v, tags = prepare(q, k, v, tags, shape.sizes)
        if layer is None:
            # Tags go in as leaves: JAX differentiates integers by what no annotated class holds.
            leaves, structure = jax.tree.flatten((tags, tables))
            out, lse = differentiable(shape, structure, q, k, v, leaves)
        else:
            out, lse = forward(q, k, v, layer, tags, tables, shape)
        return out[:, :length], lse.reshape(*lse.shape[:2], -1)[:, :, :length]

    return attention


def whole_tiles(x: Float[Array, "*n t hd"], multiple: int) -> Float[Array, "*n t2 hd"]:
    """Fills the tokens of [... t (h d)] up to whole tiles."""
    missing = -x.shape[-2] % multiple
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, missing), (0, 0))) if missing else x


def row_sums(
    out: Float[Array, "b s hd"],
    cotangents: tuple[Float[Array, "b s hd"], Float[Array, "b h *one s"]],
    num_heads: int,
) -> Float[Array, "b h *one s"]:
    """Returns what is subtracted from every dP of a row (FlashAttention's delta).

    Args:
        cotangents: of the output and of its log-sum-exp.
    """
    dout, dlse = cotangents
    products = out.astype(jnp.float32) * dout.astype(jnp.float32)
    sums = products.reshape(*out.shape[:2], num_heads, -1).sum(axis=-1).swapaxes(1, 2)
    return sums.reshape(dlse.shape) - dlse
