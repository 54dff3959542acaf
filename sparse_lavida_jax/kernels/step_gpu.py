# SPDX-License-Identifier: Apache-2.0
"""What a decoding step computes between its products, as two kernels for Hopper GPUs (Mosaic GPU).

A step multiplies few tokens by large matrices. What lies in between takes the compiler eight
kernels a layer, each of which mostly starts, and reads what the one before it wrote. Two of these
kernels replace six:

* `rotated` takes queries, keys and values apart, rotates the first two, and writes keys and values
  into the cache, once a layer;
* `added` adds a product, which may be computed in parts, to the residual stream, and norms the sum,
  twice a layer.

silu(gate) * up stays a kernel of the compiler's, as it is a single one already.

They round where the code that they replace does (`layers.rotate`, `layers.RmsNorm`); the
references, with which `kernels.trial` compares them, are that code. Needs jax 0.11. `stack` decides
where they run.
"""

# Types are those of jax 0.11, which a type checker with jax 0.10 does not know.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

HEADS = 32  # queries and keys of so many heads fill the 64 rows of a layout of registers
LANES = 512  # of a residual stream: four numbers for each thread of a program
ACROSS = plgpu.Layout.WGMMA.reduce(0)  # one number for each column

Pair = tuple[Float[Array, "n b t hd"], Float[Array, "n b t hd"]]


def takes(num_heads: int, head_dim: int, width: int, dtype: str) -> bool:
    """Whether the kernels take a model's attention and a residual stream of this width."""
    fits = num_heads % HEADS == 0 and head_dim in (64, 128) and width % LANES == 0
    return fits and dtype in ("bfloat16", "float16")


