# SPDX-License-Identifier: Apache-2.0
"""The image tokenizer: convolutional encoder, codebook, decoder (spec Sec. 3).

It belongs to the family used in the release (diffusers' `VQModel`), with the same padding and
names, so that released weights fit. Images are [b h w 3] in [0, 1]; a code represents `factor` x
`factor` pixels.
"""

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from sparse_lavida_jax import config, runtime
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.programs.persistent_jit import persistent_jit, shapes_of
from sparse_lavida_jax.programs.program_arguments import taken_apart

MOST_WORKSPACE = 2**32  # bytes that an algorithm for a convolution may ask for
SMALLEST_TILE = 8  # pixels per side


class VQModel(nnx.Module):
    """Converts an image to codes, and back."""

    def __init__(self, settings: config.VQ, *, rngs: nnx.Rngs):
        latent = settings.latent_channels
        self.encoder = Encoder(settings, rngs=rngs)
        self.quant_conv = Conv(latent, latent, (1, 1), rngs=rngs)
        self.codebook = nnx.Param(
            jax.random.normal(rngs.params(), (settings.codebook_size, latent))
        )
        self.post_quant_conv = Conv(latent, latent, (1, 1), rngs=rngs)
        self.decoder = Decoder(settings, rngs=rngs)
        self.settings = settings

    def encode(self, pixels: Float[Array, "b h w 3"]) -> Int[Array, "b y x"]:
        """Returns the codes of images in [0, 1].

        Raises:
            ValueError: a side of the images is not a multiple of the downsampling factor.
        """
        return self.nearest(self.latents(pixels))

    def decode(self, codes: Int[Array, "b y x"]) -> Float[Array, "b h w 3"]:
        """Returns the images of codes, clipped to [0, 1]."""
        return jnp.clip(self.decode_latents(self.codebook[codes]), 0, 1)

    def loss(
        self, pixels: Float[Array, "b h w 3"]
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Returns the straight-through loss of VQ-VAE (arXiv:1711.00937, Eq. 3) and its terms."""
        latents = self.latents(pixels)
        codes = self.codebook[self.nearest(latents)]
        # The decoder's gradient reaches the encoder as if there were no codebook in between.
        decoded = self.decode_latents(latents + jax.lax.stop_gradient(codes - latents))
        terms = {
            "pixels": jnp.mean(jnp.abs(decoded - pixels)),
            "codebook": jnp.mean((codes - jax.lax.stop_gradient(latents)) ** 2),
            "commitment": jnp.mean((latents - jax.lax.stop_gradient(codes)) ** 2),
        }
        total = terms["pixels"] + terms["codebook"] + self.settings.commitment * terms["commitment"]
        return total, terms

    def latents(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b y x d"]:
        """Returns what the codebook quantises."""
        height, width, factor = *pixels.shape[1:3], self.settings.factor
        if height % factor or width % factor:
            raise ValueError(
                f"The image tokenizer was given images of {height}x{width} pixels; both sides"
                f" must be multiples of {factor}. Resize or crop them first."
            )
        if not self.settings.cells_alone:
            return self.quant_conv(self.encoder(pixels))
        rows, columns = height // factor, width // factor
        cut = "b (y i) (x j) c -> (b y x) i j c"
        cells = einops.rearrange(pixels, cut, y=rows, x=columns)
        latents = self.quant_conv(self.encoder(cells))
        return einops.rearrange(latents, "(b y x) 1 1 d -> b y x d", y=rows, x=columns)

    def nearest(self, latents: Float[Array, "b y x d"]) -> Int[Array, "b y x"]:
        """Returns the nearest code by Euclidean distance in float32; of equal ones, the first."""
        latents, codebook = latents.astype(jnp.float32), self.codebook.astype(jnp.float32)
        # |z - e|^2 without |z|^2, which is the same for every code.
        overlap = jnp.einsum("byxd,cd->byxc", latents, codebook, precision="highest")
        distance = jnp.sum(codebook**2, axis=-1)[None, None, None] - 2 * overlap
        return jnp.argmin(distance, axis=-1)

    def decode_latents(self, latents: Float[Array, "b y x d"]) -> Float[Array, "b h w 3"]:
        """Returns images, not yet clipped."""
        return self.decoder(self.post_quant_conv(latents))


if TYPE_CHECKING:
    from sparse_lavida_jax.art.cells import CellModel

    AnyVQ = VQModel | CellModel  # they have the same methods
else:
    AnyVQ = nnx.Module  # other models do without the art world


@functools.cache
def shapes(settings: config.VQ) -> AnyVQ:
    """Returns the model with shapes instead of arrays; it must not be modified."""
    kind = VQModel
    if settings.kind == "cells":
        from sparse_lavida_jax.art.cells import CellModel as kind
    return shapes_of(lambda: kind(settings, rngs=nnx.Rngs(0)), settings)


class Encoder(nnx.Module):
    """Halves the sides after every resolution except the last."""

    def __init__(self, settings: config.VQ, *, rngs: nnx.Rngs):
        channels = settings.channels
        self.conv_in = _conv3x3(3, channels[0], rngs=rngs)
        self.down_blocks = _blocks(DownBlock, settings, channels, rngs=rngs)
        self.mid_block = MidBlock(settings, channels[-1], rngs=rngs)
        self.conv_norm_out = Norm(settings, channels[-1])
        self.conv_out = _conv3x3(channels[-1], settings.latent_channels, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w 3"]) -> Float[Array, "b y x d"]:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(nnx.Module):
    """Mirrors the encoder, with one more residual layer in every block."""

    def __init__(self, settings: config.VQ, *, rngs: nnx.Rngs):
        channels = settings.channels[::-1]
        self.conv_in = _conv3x3(settings.latent_channels, channels[0], rngs=rngs)
        self.mid_block = MidBlock(settings, channels[0], rngs=rngs)
        self.up_blocks = _blocks(UpBlock, settings, channels, rngs=rngs)
        self.conv_norm_out = Norm(settings, channels[-1])
        self.conv_out = _conv3x3(channels[-1], 3, rngs=rngs)

    def __call__(self, x: Float[Array, "b y x d"]) -> Float[Array, "b h w 3"]:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))


class Block(nnx.Module):
    """Residual layers; the first one changes the number of channels."""

    def __init__(self, settings: config.VQ, before: int, after: int, count: int, *, rngs: nnx.Rngs):
        channels = itertools.pairwise((before, *[after] * count))
        self.resnets = nnx.List(Resnet(settings, *pair, rngs=rngs) for pair in channels)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b y x d"]:
        for resnet in self.resnets:
            x = resnet(x)
        return x


class DownBlock(Block):
    """A block, then a convolution with stride 2, except in the last one."""

    def __init__(self, settings: config.VQ, before: int, after: int, *, last: bool, rngs: nnx.Rngs):
        super().__init__(settings, before, after, settings.layers_per_block, rngs=rngs)
        self.downsampler = (
            None if last else nnx.Conv(after, after, (3, 3), 2, padding="VALID", rngs=rngs)
        )

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b y x d"]:
        x = super().__call__(x)
        if self.downsampler is None:
            return x
        # Zeros on the right and bottom only, as released.
        return self.downsampler(jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))))


class UpBlock(Block):
    """A block, then upsampling by two, except in the last one."""

    def __init__(self, settings: config.VQ, before: int, after: int, *, last: bool, rngs: nnx.Rngs):
        super().__init__(settings, before, after, settings.layers_per_block + 1, rngs=rngs)
        self.shuffle = settings.upsampling == "shuffle"
        if last:
            self.upsampler = None
        elif self.shuffle:
            self.upsampler = Conv(after, 4 * after, (1, 1), rngs=rngs)
        else:
            self.upsampler = _conv3x3(after, after, rngs=rngs)

    def __call__(self, x: Float[Array, "b y x c"]) -> Float[Array, "b h w d"]:
        x = super().__call__(x)
        if self.upsampler is None:
            return x
        if self.shuffle:
            return einops.rearrange(self.upsampler(x), "b y x (i j c) -> b (y i) (x j) c", i=2, j=2)
        return _where_narrow(x, self.upsampler, _doubled_at_corners, _doubled)


class MidBlock(Block):
    """Two residual layers, with attention between them if the config asks for it."""

    def __init__(self, settings: config.VQ, channels: int, *, rngs: nnx.Rngs):
        super().__init__(settings, channels, channels, 2, rngs=rngs)
        self.attention = (
            SpatialAttention(settings, channels, rngs=rngs) if settings.mid_attention else None
        )

    def __call__(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
        first, second = self.resnets
        x = first(x)
        return second(x if self.attention is None else self.attention(x))


class Resnet(nnx.Module):
    """x + conv(silu(norm(conv(silu(norm(x))))))."""

    def __init__(self, settings: config.VQ, before: int, after: int, *, rngs: nnx.Rngs):
        self.norm1 = Norm(settings, before)
        self.conv1 = _conv3x3(before, after, rngs=rngs)
        self.norm2 = Norm(settings, after)
        # Starts close to the identity (ours): deep, narrow stacks learn faster.
        self.conv2 = _conv3x3(after, after, rngs=rngs, variance=0.1)
        self.conv_shortcut = Conv(before, after, (1, 1), rngs=rngs) if before != after else None

    def __call__(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x d"]:
        h = self.conv1(jax.nn.silu(self.norm1(x)))
        h = self.conv2(jax.nn.silu(self.norm2(h)))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class SpatialAttention(nnx.Module):
    """Single-head attention over all positions of an image, with softmax in float32."""

    def __init__(self, settings: config.VQ, channels: int, *, rngs: nnx.Rngs):
        self.norm = Norm(settings, channels)
        self.q = nnx.Linear(channels, channels, rngs=rngs)
        self.k = nnx.Linear(channels, channels, rngs=rngs)
        self.v = nnx.Linear(channels, channels, rngs=rngs)
        self.out = nnx.Linear(channels, channels, rngs=rngs)

    def __call__(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
        flat = einops.rearrange(self.norm(x), "b y x c -> b (y x) c")
        q, k, v = self.q(flat), self.k(flat), self.v(flat)
        logits = jnp.einsum("bqc,bkc->bqk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(logits * q.shape[-1] ** -0.5, axis=-1).astype(v.dtype)
        return x + self.out(weights @ v).reshape(x.shape)


class Norm(nnx.Module):
    """Group norm in float32, epsilon 1e-6, over the image; `norm="pixel"`: per position."""

    def __init__(self, settings: config.VQ, channels: int):
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.groups = settings.norm_groups
        self.axes = (1, 2, 4) if settings.norm == "group" else (4,)

    def __call__(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
        if self.axes == (4,):
            return self.in_two_passes(x)
        return _where_narrow(x, self, Norm.in_one_pass, Norm.in_two_passes)

    def in_two_passes(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
        grouped = einops.rearrange(x.astype(jnp.float32), "b y x (g c) -> b y x g c", g=self.groups)
        centred = grouped - grouped.mean(axis=self.axes, keepdims=True)
        variance = (centred**2).mean(axis=self.axes, keepdims=True)
        dtype = jnp.result_type(x, self.scale)
        normed = (centred * jax.lax.rsqrt(variance + 1e-6)).reshape(x.shape).astype(dtype)
        return normed * self.scale[None, None, None] + self.bias[None, None, None]

    def in_one_pass(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
        """Returns the same for `norm="group"` from sums and sums of squares, with `x` read once."""
        wide = x.astype(jnp.float32)

        def mean(x: Float[Array, "b y x c"]) -> Float[Array, "b 1 1 c"]:
            channels = einops.rearrange(x.mean(axis=(1, 2)), "b (g c) -> b g c", g=self.groups)
            size = channels.shape[-1]
            return einops.repeat(channels.mean(axis=-1), "b g -> b 1 1 (g c)", c=size)

        centre = mean(wide)
        scale = self.scale[None, None, None] * jax.lax.rsqrt(mean(wide**2) - centre**2 + 1e-6)
        shift = self.bias[None, None, None] - centre * scale
        return (wide * scale + shift).astype(jnp.result_type(x, self.scale))


def _where_narrow(
    x: Float[Array, "b y x c"], module: nnx.Module, narrow: Callable, plain: Callable
) -> Float[Array, "b h w d"]:
    """Calls `narrow` for bfloat16 on accelerators, else `plain`, whose bits are to stay."""
    if x.dtype != jnp.bfloat16:
        return plain(module, x)
    return jax.lax.platform_dependent(module, x, cpu=plain, default=narrow)


def _doubled(conv: "Conv", x: Float[Array, "b y x c"]) -> Float[Array, "b h w d"]:
    """Returns the 3x3 convolution of an image whose sides are doubled by repetition."""
    return conv(einops.repeat(x, "b y x c -> b (y 2) (x 2) c"))


def _doubled_at_corners(conv: "Conv", x: Float[Array, "b y x c"]) -> Float[Array, "b h w d"]:
    """Returns the same with 4/9 of the operations, by a 2x2 convolution with four results.

    The four pixels of the doubled image around a corner of `x` see only the four positions that
    meet there. Their kernels are sums of entries of the 3x3 kernel.
    """
    halves = np.array([[[1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 1]]], np.float32)
    wide = conv.kernel.astype(jnp.float32)
    kernel = jnp.einsum("iyk,jxl,klcd->yxcijd", halves, halves, wide, precision="highest")
    kernel = kernel.astype(x.dtype).reshape(2, 2, x.shape[-1], -1)
    dimensions = ("NHWC", "HWIO", "NHWC")
    corners = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=dimensions
    )
    corners += jnp.tile(conv.bias, 4)[None, None, None]  # type: ignore
    pixels = einops.rearrange(corners, "b y x (i j d) -> b (y i) (x j) d", i=2, j=2)
    return pixels[:, 1:-1, 1:-1]


def _conv3x3(before: int, after: int, *, rngs: nnx.Rngs, variance: float = 1.0) -> nnx.Conv:
    init = jax.nn.initializers.variance_scaling(variance, "fan_in", "truncated_normal")
    return Conv(before, after, (3, 3), padding=1, kernel_init=init, rngs=rngs)


class Conv(nnx.Conv):
    """A convolution with stride 1 whose result has the size of its input.

    A compiler for GPUs tries several algorithms for each convolution, and each allocates what it
    asks for. Large images are cut into tiles that overlap by the border of the kernel, so that none
    asks for more than `MOST_WORKSPACE`; the results are the same.
    """

    def __call__(self, inputs: Float[Array, "b y x c"]) -> Float[Array, "b y x d"]:
        turns, rows, columns = tiling(inputs.shape, self.kernel.shape, inputs.dtype.itemsize)
        if turns * rows * columns == 1:
            return super().__call__(inputs)
        if self.kernel.shape[:2] == (1, 1):
            return inputs @ self.kernel[0, 0] + self.bias[None, None, None]  # type: ignore
        (batch, height, width, _), border = inputs.shape, self.kernel.shape[0] // 2
        y, x = -(-height // rows), -(-width // columns)
        below, right = rows * y - height, columns * x - width  # they fill up the last tiles
        sides = (0, 0), (border, border + below), (border, border + right), (0, 0)
        padded = jnp.pad(inputs, sides)
        bands = jnp.stack([padded[:, i * y :][:, : y + 2 * border] for i in range(rows)], 1)
        starts = [bands[..., i * x :, :] for i in range(columns)]
        tiles = jnp.stack([tile[..., : x + 2 * border, :] for tile in starts], 2)
        tiles = tiles.reshape(turns, -1, *tiles.shape[3:])
        # What it pads a tile with is cut off: on CPUs that takes a third of the time of "VALID".
        done = jax.lax.map(super().__call__, tiles)
        done = done.reshape(batch, rows, columns, *done.shape[2:])
        done = done[:, :, :, border : border + y, border : border + x]
        whole = einops.rearrange(done, "b r c y x d -> b (r y) (c x) d")
        return whole[:, :height, :width]


def tiling(image: tuple[int, ...], kernel: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Returns in how many turns a convolution is computed, and its rows and columns of tiles.

    They are as few as `MOST_WORKSPACE` allows, turns first; all 1: as a whole. An algorithm asks
    for the larger of:

    * patches side by side: for each pixel of the result what the kernel sees of the input;
    * Fourier transforms of images, results and filters padded to their size, in complex64. cuDNN
      has none in bfloat16.

    Args:
        image: shape [b y x c] of the input.
        kernel: shape [h w c d].
        itemsize: bytes of a number.
    """
    (batch, height, width, before), after, border = image, kernel[3], kernel[0] - 1
    for turns in (1, 2, 4, 8, 16, 32, 64):
        rows = columns = 1
        while True:
            y, x = -(-height // rows), -(-width // columns)
            tiles, rest = divmod(batch * rows * columns, turns)
            if rows * columns * turns > 1:  # they overlap
                y, x = y + border, x + border
            patches = tiles * y * x * kernel[0] * kernel[1] * before * itemsize
            filters, images = before * after, tiles * (before + after)
            spectra = (filters + images) * (y + border) * (x + border) * 8 * (itemsize > 2)
            if not rest and max(patches, spectra) <= MOST_WORKSPACE:
                return turns, rows, columns
            if max(y, x) <= SMALLEST_TILE + border:
                break
            rows, columns = (2 * rows, columns) if y >= x else (rows, 2 * columns)
    return 1, 1, 1


def _blocks(kind: type, settings: config.VQ, channels: tuple[int, ...], *, rngs: nnx.Rngs):
    """Returns one block per resolution, each taking the channels of the one before it."""
    pairs, last = enumerate(itertools.pairwise((channels[0], *channels))), len(channels) - 1
    return nnx.List(kind(settings, *pair, last=i == last, rngs=rngs) for i, pair in pairs)


def to_uint8(pixels: Float[Array, "b h w 3"]) -> UInt8[Array, "b h w 3"]:
    """Converts [0, 1] to bytes, truncating as in the release."""
    return (jnp.clip(pixels, 0, 1) * 255).astype(jnp.uint8)


def to_float(
    pixels: UInt8[Array, "b h w 3"] | UInt8[np.ndarray, "b h w 3"],
) -> Float[Array, "b h w 3"]:
    """Converts bytes to [0, 1]."""
    return jnp.asarray(pixels, jnp.float32) / 255


def encode_images(
    model: AnyVQ, pixels: UInt8[np.ndarray, "n h w 3"], batch: int = 64
) -> Int[np.ndarray, "n y x"]:
    """Returns the codes of any number of images, `batch` at a time, from host to host."""
    return _in_batches(_encode, model, pixels, batch)


def for_decoding(model: AnyVQ, dtype: str) -> AnyVQ:
    """Returns parameters to decode with in a dtype, whatever the dtype they are stored in.

    The last norm and convolution are in float32: for three channels that costs nothing, and their
    results are the grey levels, for which bfloat16 is too coarse. In bfloat16, accelerators read
    the input of a group norm once and double the sides with fewer operations.
    """
    if not isinstance(model, VQModel):  # sums of a few codes, in float32 whatever it is stored in
        return model
    wide = jax.tree.map(lambda leaf: leaf.astype("float32"), model)
    if dtype == "float32":
        return wide
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), model)
    narrow.decoder.conv_norm_out = wide.decoder.conv_norm_out
    narrow.decoder.conv_out = wide.decoder.conv_out
    return narrow


