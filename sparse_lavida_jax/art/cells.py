# SPDX-License-Identifier: Apache-2.0
"""The image tokenizer of real art: four codes for each cell, which add up to its contents.

A code stands for colours and opacities of a whole cell, one set for each of the four places in the
cell (additive quantisation: Babenko and Lempitsky, CVPR 2014). The first code names the background
too, so that a drawing has the same codes on all of them but in the first place:

    pixels = sum of colours + (1 - sum of opacities) * background

No cell depends on another one, in either direction.
"""

import einops
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.art.world import BACKGROUNDS, CELL

PLACES = 4  # codes of a cell, 2x2
ROUNDS = 6  # of the search for the codes of a cell
LEVELS = 255


def contents_of(codebook_size: int) -> int:
    """Returns how many contents the first code of a cell can name, on each background."""
    return codebook_size // len(BACKGROUNDS)


class CellModel(nnx.Module):
    """Converts an image to codes, and back: it has the methods of `models.vq.VQModel`."""

    def __init__(self, settings: config.VQ, *, rngs: nnx.Rngs):
        del rngs  # it is fitted (`art.codebook.fit`), not trained from random numbers
        # Colours are weighted by opacity; the last channel is the opacity. In levels of 255.
        shape = (settings.codebook_size, PLACES, CELL, CELL, 4)
        self.codebook = nnx.Param(jnp.zeros(shape, jnp.float16))
        self.settings = settings

    def encode(self, pixels: Float[Array, "b h w 3"]) -> Int[Array, "b y x"]:
        """Returns codes of images in [0, 1], 2x2 for each cell.

        From an empty cell on each background, one code after another is replaced by the best one,
        `ROUNDS` times around; then the background with the least error is taken, of equal ones the
        first.

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
        cells = einops.rearrange(LEVELS * pixels.astype(jnp.float32), cut, i=CELL, j=CELL)
        colours = jnp.array([*BACKGROUNDS.values()], jnp.float32)
        errors, codes = jax.lax.map(lambda colour: self._on(colour, cells), colours)
        best = jnp.argmin(errors, axis=0)
        codes = jnp.take_along_axis(codes, best[None, :, None], axis=0)[0]
        codes = codes.at[:, 0].add(best * contents_of(self.settings.codebook_size))
        spread = "(b y x) (p q) -> b (y p) (x q)"
        return einops.rearrange(codes, spread, y=height // CELL, x=width // CELL, p=2)

    def _on(
        self, colour: Float[Array, "3"], cells: Float[Array, "n d"]
    ) -> tuple[Float[Array, " n"], Int[Array, "n g"]]:
        """Returns the squared errors and the codes of cells on one background."""
        codebook = self.codebook.astype(jnp.float32)
        drawn = codebook[..., :3] - codebook[..., 3:] * colour[None, None, None, None] / LEVELS
        books = einops.rearrange(drawn, "c g i j k -> g c (i j k)")
        counts = contents_of(len(codebook)), *[len(codebook)] * (PLACES - 1)
        tables = [book[:count] for book, count in zip(books, counts, strict=True)]
        norms = [jnp.sum(table**2, axis=1) for table in tables]
        rest = cells - jnp.tile(colour, CELL**2)[None]
        codes = jnp.zeros((len(cells), PLACES), jnp.int32)

        def around(_, state):
            rest, codes = state
            for place, (table, norm) in enumerate(zip(tables, norms, strict=True)):
                rest = rest + table[codes[:, place]]
                overlap = jnp.matmul(rest, table.T, precision="highest")
                codes = codes.at[:, place].set(jnp.argmin(norm[None] - 2 * overlap, axis=1))
                rest = rest - table[codes[:, place]]
            return rest, codes

        rest, codes = jax.lax.fori_loop(0, ROUNDS, around, (rest, codes))
        return jnp.sum(rest**2, axis=1), codes

    def decode(self, codes: Int[Array, "b y x"]) -> Float[Array, "b h w 3"]:
        """Returns the images of codes, in [0, 1]: in the middle of a grey level, never between."""
        cells = einops.rearrange(codes, "b (y p) (x q) -> b y x (p q)", p=2, q=2)
        contents, colours = contents_of(self.settings.codebook_size), [*BACKGROUNDS.values()]
        background = jnp.minimum(cells[..., 0] // contents, len(colours) - 1)
        cells = cells.at[..., 0].set(cells[..., 0] % contents)
        codebook = self.codebook.astype(jnp.float32)
        drawn = codebook[cells[..., 0], 0]
        for place in range(1, PLACES):
            drawn = drawn + codebook[cells[..., place], place]
        colour = jnp.array(colours, jnp.float32)[background][..., None, None, :]
        levels = drawn[..., :3] + (1 - drawn[..., 3:] / LEVELS) * colour
        levels = jnp.clip(jnp.round(levels), 0, LEVELS)
        pixels = einops.rearrange(levels, "b y x i j c -> b (y i) (x j) c")
        return jnp.clip((pixels + 0.5) / LEVELS, 0, 1)  # bytes are cut off, not rounded
