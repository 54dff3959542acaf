# SPDX-License-Identifier: Apache-2.0
"""Matrices of the layers in 8 bits: they are read faster in small passes, and save memory.

Sampling supports all methods (`Sampling.quantize`), training the first, for a frozen base with
adapters (`Optimizer.frozen_dtype`). Model folders store int8 or float8 as such (`DTYPES`).

| method | matrix | activations | result |
| --- | --- | --- | --- |
| int8 | int8, one scale per column | unchanged | (x Q) s |
| w8a8 | int8, one scale per column | int8, one scale per token | (Qx Q) sx s, summed in int32 |
| fp8 | float8 (4 bits of exponent), one scale per column | the same, per token | in float32 |

Products of GPUs read both operands along the inputs. So a matrix of its own (`fuse.for_inference`
with `by_layer`) is held as [out, in]: a compiler would transpose it at the start of every program.

Values are rounded to nearest; the largest magnitude of a column or a token becomes the largest
number of the type. Embeddings, heads, norms and the vision tower are unchanged.

We do not use `qwix` 0.1.8, whose arrays would do the same: it replaces products by tracing a whole
model on example inputs, and its product with quantised weights alone first makes the float32 matrix
and multiplies that, which saves no memory traffic unless the compiler fuses it.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparse_lavida_jax import config
from sparse_lavida_jax.models.layers import Linear, linears, with_linears
from sparse_lavida_jax.programs.persistent_jit import persistent_jit

M = TypeVar("M", bound=nnx.Module)

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
STACKS = ("joint_layers", "split_layers")
# For matrices in model folders, and how they are multiplied unless specified otherwise.
DTYPES = {"int8": "int8", "float8": "fp8"}


class QuantizedLinear(Linear):
    """A `Linear` in 8 bits: a stack as `kernel` [n, in, out], a single matrix `kernel_t` [out, in].

    Args:
        linear: the matrix, or a stack of them.
        method: see above.
    """

    kernel_t: nnx.Param

    def __init__(self, linear: Linear, method: str):
        self.method = method
        self.wide_gradient = linear.wide_gradient  # for its adapters
        kernel, scale = rounded(linear.kernel[...], _dtype(method), axis=-2)
        self.kernel, self.scale = nnx.Param(kernel), nnx.Param(scale)
        if kernel.ndim == 2:
            self.hold(_transpose(kernel))

    def hold(self, kernel_t: Array) -> None:
        """Holds [out, in] instead of the kernel."""
        del self.kernel
        self.kernel_t = nnx.Param(kernel_t)

    @property
    def dtype(self) -> jnp.dtype:
        """That of its numbers in 8 bits."""
        return (self.kernel_t if self.is_transposed else self.kernel).dtype

    @property
    def is_transposed(self) -> bool:
        return hasattr(self, "kernel_t")

    def __call__(
        self, x: Float[Array, "*b i"], out_width: int | None = None
    ) -> Float[Array, "*b o"]:
        scale = self.scale[:, :out_width]
        kernel = self.kernel_t[:out_width] if self.is_transposed else self.kernel[:, :out_width]
        if self.method == "int8":
            product = self._product(x, kernel.astype(x.dtype), x.dtype).astype(jnp.float32)
        else:
            x8, token_scale = rounded(x, kernel.dtype, axis=-1)
            product = self._product(x8, kernel, self._sum_dtype(x.dtype))
            product = product.astype(jnp.float32) * token_scale
        y = (product * scale.reshape(*[1] * (x.ndim - 1), -1)).astype(x.dtype)
        return self._adapted(x, y)

    def unscaled(self, x8: Array, dtype: jnp.dtype) -> Array:
        """Returns the product with tokens in 8 bits, before it is scaled (`step_gpu`)."""
        return self._product(x8, self.kernel_t[...], self._sum_dtype(dtype))

    def _product(self, x: Array, kernel: Array, dtype: jnp.dtype) -> Array:
        inputs = ((x.ndim - 1,), (int(self.is_transposed),)), ((), ())
        return jax.lax.dot_general(x, kernel, inputs, preferred_element_type=dtype)

    def _sum_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Returns what a sum of 8-bit products is written as.

        On GPUs, one of fp8 is rounded to the dtype of the tokens: half of the bytes.
        """
        if self.method == "w8a8":
            return jnp.dtype(jnp.int32)
        return dtype if self.is_transposed else jnp.dtype(jnp.float32)


