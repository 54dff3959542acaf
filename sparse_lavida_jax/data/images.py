# SPDX-License-Identifier: Apache-2.0
"""Image preprocessing: views for the vision tower, crops for the image tokenizer, boxes.

Spec Sec. 4 (vision tower), Sec. 3 (image tokenizer) and Sec. 8 (boxes). Images are bytes
[h w 3], RGB; sizes are (width, height) in pixels, as in Pillow and the released config. The
vision tower takes bytes and normalises them itself.
"""

import dataclasses
import math
from collections.abc import Sequence

import einops
import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image, ImageOps

from sparse_lavida_jax import config
from sparse_lavida_jax.data.image_files import Box, Pixels
from sparse_lavida_jax.sequence import VisionTokens

Size = tuple[int, int]  # width, height

LARGEST_PADDED = 4096  # pixels per side of a padded square; our choice, to limit memory
BLACK = (0, 0, 0)
GREY = (127, 127, 127)  # 0.5 in bytes: the mean of the images SigLIP was trained on
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green, blue (spec Sec. 5.4)


# ---------------------------------------------------------------------------------------------
# For the vision tower.


@dataclasses.dataclass(frozen=True)
class Seen:
    """An image as input to the understanding branch.

    Attributes:
        pixels: the views: the whole image, then its tiles row by row.
        index: for each vision token, which feature of `Denoiser.see(pixels)` it is.
        num_features: how many features `Denoiser.see(pixels)` returns.
    """

    pixels: UInt8[np.ndarray, "n h w 3"]
    index: Int[np.ndarray, " t"]
    num_features: int

    @property
    def part(self) -> VisionTokens:
        """The tokens that represent the image in a prompt."""
        return VisionTokens(len(self.index), self.index, self.num_features)


def see(image: Pixels, settings: config.Vision, *, whole: bool = False) -> Seen:
    """Returns the views of an image and its vision tokens (spec Sec. 4).

    Args:
        whole: one view and no tiles; the release does this for prompts with several images.
    """
    views = whole_view(image, settings.image_size)[None]
    if settings.grid_sizes and not whole:
        grid = choose_grid(size_of(image), settings.grid_sizes)
        views = np.concatenate([views, tiles(image, grid, settings.image_size)])
    index = token_index(size_of(image), settings, whole=whole)
    return Seen(views, index, len(views) * settings.num_tokens + settings.newline)


def token_index(
    size: Size, settings: config.Vision, *, whole: bool = False
) -> Int[np.ndarray, " t"]:
    """Returns for each vision token of an image the index of its feature in `Denoiser.see`.

    Feature i of view v has index v * settings.num_tokens + i; the newline has the next index after
    all of them. First come the features of the whole image, then the rows of the grid of tiles,
    without rows that show only padding, each followed by a newline. An image with one view has one
    newline, at its end.
    """
    base = np.arange(settings.num_tokens)
    if whole or not settings.grid_sizes:
        newline = [settings.num_tokens] if settings.newline else []
        return np.concatenate([base, newline]).astype(np.int32)
    width, height = choose_grid(size, settings.grid_sizes)
    columns, rows = width // settings.image_size, height // settings.image_size
    features = settings.num_tokens * (1 + np.arange(rows * columns))[:, None] + base
    grid = einops.rearrange(
        features,
        "(r c) (y x) -> (r y) (c x)",
        r=rows,
        y=settings.image_size // settings.patch_size // settings.pool,
    )
    grid = _without_padding(grid, size)
    if settings.newline:
        newlines = np.full((len(grid), 1), settings.num_tokens * (1 + rows * columns))
        grid = np.concatenate([grid, newlines], axis=1)
    return np.concatenate([base, grid.reshape(-1)]).astype(np.int32)


