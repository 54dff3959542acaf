# SPDX-License-Identifier: Apache-2.0
"""What a decoding step computes between its products, as kernels for Hopper GPUs (Mosaic GPU).

A step multiplies few tokens by large matrices. What lies in between takes the compiler eight
kernels a layer, each of which mostly starts, and reads what the one before it wrote. Two of these
kernels replace six:

* `rotated` takes queries, keys and values apart, rotates the first two, and writes keys and values
  into the cache, once a layer;
* `added` adds a product, which may be computed in parts, to the residual stream, and norms the sum,
  twice a layer.

silu(gate) * up stays a kernel of the compiler's, as it is a single one already.

With matrices in float8 (`models/quantize.py`, fp8) `added` also multiplies a product by its scales,
and rounds the norm to float8, with a scale for each token. `narrowed`, a third kernel, does so with
the output of attention and with silu(gate) * up.

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

from sparse_lavida_jax.kernels.common import STEP_LANES

HEADS = 32  # queries and keys of so many heads fill the 64 rows of a layout of registers
ACROSS = plgpu.Layout.WGMMA.reduce(0)  # one number for each column

NARROW, LARGEST = jnp.float8_e4m3fn, 448.0
CHUNK = 2048  # numbers of a token that `narrowed` holds in registers

Pair = tuple[Float[Array, "n b t hd"], Float[Array, "n b t hd"]]
# Of a product in float8, for each token and for each output.
Scales = tuple[Float[Array, "b s 1"], Float[Array, " o"]]
Narrow = tuple[Float[Array, "b s e"], Float[Array, "b s 1"]]  # tokens in float8, and their scales


def takes(num_heads: int, head_dim: int, width: int, dtype: str) -> bool:
    """Whether the kernels take a model's attention and a residual stream of this width."""
    fits = num_heads % HEADS == 0 and head_dim in (64, 128) and width % STEP_LANES == 0
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


def _row(width: int) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), vec_size=STEP_LANES // 128)


def _read(ref, width: int):
    return plgpu.load(ref, layout=_row(width), optimized=False)


def _scaled(product, scales, token, start: int, width: int, dtype):
    """Returns numbers of a product, multiplied by its scales, if it has any, in float32."""
    if scales:
        of_tokens, of_outputs = scales
        product = product.astype(jnp.float32) * of_tokens[token]
        product = product * _read(of_outputs.at[pl.ds(start, width)], width)
    return product.astype(dtype).astype(jnp.float32)


def _scale_of(most):
    """Returns the scale of a token with this largest magnitude, and what to divide it by."""
    scale = most / LARGEST
    return scale, jnp.where(scale > 0, scale, 1.0)


def _added_kernel(x, parts, weight, *refs, eps: float, dtype: str, narrow: bool):
    """One token."""
    *scales, total, normed = refs[:-1] if narrow else refs
    token, width = lax.axis_index("token"), weight.shape[0]
    product = _read(parts.at[0, token], width)
    for i in range(1, parts.shape[0]):
        product = product + _read(parts.at[i, token], width)
    product = _scaled(product, scales, token, 0, width, dtype)
    whole = (_read(x.at[token], width).astype(jnp.float32) + product).astype(total.dtype)
    total[token, :] = whole
    wide = whole.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / width + eps)
    made = (wide * scale).astype(total.dtype) * _read(weight, width).astype(total.dtype)
    made = made.astype(dtype)
    if narrow:
        wide = made.astype(jnp.float32)
        refs[-1][token], divisor = _scale_of(jnp.max(jnp.abs(wide)))
        made = wide / divisor
    normed[token, :] = made.astype(normed.dtype)


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "narrow", "interpret"))
def added(
    x: Float[Array, "b s e"],
    parts: Float[Array, "g b s e"],
    weight: Float[Array, " e"],
    scales: Scales | None = None,
    *,
    eps: float,
    dtype: str,
    narrow: bool = False,
    interpret: Any = False,
) -> tuple[Float[Array, "b s e"], Float[Array, "b s e"] | Narrow]:
    """Returns x plus the sum of the parts, and its norm (`layers.RmsNorm`) in a dtype.

    Args:
        parts: of a product, added up in order, multiplied by `scales`, and rounded to `dtype`.
        weight, eps: of the norm.
        narrow: whether the norm is then rounded to float8.
        interpret: as in `rotated`.
    """
    b, s, width = x.shape
    flat = jax.ShapeDtypeStruct((b * s, width), x.dtype)
    of_tokens = [jax.ShapeDtypeStruct((b * s,), jnp.float32)] * narrow
    total, normed, *scale = plgpu.kernel(
        functools.partial(_added_kernel, eps=eps, dtype=dtype, narrow=narrow),
        out_type=[flat, jax.ShapeDtypeStruct(flat.shape, NARROW if narrow else dtype), *of_tokens],
        grid=(b * s,),
        grid_names=("token",),
        interpret=interpret or None,
        kernel_name="added_normed",
    )(x.reshape(flat.shape), parts.reshape(-1, *flat.shape), weight, *_flat(scales))
    total, normed = (one.reshape(x.shape) for one in (total, normed))
    return total, (normed, scale[0].reshape(b, s, 1)) if narrow else normed