def quantized(model: M, method: str) -> M:
    """Returns a model whose layers have their matrices in 8 bits.

    Args:
        model: fused (`fuse.for_inference`) or not; nothing else of it is copied.
        method: "int8", "w8a8" or "fp8".

    Raises:
        ConfigError: an unknown method, or the model has adapters or is quantised already.
    """
    if method not in config.QUANTIZED:
        raise config.ConfigError(
            f"Sampling.quantize={method!r} is unknown: use one of {', '.join(config.QUANTIZED)}."
        )

    def in_8_bits(name: str, linear: Linear) -> Linear:
        if not name.startswith(STACKS):
            return linear
        if isinstance(linear, QuantizedLinear) or linear.lora_scale:
            raise config.ConfigError(
                f"the matrix {name} is quantised already or has an adapter: quantise merged"
                " parameters once."
            )
        return QuantizedLinear(linear, method)

    return with_linears(model, in_8_bits)


def as_asked(model: M, method: str) -> M:
    """Returns a model whose matrices are multiplied by a method; "": unchanged.

    Raises:
        ConfigError: as in `quantized`, or the method needs other numbers than the model has.
    """
    held = method_of(model)
    if method in ("", held):
        return model
    if not held:
        return quantized(model, method)

    def changed(_: str, linear: Linear) -> Linear:
        if isinstance(linear, QuantizedLinear):
            if linear.kernel.dtype != _dtype(method):
                raise config.ConfigError(
                    f"Sampling.quantize={method!r} does not go with a model whose matrices are"
                    f" {linear.dtype.name}: leave it out, or load the model in full."
                )
            linear.method = method
        return linear

    return with_linears(model, changed)


def method_of(model: nnx.Module) -> str:
    """Returns the method by which a model multiplies matrices in 8 bits; "" if it has none."""
    found = (one.method for one in linears(model).values() if isinstance(one, QuantizedLinear))
    return next(found, "")


def side_by_side(
    parts: Sequence[QuantizedLinear], joined: Callable[..., Array], *, transpose: bool
) -> QuantizedLinear:
    """Concatenates matrices of the same inputs.

    Args:
        joined: concatenates columns: those of the matrices, and their scales; as rows with
            `transpose=True`.
        transpose: whether the matrices of the result are [out, in].
    """
    whole = jax.tree.map(lambda leaf: leaf, parts[0])
    kernel = joined((part.kernel[...] for part in parts), transpose=transpose)
    if transpose:
        whole.hold(kernel)
    else:
        whole.kernel = nnx.Param(kernel)
    whole.scale = nnx.Param(joined(part.scale[...] for part in parts))
    return whole


def widened(model: M, dtype: str) -> M:
    """Returns a model with its 8-bit matrices converted to a wider dtype; adapters stay."""

    def wide(_: str, linear: Linear) -> Linear:
        return _wide(linear, dtype) if isinstance(linear, QuantizedLinear) else linear

    return with_linears(model, wide)


def _wide(linear: QuantizedLinear, dtype: str) -> Linear:
    wide = Linear(1, 1, rngs=nnx.Rngs(0))
    product = linear.kernel[...].astype(jnp.float32) * linear.scale[...]
    wide.kernel = nnx.Param(product.astype(dtype))
    if linear.lora_scale:
        wide.lora_a, wide.lora_b = linear.lora_a, linear.lora_b
        wide.lora_scale = linear.lora_scale
    return wide


def rounded(
    values: Float[Array, "..."], dtype: jnp.dtype, axis: int
) -> tuple[Array, Float[Array, "..."]]:
    """Returns values in 8 bits, and the factor to multiply each vector along `axis` by."""
    wide, largest = values.astype(jnp.float32), LARGEST[dtype.name]
    scale = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / largest
    scaled = wide / jnp.where(scale > 0, scale, 1.0)
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scale


@persistent_jit()
def _transpose(matrix: Array) -> Array:
    return matrix.T


def _dtype(method: str) -> jnp.dtype:
    return jnp.dtype(jnp.float8_e4m3fn if method == "fp8" else jnp.int8)
