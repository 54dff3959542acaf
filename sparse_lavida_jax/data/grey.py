# SPDX-License-Identifier: Apache-2.0
"""Images whose grey levels are their codes: 8x8 cells of 17 levels, for handwritten digits."""

import einops
import numpy as np
from jaxtyping import Int, UInt8

SIDE = 8  # cells
LEVELS = 17  # 0 is paper, 16 is ink
IMAGE_SIZE = 64  # pixels per side by default


def render(codes: Int[np.ndarray, "..."], size: int = IMAGE_SIZE) -> UInt8[np.ndarray, "h w 3"]:
    """Draws 64 grey levels as an image, dark ink on white paper, `size` pixels per side.

    Raises:
        ValueError: `size` is not a multiple of 8, or there are not 64 levels in 0..16.
    """
    if codes.size != SIDE**2 or codes.min() < 0 or codes.max() >= LEVELS:
        raise ValueError(
            f"a digit is {SIDE**2} grey levels of 0..{LEVELS - 1}, got {codes.size} of"
            f" {codes.min()}..{codes.max()}."
        )
    cell_size = _cell_size(size, size)
    grey = (255 - (codes.reshape(SIDE, SIDE) * 255 + 8) // (LEVELS - 1)).astype(np.uint8)
    return einops.repeat(grey, "y x -> (y h) (x w) c", h=cell_size, w=cell_size, c=3)


def read(pixels: UInt8[np.ndarray, "h w 3"]) -> Int[np.ndarray, "l 1"]:
    """Returns the grey levels of an image: the mean of each cell, rounded."""
    cell_size = _cell_size(*pixels.shape[:2])
    grey = einops.reduce(
        pixels.astype(np.float32), "(y h) (x w) c -> (y x) 1", "mean", h=cell_size, w=cell_size
    )
    return np.rint((255 - grey) * (LEVELS - 1) / 255).astype(np.int32)


def _cell_size(height: int, width: int) -> int:
    if height != width or height % SIDE or height == 0:
        raise ValueError(
            f"an image of a digit is square and its side a multiple of {SIDE} pixels; this one"
            f" is {height}x{width}. Choose {IMAGE_SIZE}."
        )
    return height // SIDE