def choose_grid(size: Size, grid_sizes: tuple[Size, ...]) -> Size:
    """Returns the size of the grid of tiles that shows most of an image.

    In that grid the resized image has the most pixels, capped at its own number; among equals the
    one with the least padding is taken, then the first.
    """
    width, height = _checked(size)

    def shown(grid: Size) -> tuple[int, int]:
        scale = min(grid[0] / width, grid[1] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, -grid[0] * grid[1]

    return max(grid_sizes, key=shown)


def tiles(image: Pixels, grid: Size, side: int) -> UInt8[np.ndarray, "n side side 3"]:
    """Returns the tiles of an image on a black canvas of size `grid`, row by row.

    The image is resized (bicubic) to fill one dimension of the canvas and is centred.
    """
    size = width, height = size_of(image)
    # Products of floats, as released: integers would sometimes differ by a pixel.
    across, down = grid[0] / width, grid[1] / height
    if across < down:
        size = grid[0], min(math.ceil(height * across), grid[1])
    else:
        size = min(math.ceil(width * down), grid[0]), grid[1]
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    canvas = np.asarray(_centred(resized, grid, BLACK))
    return einops.rearrange(canvas, "(r y) (c x) k -> (r c) y x k", y=side, x=side)


def whole_view(image: Pixels, side: int) -> UInt8[np.ndarray, "side side 3"]:
    """Returns an image centred on a grey square, and resized (bicubic)."""
    image = shrunk(image, LARGEST_PADDED)
    longest = max(size_of(image))
    square = _centred(Image.fromarray(image), (longest, longest), GREY)
    return resize(np.asarray(square), (side, side))


def _without_padding(grid: Int[np.ndarray, "y x"], size: Size) -> Int[np.ndarray, "_y _x"]:
    """Removes the rows, or columns, of a grid of tiles that show only padding.

    The same number is removed from either side, so an odd one stays. Quotients are floats, as
    released: of 26 rows a square of 384 pixels keeps 14, and one of 360 keeps 12, because 12.999 is
    cut off.
    """
    width, height = size
    rows, columns = grid.shape
    if width / height > columns / rows:
        padding = (rows - int(height * (columns / width))) // 2
        return grid[padding : rows - padding]
    padding = (columns - int(width * (rows / height))) // 2
    return grid[:, padding : columns - padding]


# ---------------------------------------------------------------------------------------------
# For the image tokenizer.


def source_view(image: Pixels, side: int, factor: int) -> UInt8[np.ndarray, "side side 3"]:
    """Returns the source image of an edit as input to the image tokenizer (spec Sec. 3).

    It is centred on a black square, and resized (bicubic).

    Args:
        factor: pixels per side of one code (`config.VQ.factor`).

    Raises:
        ValueError: `side` is not a multiple of `factor`.
    """
    _check_side(side, factor)
    image = shrunk(image, LARGEST_PADDED)
    longest = max(size_of(image))
    square = ImageOps.pad(Image.fromarray(image), (longest, longest), color=BLACK)
    return resize(np.asarray(square), (side, side))


def size_to_crop(size: Size, side: int) -> Size:
    """Returns the size of an image resized to shortest side `side`; fractions are cut off."""
    width, height = _checked(size)
    if width <= height:
        return side, int(side * height / width)
    return int(side * width / height), side


def training_crop(
    image: Pixels, side: int, top: int, left: int, factor: int
) -> UInt8[np.ndarray, "side side 3"]:
    """Resizes an image to shortest side `side` (bilinear; spec Sec. 3) and returns a square of it.

    `top` and `left` are in pixels of the resized image, whose size `size_to_crop` returns.

    Raises:
        ValueError: the square extends beyond an edge, or `side` is not a multiple of `factor`.
    """
    _check_side(side, factor)
    width, height = size_to_crop(size_of(image), side)
    if not (0 <= left <= width - side and 0 <= top <= height - side):
        raise ValueError(
            f"a crop of {side} pixels at top={top}, left={left} leaves the image, which is"
            f" {width}x{height} after resizing: top is one of 0..{height - side}, left one of"
            f" 0..{width - side}."
        )
    resized = resize(image, (width, height), Image.Resampling.BILINEAR)
    return resized[top : top + side, left : left + side]


def centre_crop(image: Pixels, side: int) -> UInt8[np.ndarray, "side side 3"]:
    """Resizes an image to shortest side `side` (Lanczos) and returns its central square.

    The ImgEdit benchmark prepares its images like this (spec Sec. 7.5). The rounding is ours:
    fractions of the longer side and of the offset are cut off.
    """
    size = size_to_crop(size_of(image), side)
    left, top = ((edge - side) // 2 for edge in size)
    return resize(image, size, Image.Resampling.LANCZOS)[top : top + side, left : left + side]


def luminance_and_contrast(image: Pixels) -> tuple[float, float]:
    """Returns mean and standard deviation of the luminance, in [0, 1] (spec Sec. 5.4)."""
    luminance = image.astype(np.float64) / 255 @ np.asarray(LUMINANCE)
    return float(luminance.mean()), float(luminance.std())


# ---------------------------------------------------------------------------------------------
# Boxes.


def box_to_locations(box: Box, size: Size, frame: int) -> tuple[int, int, int, int]:
    """Returns a box in pixels as LOC coordinates: x1, y1, x2, y2, each one of 0..frame.

    The frame is the image centred on a square (by whole pixels, as in `whole_view`) and scaled to
    `frame` per side: 1024 in the release (spec Sec. 8). Coordinates are rounded to the nearest,
    halves up, and clipped to the frame. The rounding is ours: that of the released training data
    is not known.
    """
    side, pads = _square(size)
    scaled = [(edge + pads[i % 2]) * frame / side for i, edge in enumerate(box)]
    x1, y1, x2, y2 = (min(max(math.floor(value + 0.5), 0), frame) for value in scaled)
    return x1, y1, x2, y2


def locations_to_box(locations: tuple[int, int, int, int], size: Size, frame: int) -> Box:
    """Returns LOC coordinates as a box in pixels of the image, clipped to it; not rounded.

    The inverse of `box_to_locations` up to side / (2 * frame) pixels, where side is the longer one.
    """
    side, pads = _square(size)
    edges = [value * side / frame - pads[i % 2] for i, value in enumerate(locations)]
    x1, y1, x2, y2 = (float(min(max(edge, 0.0), size[i % 2])) for i, edge in enumerate(edges))
    return x1, y1, x2, y2


# ---------------------------------------------------------------------------------------------
# Helpers.


def overlap(one: Sequence[int | float], other: Sequence[int | float]) -> float:
    """Returns the intersection of two boxes over their union; 0 for a box without area."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0) * max(height, 0)
    areas = [max(x2 - x1, 0) * max(y2 - y1, 0) for x1, y1, x2, y2 in (one, other)]
    union = sum(areas) - shared
    return shared / union if union > 0 else 0.0


def size_of(image: Pixels) -> Size:
    """Returns (width, height)."""
    return image.shape[1], image.shape[0]


def resize(
    image: Pixels, size: Size, kernel: Image.Resampling = Image.Resampling.BICUBIC
) -> UInt8[np.ndarray, "_h _w 3"]:
    """Returns an image at another size; the shape may change."""
    return np.asarray(Image.fromarray(image).resize(size, kernel))


def shrunk(image: Pixels, longest: int) -> Pixels:
    """Shrinks an image (bicubic) so that its longer side has at most `longest` pixels.

    The shorter side keeps at least one pixel. A small enough image is returned unchanged.
    """
    width, height = size_of(image)
    if max(width, height) <= longest:
        return image
    scale = longest / max(width, height)
    return resize(image, (max(1, round(width * scale)), max(1, round(height * scale))))


def _centred(image: Image.Image, size: Size, colour: tuple[int, int, int]) -> Image.Image:
    """Centres an image on a canvas, half a pixel to the top left if necessary."""
    canvas = Image.new("RGB", size, colour)
    canvas.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    return canvas


def _square(size: Size) -> tuple[int, tuple[int, int]]:
    """Returns the side of the square around an image, and the padding left of and above it."""
    width, height = _checked(size)
    side = max(width, height)
    return side, ((side - width) // 2, (side - height) // 2)


def _checked(size: Size) -> Size:
    if min(size) < 1:
        raise ValueError(f"an image of {size[0]}x{size[1]} pixels is empty: give it pixels.")
    return size


def _check_side(side: int, factor: int) -> None:
    if side < 1 or side % factor:
        raise ValueError(
            f"images of {side}x{side} pixels do not divide into codes of {factor}x{factor}"
            f" pixels: use a multiple of {factor}."
        )
