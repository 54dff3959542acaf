# SPDX-License-Identifier: Apache-2.0
"""Where an image to be drawn is new: converts sizes, masks and boxes in pixels to cells."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.data.images import resize
from sparse_lavida_jax.prompting.protocol import Grid

log = logging.getLogger(__name__)


def pixel_mask(
    image: Pixels, mask: Any, box: Sequence[int | float] | None
) -> Bool[np.ndarray, "h w"]:
    """Returns which pixels of an image are to be drawn, from what a caller gave.

    Raises:
        ImageError: both or neither are given, the mask has another size, or the box is outside.
    """
    if (mask is None) == (box is None):
        raise image_files.ImageError("inpainting needs a mask or a box, one of the two.")
    if box is None:
        return image_files.check_mask(mask, image)
    height, width = image.shape[:2]
    x1, y1, x2, y2 = image_files.check_box(box, (width, height))
    pixels = np.zeros((height, width), bool)
    pixels[math.floor(y1) : math.ceil(y2), math.floor(x1) : math.ceil(x2)] = True
    return pixels


def cell_mask(mask: Bool[np.ndarray, "h w"], grid: int) -> Grid:
    """Returns which cells of a grid over an image are touched by a pixel of its mask."""

    def touched(pixels: np.ndarray) -> np.ndarray:
        """Returns which parts of the first axis have a pixel; one may be in several of them."""
        ends = [(i * len(pixels) // grid, -(-(i + 1) * len(pixels) // grid)) for i in range(grid)]
        return np.array([pixels[start:end].any(axis=0) for start, end in ends])

    return touched(touched(mask).T).T


def inner_box(
    image: Pixels, box: Sequence[int | float] | None, side: int, step: int
) -> tuple[int, int, int, int]:
    """Returns the box of an image inside a new one, expanded to whole cells.

    Args:
        box: x1, y1, x2, y2 in pixels of the new image; None: in its middle, at the image's own
            size, or at half the new image's size if it is larger.
        side: of the new image, in pixels.
        step: pixels per side of a cell.

    Raises:
        ImageError: the box is outside, or leaves nothing to draw.
    """
    if box is None:
        height, width = image.shape[:2]
        if (longest := max(height, width)) >= side:
            height, width = (max(step, round(x * side / 2 / longest)) for x in (height, width))
            log.warning("the image is as large as the new one, %d pixels: it is halved.", side)
        left, top = ((side - x) // 2 // step * step for x in (width, height))
        box = left, top, left + width, top + height
    x1, y1, x2, y2 = image_files.check_box(box, (side, side))
    inner = (
        math.floor(x1 / step) * step, math.floor(y1 / step) * step,
        math.ceil(x2 / step) * step, math.ceil(y2 / step) * step,
    )  # fmt: skip
    if inner == (0, 0, side, side):
        raise image_files.ImageError(
            f"the box {','.join(f'{edge:g}' for edge in box)} leaves nothing to draw: the new"
            f" image is {side}x{side}, in cells of {step} pixels."
        )
    return inner


def placed(image: Pixels, box: Sequence[int], side: int, step: int) -> tuple[Pixels, Grid]:
    """Returns a canvas with an image in a box, and the mask of the cells around it."""
    x1, y1, x2, y2 = box
    canvas = np.zeros((side, side, 3), np.uint8)
    canvas[y1:y2, x1:x2] = resize(image, (x2 - x1, y2 - y1))
    mask = np.ones((side // step, side // step), bool)
    mask[y1 // step : y2 // step, x1 // step : x2 // step] = False
    return canvas, mask


def cell_rows(cells: int, size: tuple[int, int] | None) -> int:
    """Returns the number of rows of cells in an image of this height and width; None: square."""
    height, width = size or (1, 1)
    return math.isqrt(cells * height // width)