def _rotated_kernel(qkv, turn, layer, offset, k, v, q, qk_smem, v_smem, ready, *, first: int):
    """One token, and `HEADS` of its heads."""
    batch, token, part = map(lax.axis_index, ("batch", "token", "part"))
    half, number = turn.shape[-1], q.shape[-2]
    heads = pl.ds(part * HEADS, HEADS)

    def heads_of(kind: int):
        return qkv.at[batch, token, pl.ds(kind * number + part * HEADS, HEADS)]

    own_q, own_k = (qk_smem.at[pl.ds(i * HEADS, HEADS)] for i in range(2))
    for i, target in enumerate((own_q, own_k, v_smem)):
        plgpu.copy_gmem_to_smem(heads_of(i), target, ready.at[i])
    angles = [plgpu.load(turn.at[i, batch, token], layout=ACROSS, optimized=False) for i in (0, 1)]
    for i in range(3):
        plgpu.barrier_wait(ready.at[i])
    lower, upper = (qk_smem.at[:, pl.ds(i * half, half)] for i in range(2))
    x, y = (plgpu.load(x, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for x in (lower, upper))
    cos, sin = (lax.broadcast_in_dim(angle, x.shape, [1]) for angle in angles)
    lower[...] = (x * cos - y * sin).astype(q.dtype)
    upper[...] = (y * cos + x * sin).astype(q.dtype)
    plgpu.commit_smem()
    place = layer[0], batch, offset[0] + first + token, heads
    plgpu.copy_smem_to_gmem(own_q, q.at[batch, token, heads])
    plgpu.copy_smem_to_gmem(own_k, k.at[place])
    plgpu.copy_smem_to_gmem(v_smem, v.at[place])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@functools.partial(jax.jit, static_argnames=("first", "head_dim", "interpret"))
def rotated(
    qkv: Float[Array, "b s hd3"],
    turn: Float[Array, "2 b s half"],
    pair: Pair,
    layer: Int[Array, ""],
    offset: Int[Array, ""],
    *,
    first: int,
    head_dim: int,
    interpret: Any = False,
) -> tuple[Float[Array, "b s hd"], Pair]:
    """Returns rotated queries, and the cache with rotated keys, and values, written into it.

    Args:
        qkv: queries, keys and values of all heads, side by side.
        turn: of `layers.rotary`.
        pair: keys and values of all layers; they are changed in place where the caller gives them
            up.
        layer: which of them is written.
        offset, first: their sum is the slot of the first token. All tokens must find a slot.
        interpret: False, or the parameters of the interpreter (`pallas_gpu.interpreted`).
    """
    b, s, wide = qkv.shape
    number = wide // 3 // head_dim

    def smem(heads: int):  # as registers are read from it without conflicts
        half = head_dim // 2
        transforms = plgpu.TilingTransform((8, half)), plgpu.SwizzleTransform(2 * half)
        return plgpu.SMEM((heads, head_dim), qkv.dtype, transforms=transforms)

    def apart(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, head_dim)

    stored = [jax.new_ref(apart(x)) for x in pair]
    q = plgpu.kernel(
        functools.partial(_rotated_kernel, first=first),
        out_type=jax.ShapeDtypeStruct((b, s, number, head_dim), qkv.dtype),
        scratch_types=[smem(2 * HEADS), smem(HEADS), plgpu.Barrier(num_barriers=3)],
        grid=(number // HEADS, s, b),
        grid_names=("part", "token", "batch"),
        interpret=interpret or None,
        kernel_name="rotated_qkv",
    )(apart(qkv), turn, layer.reshape(1), offset.reshape(1), *stored)
    keys, values = (jax.freeze(x).reshape(old.shape) for x, old in zip(stored, pair, strict=True))
    return q.reshape(b, s, -1), (keys, values)


def _added_kernel(x, parts, weight, total, normed, *, eps: float):
    """One token."""
    token, width = lax.axis_index("token"), weight.shape[0]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=LANES // 128)

    def read(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    product = read(parts.at[0, token])
    for i in range(1, parts.shape[0]):
        product = product + read(parts.at[i, token])
    product = product.astype(normed.dtype).astype(jnp.float32)
    whole = (read(x.at[token]).astype(jnp.float32) + product).astype(total.dtype)
    total[token, :] = whole
    wide = whole.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / width + eps)
    made = (wide * scale).astype(total.dtype) * read(weight).astype(total.dtype)
    normed[token, :] = made.astype(normed.dtype)


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
def added(
    x: Float[Array, "b s e"],
    parts: Float[Array, "g b s e"],
    weight: Float[Array, " e"],
    *,
    eps: float,
    dtype: str,
    interpret: Any = False,
) -> tuple[Float[Array, "b s e"], Float[Array, "b s e"]]:
    """Returns x plus the sum of the parts, and its norm (`layers.RmsNorm`) in a dtype.

    Args:
        parts: of a product, added up in order, and then rounded to `dtype`.
        weight, eps: of the norm.
        interpret: as in `rotated`.
    """
    b, s, width = x.shape
    flat = jax.ShapeDtypeStruct((b * s, width), x.dtype)
    made = plgpu.kernel(
        functools.partial(_added_kernel, eps=eps),
        out_type=[flat, jax.ShapeDtypeStruct(flat.shape, dtype)],
        grid=(b * s,),
        grid_names=("token",),
        interpret=interpret or None,
        kernel_name="added_normed",
    )(x.reshape(flat.shape), parts.reshape(-1, *flat.shape), weight)
    total, normed = (one.reshape(x.shape) for one in made)
    return total, normed


def reference_rotated(
    qkv: Array, turn: Array, pair: Pair, layer: Array, offset: Array, *, first: int, head_dim: int
) -> tuple[Array, Pair]:
    """Computes what `rotated` does, as the compiler sees fit."""
    b, s, _ = qkv.shape
    cos, sin = turn[:, :, :, None]
    *turned, values = jnp.split(qkv.reshape(b, s, -1, head_dim), 3, axis=2)
    for i, heads in enumerate(turned):
        x, y = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
        both = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)
        turned[i] = both.astype(qkv.dtype)
    queries, keys, values = (x.reshape(b, s, -1) for x in (*turned, values))
    start = layer, 0, offset + first, 0
    written = [
        lax.dynamic_update_slice(stored, own.astype(stored.dtype)[None], start)
        for stored, own in zip(pair, (keys, values), strict=True)
    ]
    return queries, (written[0], written[1])


def reference_added(
    x: Array, parts: Array, weight: Array, *, eps: float, dtype: str
) -> tuple[Array, Array]:
    """Computes what `added` does, as the compiler sees fit."""
    total = (x + parts.sum(axis=0).astype(dtype)).astype(x.dtype)
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = (wide * scale).astype(x.dtype) * weight.astype(x.dtype)[None, None]
    return total, normed.astype(dtype)
