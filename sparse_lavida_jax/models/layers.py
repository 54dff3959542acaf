# SPDX-License-Identifier: Apache-2.0
"""One layer of the denoiser: two branches of different width that share one attention.

Spec Sec. 1.2 (block), 2.1-2.3 (generation branch). Each branch has its own norms, query/key/value
projections and MLP; the output projection `attn_out` belongs to the understanding branch and is
shared: only its first `generation_width` outputs matter to a generation token.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, PRNGKeyArray

from sparse_lavida_jax import config
from sparse_lavida_jax.visibility import AnyArray

M = TypeVar("M", bound=nnx.Module)

Rotary = Float[Array, "2 b s half"]  # cosines and sines for half the width of a head


class RmsNorm(nnx.Module):
    """Root-mean-square norm: float32 inside, weight applied in the input's dtype (spec 1.2).

    `padded_width` takes the mean over that many channels, counting missing ones as zeros: the final
    norm sees a generation token zero-padded to the understanding width (spec 2.3).
    """

    def __init__(self, width: int, eps: float):
        self.weight = nnx.Param(jnp.ones(width))
        self.eps = eps

    def __call__(
        self, x: Float[Array, "b s e"], padded_width: int | None = None
    ) -> Float[Array, "b s e"]:
        wide = x.astype(jnp.float32)
        width = padded_width or x.shape[-1]
        mean_square = jnp.sum(wide * wide, axis=-1, keepdims=True) / width
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * self.weight[: x.shape[-1]].astype(x.dtype)[None, None]


class Linear(nnx.Module):
    """A matrix without bias, in the input's dtype. `kernel` is [in, out].

    `lora.attach` adds an adapter: `lora_a` [in, rank] and `lora_b` [rank, out].
    """

    lora_scale = 0.0  # of the adapter; 0: no adapter
    wide_gradient = False  # whether the gradients of its matrices are summed in float32
    lora_a: nnx.Param
    lora_b: nnx.Param

    def __init__(self, in_width: int, out_width: int, *, rngs: nnx.Rngs):
        normal = jax.random.truncated_normal(rngs.params(), -3, 3, (in_width, out_width))
        self.kernel = nnx.Param(normal * in_width**-0.5)

    def __call__(
        self, x: Float[Array, "*b i"], out_width: int | None = None
    ) -> Float[Array, "*b o"]:
        """Multiplies; with `out_width`, computes only the first outputs."""
        return self._adapted(x, self._multiplied(x, self.kernel[:, :out_width]))

    def _adapted(self, x: Float[Array, "*b i"], y: Float[Array, "*b o"]) -> Float[Array, "*b o"]:
        if self.lora_scale:
            low = self._multiplied(x, self.lora_a[...])
            y += self.lora_scale * self._multiplied(low, self.lora_b[:, : y.shape[-1]])
        return y

    def _multiplied(
        self, x: Float[Array, "*b i"], matrix: Float[AnyArray, "i o"]
    ) -> Float[Array, "*b o"]:
        return _multiply(x, matrix, self.wide_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiply(
    x: Float[Array, "*b i"], kernel: Float[AnyArray, "i o"], wide_gradient: bool
) -> Float[Array, "*b o"]:
    """Returns x @ kernel; the gradient of the kernel is `x.T @ cotangent`.

    JAX itself would compute the transpose of `cotangent.T @ x`, which takes twice as long on a CPU.

    Args:
        wide_gradient: whether the product returns its sum over tokens in float32, so that the
            partial sums of devices are added in float32 too: the cotangent of a kernel that was
            cast to bfloat16 would be bfloat16 (`config.Model.grad_reduce_dtype`).
    """
    del wide_gradient
    return x @ kernel.astype(x.dtype)


def _multiply_forward(x, kernel, wide_gradient: bool):
    # Values needed only for the gradient of a frozen kernel are not kept.
    saved = x.value if kernel.perturbed else None
    return _multiply(x.value, kernel.value, wide_gradient), (saved, kernel.value)


def _multiply_backward(wide_gradient: bool, saved, cotangent):
    x, kernel = saved
    if isinstance(cotangent, SymbolicZero):
        return None, None
    to_x = cotangent @ kernel.astype(cotangent.dtype).T
    if x is None:
        return to_x, None
    wide = jnp.float32 if wide_gradient else None
    to_kernel = jnp.einsum("...i,...o->io", x, cotangent, preferred_element_type=wide)
    return to_x, to_kernel.astype(kernel.dtype)


# With symbolic zeros, the rule can see what is differentiated.
_multiply.defvjp(_multiply_forward, _multiply_backward, symbolic_zeros=True)


def linears(model: nnx.Module) -> dict[str, Linear]:
    """Returns all matrices of a model by path."""
    modules = nnx.iter_modules(model)
    return {"/".join(map(str, path)): m for path, m in modules if isinstance(m, Linear)}


def with_linears(model: M, change: Callable[[str, Linear], Any]) -> M:
    """Returns new modules that share the same arrays, with other matrices.

    Args:
        change: takes the path of a matrix and a copy of it, which it may modify, and returns the
            replacement.
    """
    model = jax.tree.map(lambda leaf: leaf, model)
    modules = dict(nnx.iter_modules(model))
    for path, linear in modules.items():
        if isinstance(linear, Linear):
            changed = change("/".join(map(str, path)), linear)
            if not path:  # the model itself is a matrix
                return changed
            setattr(modules[path[:-1]], str(path[-1]), changed)
    return model


class SwiGlu(nnx.Module):
    """Gated MLP of LLaDA: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.gate = Linear(width, hidden, rngs=rngs)
        self.up = Linear(width, hidden, rngs=rngs)
        self.down = Linear(hidden, width, rngs=rngs)

    def __call__(self, x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Branch(nnx.Module):
    """What a layer holds for one branch: norms, query/key/value projections, MLP."""

    def __init__(self, settings: config.Model, width: int, hidden: int, *, rngs: nnx.Rngs):
        heads_width = settings.num_heads * settings.head_dim
        self.attn_norm = RmsNorm(width, settings.norm_eps)
        self.q = Linear(width, heads_width, rngs=rngs)
        # Ours: keys start equal to queries, so that attention starts by similarity. Copying (a cell
        # of an edit, a word of a layout) then works from the start, instead of after thousands of
        # steps.
        self.k = Linear(width, heads_width, rngs=rngs)
        self.k.kernel = nnx.Param(self.q.kernel[...])
        self.v = Linear(width, heads_width, rngs=rngs)
        self.mlp_norm = RmsNorm(width, settings.norm_eps)
        self.mlp = SwiGlu(width, hidden, rngs=rngs)
        self.num_heads = settings.num_heads
        self.dtype = settings.compute_dtype

    def qkv(
        self, x: Float[Array, "b s e"], turn: Rotary
    ) -> tuple[Float[Array, "b s hd"], Float[Array, "b s hd"], Float[Array, "b s hd"]]:
        """Returns rotated queries and keys, and values, heads merged in the last axis."""
        x = self.attn_norm(x).astype(self.dtype)
        q, k = (rotate(matrix(x), turn, self.num_heads) for matrix in (self.q, self.k))
        return q, k, self.v(x)

    def feed_forward(self, x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        return x + self.mlp(self.mlp_norm(x).astype(self.dtype))


class Layer(nnx.Module):
    """One layer of both branches with the shared output projection."""

    def __init__(self, settings: config.Model, *, rngs: nnx.Rngs):
        self.understanding = Branch(settings, settings.width, settings.mlp_hidden, rngs=rngs)
        if not settings.understanding_only:
            self.generation = Branch(
                settings, settings.generation_width, settings.generation_mlp_hidden, rngs=rngs
            )
        heads_width = settings.num_heads * settings.head_dim
        self.attn_out = Linear(heads_width, settings.width, rngs=rngs)

    def finish(
        self, branch: Branch, x: Float[Array, "b s e"], attended: Float[Array, "b s hd"]
    ) -> Float[Array, "b s e"]:
        """Adds the attention output and the MLP of `branch` to its residual stream."""
        return branch.feed_forward(x + self.attn_out(attended, x.shape[-1]))


def rotary(position: Int[AnyArray, "b s"], head_dim: int, theta: float) -> Rotary:
    """Returns the angles by which `rotate` turns the heads of tokens, for all layers."""
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position.astype(jnp.float32)[:, :, None] * frequency[None, None]
    # Written into one array: if stacked, the compiler would recompute them in every rotation.
    return jnp.zeros((2, *angle.shape)).at[0].set(jnp.cos(angle)).at[1].set(jnp.sin(angle))


def rotate(x: Float[Array, "b s hd"], turn: Rotary, num_heads: int) -> Float[Array, "b s hd"]:
    """Applies rotary position embedding, half-split, in float32 (spec 1.2)."""
    b, s, merged = x.shape
    cos, sin = turn[:, :, :, None]
    heads = x.astype(jnp.float32).reshape(b, s, num_heads, -1)
    first, second = jnp.split(heads, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(b, s, merged).astype(x.dtype)


def init_stack(make_layer: Callable[[nnx.Rngs], M], depth: int, key: PRNGKeyArray) -> M:
    """Makes `depth` layers as one module whose arrays have a leading layer axis."""
    return jax.vmap(lambda k: make_layer(nnx.Rngs(params=k)))(jax.random.split(key, depth))