def _flat(scales: Scales | None) -> list[Array]:
    return [] if scales is None else [scales[0].reshape(-1), scales[1]]


def _narrowed_kernel(x, *refs, dtype: str, gated: bool):
    """One token."""
    *scales, out, scale = refs
    token, width = lax.axis_index("token"), out.shape[-1]
    chunk = CHUNK if width % CHUNK == 0 else STEP_LANES

    def numbers(start: int):
        def read(start: int):
            part = _read(x.at[token, pl.ds(start, chunk)], chunk)
            return _scaled(part, scales, token, start, chunk, dtype)

        if not gated:
            return read(start)
        gate = read(start)
        active = (gate / (1 + jnp.exp(-gate))).astype(dtype).astype(jnp.float32)
        return (active * read(width + start)).astype(dtype).astype(jnp.float32)

    starts = range(0, width, chunk)
    most = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(numbers(start))) for start in starts))
    scale[token], divisor = _scale_of(most)
    for start in starts:  # once more, from the cache: a token does not fit into registers
        out[token, pl.ds(start, chunk)] = (numbers(start) / divisor).astype(out.dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "gated", "interpret"))
def narrowed(
    x: Float[Array, "b s i"],
    scales: Scales | None = None,
    *,
    dtype: str,
    gated: bool = False,
    interpret: Any = False,
) -> Narrow:
    """Returns tokens in float8, and their scales (`quantize.rounded`).

    Args:
        x: multiplied by `scales`, and rounded to `dtype`, first.
        gated: whether x holds gate and up, of which silu(gate) * up is taken.
        interpret: as in `rotated`.
    """
    b, s, width = x.shape
    width //= 2 if gated else 1
    values, scale = plgpu.kernel(
        functools.partial(_narrowed_kernel, dtype=dtype, gated=gated),
        out_type=[
            jax.ShapeDtypeStruct((b * s, width), NARROW),
            jax.ShapeDtypeStruct((b * s,), jnp.float32),
        ],
        grid=(b * s,),
        grid_names=("token",),
        interpret=interpret or None,
        kernel_name="narrowed",
    )(x.reshape(b * s, -1), *_flat(scales))
    return values.reshape(b, s, width), scale.reshape(b, s, 1)


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
    x: Array, parts: Array, weight: Array, scales: Scales | None = None,
    *, eps: float, dtype: str, narrow: bool = False,
) -> tuple[Array, Array | Narrow]:  # fmt: skip
    """Computes what `added` does, as the compiler sees fit."""
    total = (x + _reference_scaled(parts.sum(axis=0), scales).astype(dtype)).astype(x.dtype)
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = (wide * scale).astype(x.dtype) * weight.astype(x.dtype)[None, None]
    normed = normed.astype(dtype)
    return total, reference_narrowed(normed, dtype=dtype) if narrow else normed


def reference_narrowed(
    x: Array, scales: Scales | None = None, *, dtype: str, gated: bool = False
) -> Narrow:
    """Computes what `narrowed` does, as the compiler sees fit."""
    x = _reference_scaled(x, scales).astype(dtype)
    if gated:
        gate, up = jnp.split(x, 2, axis=-1)
        x = jax.nn.silu(gate.astype(jnp.float32)).astype(dtype) * up
    wide = x.astype(jnp.float32)
    scale, divisor = _scale_of(jnp.abs(wide).max(axis=-1, keepdims=True))
    return (wide / divisor).astype(NARROW), scale


def _reference_scaled(product: Array, scales: Scales | None) -> Array:
    if scales is None:
        return product
    return product.astype(jnp.float32) * scales[0] * scales[1][None, None]
