# SPDX-License-Identifier: Apache-2.0
"""The image tokenizer of real art: a code for each block of 4x4 pixels, four to a cell.

A code stands for the colours and opacities of a block; the first codes are the backgrounds. No code
depends on another cell. In the other direction, a network that sees the neighbours of a block adds
what its code leaves out, to colours and opacities, so that one lesson serves every background:

    pixels = colours + (1 - opacities) * background

The background is the most common one among the codes.
"""

import einops
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.art.world import BACKGROUNDS, CELL

BLOCK = CELL // 2  # pixels per side of what one code describes
LEVELS = 255
OUT_START = 0.1  # deviation of the last layer's start, relative to the usual one; ours


class CellModel(nnx.Module):
    """Converts an image to codes, and back: it has the methods of `models.vq.VQModel`."""

    def __init__(self, settings: config.VQ, *, rngs: nnx.Rngs):
        # Fitted (`art.codebook.fit`). Colours are weighted by opacity; the last channel is the
        # opacity. In levels of 255.
        shape = (settings.codebook_size, BLOCK, BLOCK, 4)
        self.codebook = nnx.Param(jnp.zeros(shape, jnp.float16))
        self.painter = Painter(settings, rngs=rngs)
        self.settings = settings

    def encode(self, pixels: Float[Array, "b h w 3"]) -> Int[Array, "b y x"]:
        """Returns the codes of images in [0, 1], 2x2 for each cell.

        The codes of a cell are the nearest ones on the background on which its error is least, of
        equal ones the first.

        Raises:
            ValueError: a side of the images is not a multiple of `CELL`.
        """
        height, width = pixels.shape[1:3]
        if height % CELL or width % CELL:
            raise ValueError(
                f"The image tokenizer of art was given images of {height}x{width} pixels; both"
                f" sides must be multiples of {CELL}. Resize or crop them first."
            )
        cut = "b (y i) (x j) c -> (b y x) (i j c)"
        blocks = einops.rearrange(LEVELS * pixels.astype(jnp.float32), cut, i=BLOCK, j=BLOCK)
        errors, codes = jax.lax.map(lambda colour: self._on(colour, blocks), _colours())
        grid = "n (b y x) -> n b y x"
        sides = dict(y=height // BLOCK, x=width // BLOCK)
        errors, codes = (einops.rearrange(one, grid, **sides) for one in (errors, codes))
        cells = einops.reduce(errors, "n b (y p) (x q) -> n b y x", "sum", p=2, q=2)
        best = einops.repeat(jnp.argmin(cells, axis=0), "b y x -> 1 b (y 2) (x 2)")
        return jnp.take_along_axis(codes, best, axis=0)[0]

    def _on(
        self, colour: Float[Array, "3"], blocks: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Int[Array, " n"]]:
        """Returns the squared errors and the codes of blocks on one background."""
        drawn = _over(self.codebook.astype(jnp.float32), colour[None, None, None])
        drawn = drawn.reshape(len(drawn), -1)
        # |x - c|^2 without |x|^2, which is the same for every code.
        overlap = jnp.matmul(blocks, drawn.T, precision="highest")
        codes = jnp.argmin(jnp.sum(drawn**2, axis=1)[None] - 2 * overlap, axis=1)
        return jnp.sum((blocks - drawn[codes]) ** 2, axis=1), codes

    def decode(self, codes: Int[Array, "b y x"]) -> Float[Array, "b h w 3"]:
        """Returns the images of codes, in [0, 1]: in the middle of a grey level, never between."""
        levels = jnp.clip(jnp.round(LEVELS * self.paint(codes)), 0, LEVELS)
        return jnp.clip((levels + 0.5) / LEVELS, 0, 1)  # bytes are cut off, not rounded

    def paint(
        self, codes: Int[Array, "b y x"], painter: "Painter | None" = None
    ) -> Float[Array, "b h w 3"]:
        """Returns images, neither rounded nor clipped. Only blocks near things are added to.

        Args:
            painter: takes the place of its own one.
        """
        background = background_of(codes)
        added = (painter or self.painter)(codes, background)
        added = einops.rearrange(added, "b y x (i j c) -> b y x i j c", i=BLOCK, j=BLOCK)
        added = jnp.where(is_near_things(codes)[..., None, None, None], LEVELS * added, 0)
        contents = self.codebook[codes].astype(jnp.float32) + added
        drawn = _over(contents, _colours()[background][:, None, None, None, None]) / LEVELS
        return einops.rearrange(drawn, "b y x i j c -> b (y i) (x j) c")


class Painter(nnx.Module):
    """Returns what is added to the contents of each block, from the codes around it.

    Residual layers of `latent_channels`, `layers_per_block` of them; each sees one block farther.
    """

    def __init__(self, settings: config.VQ, *, rngs: nnx.Rngs):
        width, normal = settings.latent_channels, jax.nn.initializers.normal(1.0)
        self.codes = nnx.Param(normal(rngs.params(), (settings.codebook_size, width)))
        self.backgrounds = nnx.Param(normal(rngs.params(), (len(BACKGROUNDS), width)))
        layers = range(settings.layers_per_block)
        self.layers = nnx.List(PainterLayer(width, rngs=rngs) for _ in layers)
        small = jax.nn.initializers.variance_scaling(OUT_START**2, "fan_in", "truncated_normal")
        self.out = nnx.Conv(width, 4 * BLOCK**2, (1, 1), kernel_init=small, rngs=rngs)

    def __call__(
        self, codes: Int[Array, "b y x"], background: Int[Array, " b"]
    ) -> Float[Array, "b y x d"]:
        x = self.codes[codes] + self.backgrounds[background][:, None, None]
        for layer in self.layers:
            x = x + layer(x)
        return self.out(jax.nn.silu(normed(x)))


class PainterLayer(nnx.Module):
    """mix(silu(look(norm(x)))): 3x3, then 1x1."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.look = nnx.Conv(width, width, (3, 3), rngs=rngs)
        self.mix = nnx.Conv(width, width, (1, 1), rngs=rngs)

    def __call__(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
        return self.mix(jax.nn.silu(self.look(normed(x))))


def background_of(codes: Int[Array, "b y x"]) -> Int[Array, " b"]:
    """Returns the number of the most common background, of equally common ones the first."""
    counts = jnp.stack([jnp.sum(codes == i, axis=(1, 2)) for i in range(len(BACKGROUNDS))])
    return jnp.argmax(counts, axis=0)


def is_near_things(codes: Int[Array, "b y x"]) -> Bool[Array, "b y x"]:
    """Returns which blocks, or blocks next to them, have a code other than a background's."""
    drawn = codes >= len(BACKGROUNDS)
    return jax.lax.reduce_window(drawn, False, jnp.logical_or, (1, 3, 3), (1, 1, 1), "SAME")


def _colours() -> Float[Array, "n 3"]:
    return jnp.array([*BACKGROUNDS.values()], jnp.float32)


def _over(contents: Float[Array, "*n 4"], colour: Float[Array, "*#n 3"]) -> Float[Array, "*n 3"]:
    """Returns what contents look like on a colour."""
    return contents[..., :3] + (1 - contents[..., 3:] / LEVELS) * colour


def normed(x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
    """Scales the channels of each block to a mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
