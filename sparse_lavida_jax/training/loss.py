# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy: plain, and for a vocabulary so large that all its logits must never exist at once.

The logits of a batch of the full model would be larger than the model: 4,096 tokens of 16 rows
times 127,378 words are 33 GB in float32. Only one number per token and a gradient of the size of
the hidden states are needed, and both can be computed from a few tokens at a time.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from sparse_lavida_jax.kernels.sharded import BATCH_AXES
from sparse_lavida_jax.visibility import AnyArray

# Of a tile, at least: enough that its product takes a GPU longer than to read and write the whole
# gradient of the kernel, and enough logits that a small vocabulary does not make many short tiles.
TILE_TOKENS, TILE_LOGITS = 1024, 2**23
FEW_LOGITS = 25_000_000  # 100 MB in float32: many short turns would take more than they save

Sums = tuple[Float[Array, ""], Float[Array, ""]]


def weighted_cross_entropy(
    logits: Float[Array, "*b v"], target: Int[AnyArray, "*b"], weight: Float[AnyArray, "*b"]
) -> Sums:
    """Returns the weighted sum of the cross-entropy, and the plain sum where the weight is not 0.

    Float32. The second is for reporting: divide it by the number of weights above 0.
    """
    nll = _nll(logits, target)
    return jnp.sum(nll * weight), jnp.sum(jnp.where(weight > 0, nll, 0.0))


def tile_of(rows: int, tokens: int, kernel: Any, dtype: Any) -> int:
    """Returns the tokens of a row that the cheaper loss takes at a time; 0: the plain loss.

    The plain loss needs 6 bytes of temporary memory per logit. Tiles need about 2 per logit of a
    tile, and a copy of the kernel if its dtype is not that of the products; they also take less
    time, as they read and write fewer logits. docs/training.md has both.

    Args:
        rows: of the batch; under a mesh, a device has its share of them.
        tokens: per row.
        kernel: of the head, or its type [e v].
        dtype: of the products.
    """
    mesh, (width, words) = jax.sharding.get_abstract_mesh(), kernel.shape
    share = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)
    tokens_here = math.ceil(rows / share) * tokens
    copied = width if kernel.dtype != dtype else 0
    if tokens_here * words <= FEW_LOGITS or 3 * tokens_here <= copied + TILE_TOKENS:
        return 0
    turns = tokens_here // max(TILE_TOKENS, TILE_LOGITS // words)
    return math.ceil(tokens / max(1, turns))


def linear_cross_entropy(
    hidden: Float[Array, "b s e"],
    kernel: Float[Array, "e v"],
    target: Int[AnyArray, "b s"],
    weight: Float[AnyArray, "b s"],
    chunk: int,
) -> Sums:
    """`weighted_cross_entropy` of `hidden @ kernel`, for `chunk` tokens of every row at a time.

    Tokens with a loss are moved to the front of their row, and the loop ends after the last of
    them. The gradient is computed along with the value, so that no logits are computed twice; it
    flows to `hidden` and `kernel`, from the first sum only. Memory: `b * chunk * v` numbers, the
    kernel in the dtype of `hidden`, and its gradient in float32 if it is needed.

    Raises:
        ValueError: `chunk` is below 1.
    """
    sums: Any = _in_parts(hidden, kernel, target, weight, chunk)
    return sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _in_parts(hidden, kernel, target, weight, chunk: int) -> Sums:
    return _with_gradients(hidden, kernel, target, weight, chunk, with_kernel=False)[0]


def _forward(hidden, kernel, target, weight, chunk: int):
    with_kernel = kernel.perturbed  # a frozen head needs no gradient
    hidden, kernel, target, weight = (x.value for x in (hidden, kernel, target, weight))
    return _with_gradients(hidden, kernel, target, weight, chunk, with_kernel)


def _with_gradients(hidden, kernel, target, weight, chunk: int, with_kernel: bool):
    """Returns the sums, and the gradients of the first by `hidden` and by `kernel` or None."""
    chunks, back = _in_chunks(hidden, target, weight, chunk)
    narrow = kernel.astype(hidden.dtype)  # once, not in every turn
    number = jnp.any(chunks[2] > 0, axis=(1, 2)).sum()

    def add(i, carry):
        (weighted, plain), to_kernel, to_hidden = carry
        part, target, weight = (x[i].reshape(-1, *x.shape[3:]) for x in chunks)
        logits = part @ narrow
        wide = logits.astype(jnp.float32)
        total = jax.nn.logsumexp(wide, axis=-1)
        picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        nll = total - picked.astype(jnp.float32)
        to_logits = jnp.exp(wide - total[:, None]) - jax.nn.one_hot(target, wide.shape[1])
        to_logits = (to_logits * weight[:, None]).astype(hidden.dtype)
        if with_kernel:
            to_kernel += jnp.matmul(part.T, to_logits, preferred_element_type=jnp.float32)
        pulled = (to_logits @ narrow.T).reshape(to_hidden.shape[1:])
        to_hidden = jax.lax.dynamic_update_index_in_dim(to_hidden, pulled, i, axis=0)
        sums = weighted + jnp.sum(nll * weight), plain + jnp.sum(jnp.where(weight > 0, nll, 0.0))
        return sums, to_kernel, to_hidden

    to_kernel = jnp.zeros(kernel.shape, jnp.float32) if with_kernel else None
    start = ((jnp.float32(0), jnp.float32(0)), to_kernel, jnp.zeros_like(chunks[0]))
    sums, to_kernel, to_hidden = jax.lax.fori_loop(0, number, add, start)
    to_hidden = jnp.moveaxis(to_hidden, 0, 1).reshape(hidden.shape[0], -1, hidden.shape[2])
    to_hidden = jnp.take_along_axis(to_hidden, back[..., None], axis=1)
    return sums, (to_hidden, jax.tree.map(lambda x: x.astype(kernel.dtype), to_kernel))


def _backward(chunk: int, gradients, cotangents):
    del chunk
    to_hidden, to_kernel = gradients
    scale, _ = cotangents
    if isinstance(scale, SymbolicZero):
        return None, None, None, None
    to_kernel = jax.tree.map(lambda x: x * scale, to_kernel)
    return (to_hidden * scale).astype(to_hidden.dtype), to_kernel, None, None


# With symbolic zeros, the rule can see what is differentiated.
_in_parts.defvjp(_forward, _backward, symbolic_zeros=True)


def _in_chunks(hidden, target, weight, chunk: int):
    """Returns chunks [n b c ...] of tokens, those with a loss first, and the way back [b s]."""
    if chunk < 1:
        raise ValueError(f"{chunk=} is out of range: 1 or more tokens at a time.")
    target, weight = jnp.asarray(target), jnp.asarray(weight)
    first = jnp.argsort(weight <= 0, axis=1, stable=True)

    def cut(x):
        x = jnp.take_along_axis(x, first.reshape(first.shape + (1,) * (x.ndim - 2)), axis=1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return tuple(map(cut, (hidden, target, weight))), jnp.argsort(first, axis=1)


def _nll(logits: Float[Array, "*b v"], target: Int[AnyArray, "*b"]) -> Float[Array, "*b"]:
    log_probability = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(log_probability, target[..., None], axis=-1)[..., 0]