def to_pixels(
    model: Any, codes: Int[np.ndarray, "n y x"], batch: int = 64
) -> UInt8[np.ndarray, "n h w 3"]:
    """Returns the images of any number of code grids, `batch` at a time, from host to host.

    Args:
        model: an image tokenizer, or a decoder for previews.

    Raises:
        ValueError: a code is not in the codebook.
    """
    size = model.codebook.shape[0]
    if codes.size and not (0 <= codes.min() and codes.max() < size):
        raise ValueError(
            f"Codes from {codes.min()} to {codes.max()} cannot be decoded: the codebook has 0 to"
            f" {size - 1}. Mask and register ids must be replaced by codes first."
        )
    return _in_batches(decode, model, codes, batch)


@persistent_jit()
def _encode(model, pixels):
    return model.encode(to_float(pixels))


@persistent_jit()
def decode(model, codes):
    return to_uint8(model.decode(codes))


@runtime.interrupts_held()
@jax_settings.defaults()
def _in_batches(call, model, items, batch):
    """Calls with batches of one size, padding the last one, so that there is one compilation."""
    size = min(batch, max(len(items), 1))
    # No items count as one empty batch, so that the result has the right shape.
    fill = size if len(items) == 0 else -len(items) % size
    padded = np.concatenate([items, np.zeros((fill, *items.shape[1:]), items.dtype)])
    model, results = taken_apart(model), []
    for i in range(0, len(padded), size):
        results.append(call(model, padded[i : i + size]))
        runtime.check_interrupt()
    return np.concatenate(results)[: len(items)]
