# SPDX-License-Identifier: Apache-2.0
"""Images to be drawn: what is shown, what is known, and where it stands."""

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.images import resize
from sparse_lavida_jax.data.templates import RequestError, check_words
from sparse_lavida_jax.inference.batching import NOTHING, Numbers, Own, row_numbers, row_seeds
from sparse_lavida_jax.inference.results import Result

Pixels = UInt8[np.ndarray, "_h _w 3"]  # each of its own size
Grid = Bool[np.ndarray, "y x"]


@dataclasses.dataclass(frozen=True)
class ShownImage:
    """An image that was handed in, and the file that it was read from."""

    pixels: Pixels
    path: pathlib.Path | None = None

    def as_json(self) -> dict[str, Any]:
        path = None if self.path is None else str(self.path.resolve())
        return {"path": path, "sha256": hashlib.sha256(self.pixels.tobytes()).hexdigest()}


# An image, or what holds one: an array, a Pillow image, a file, a result of an earlier task.
Shown = Pixels | Image.Image | pathlib.Path | str | Result | ShownImage


def shown_images(shown: Shown | Sequence[Shown] | None) -> list[ShownImage]:
    """Returns what was handed in as images, files read.

    Raises:
        ImageError: one is no image.
    """
    if shown is None:
        return []
    if isinstance(shown, ShownImage):
        return [shown]
    if isinstance(shown, Result):
        if not shown.pixels:
            raise image_files.ImageError(f"the result of {shown.task!r} holds no image.")
        return [ShownImage(pixels) for pixels in shown.pixels]
    if isinstance(shown, str | pathlib.Path):
        return [ShownImage(image_files.read(shown), pathlib.Path(shown))]
    if isinstance(shown, Sequence):
        return [one for part in shown for one in shown_images(part)]
    return [ShownImage(image_files.check(shown))]


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that is asked: words, the image that goes with them, a seed; what is its own."""

    words: str
    shown: ShownImage | None
    seed: int
    own: Own = NOTHING

    @property
    def pixels(self) -> Pixels:
        """The image, of a task that needs one."""
        assert self.shown is not None
        return self.shown.pixels

    @property
    def images(self) -> tuple[Pixels, ...]:
        return () if self.shown is None else (self.shown.pixels,)


def rows_of(
    words: str | Sequence[str],
    shown: Shown | Sequence[Shown] | None,
    copies: int,
    seed: int | Sequence[int],
    *,
    needs_image: bool,
    **numbers: Numbers,
) -> list[Row]:
    """Returns what is asked as rows: one image goes with all words, one text with all images.

    Args:
        copies: of each pair of words and image.
        seed: see `decoding.row_seeds`.
        numbers: see `decoding.row_numbers`.

    Raises:
        RequestError: nothing or too little is asked, or words and images do not go together.
    """
    asked = [check_words(one) for one in ([words] if isinstance(words, str) else words)]
    seen: list[ShownImage | None] = [*shown_images(shown)]
    if needs_image and not seen:
        raise RequestError("this task is about an image: give one.")
    seen = seen or [None]
    count = max(len(asked), len(seen))
    if not asked or {len(asked), len(seen)} - {1, count}:
        raise RequestError(
            f"{len(asked)} prompts and {len(seen)} images do not go together: give as many, or"
            " one of either."
        )
    if copies < 1:
        raise RequestError(f"num_images={copies} is out of range: 1 or more.")
    asked = asked * (count // len(asked))
    seen = seen * (count // len(seen))
    pairs = [pair for pair in zip(asked, seen, strict=True) for _ in range(copies)]
    seeds, own = row_seeds(seed, len(pairs)), row_numbers(len(pairs), **numbers)
    return [Row(*pair, one, its) for pair, one, its in zip(pairs, seeds, own, strict=True)]


def recorded_image(record: dict[str, Any], shown: Shown | None) -> ShownImage | None:
    """Returns the image that a recorded one was drawn after; None if after none.

    Raises:
        RequestError: it is not to be had, or `shown` is another one.
    """
    wanted = record["picture"]
    if wanted is None:
        return None
    if shown is None and wanted["path"] is None:
        raise RequestError("it was drawn after an image of no file: give the same image again.")
    (given,) = shown_images(wanted["path"] if shown is None else shown)
    if given.as_json()["sha256"] != wanted["sha256"]:
        raise RequestError(
            f"{given.path or 'the image'} is not the image that it was drawn after: their"
            " pixels differ."
        )
    return given


@dataclasses.dataclass(frozen=True)
class Drawing:
    """One image to be drawn.

    Attributes:
        words: what the model is told, for example with the box of a hole.
        seed: of its noise.
        cells: rows and columns of its grid.
        image: what is shown to the vision tower; None where nothing is shown.
        canvas: what is given as codes, at the size of the image to be drawn.
        known: cells that stay as they are on the canvas.
        plan: the layout to follow.
        attempts: earlier images, each with what is wrong with it.
        own: what it has in place of sampling settings.
    """

    words: str
    seed: int
    cells: tuple[int, int]
    image: Pixels | None = None
    canvas: Pixels | None = None
    known: Grid | None = None
    plan: str | None = None
    attempts: tuple[tuple[Pixels, str], ...] = ()
    own: Own = NOTHING


def grid_of(size: Sequence[int] | None, side: int, model: config.Model) -> tuple[int, int]:
    """Returns rows and columns of cells of an image of height and width `size`.

    Args:
        size: in pixels; None: the largest.
        side: of the largest image, in pixels.

    Raises:
        RequestError: the model draws no image of that size.
    """
    if size is None:
        return model.grid_size, model.grid_size
    step, (height, width) = side // model.grid_size, size
    if model.cell_positions and (height, width) != (side, side):
        raise RequestError(
            f"an image of {height}x{width} cannot be drawn: this checkpoint has learned the places"
            f" of {side}x{side} alone."
        )
    if height % step or width % step or not step <= min(size) <= max(size) <= side:
        raise RequestError(
            f"an image of {height}x{width} cannot be drawn: both must be {step} to {side} pixels,"
            f" multiples of {step}."
        )
    return height // step, width // step


def hole(image: Pixels, mask: Any, box: Sequence[int | float] | None) -> Bool[np.ndarray, "h w"]:
    """Returns which pixels of an image a mask or a box wants drawn.

    Raises:
        ImageError: both or neither, a mask of another size, or a box outside.
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


def untouched(pixels: Bool[np.ndarray, "h w"], grid: int) -> Grid:
    """Returns which cells of a grid over an image no pixel of a mask touches."""

    def touching(length: int) -> Bool[np.ndarray, "grid length"]:
        """Which pixels along a side touch which cells: a pixel may touch several."""
        cell, pixel = np.arange(grid)[:, None], np.arange(length)[None]
        return (pixel * grid < (cell + 1) * length) & ((pixel + 1) * grid > cell * length)

    rows, columns = (touching(length).astype(int) for length in pixels.shape)
    return (rows @ pixels.astype(int) @ columns.T) == 0


def inner_box(
    image: Pixels, box: Sequence[int | float] | None, side: int, step: int
) -> tuple[int, int, int, int]:
    """Returns where an image stands in a new one, moved outwards to whole cells.

    Args:
        box: x1, y1, x2, y2 in pixels of the new one; None: in its middle, at the image's own
            size, or at half the new one's if it is larger.
        side: of the new image, in pixels.
        step: pixels a side of a cell.

    Raises:
        ImageError: a box outside, or one that leaves nothing to draw.
    """
    if box is None:
        height, width = image.shape[:2]
        if max(height, width) >= side:
            height, width = (
                max(step, round(x * side / 2 / max(height, width))) for x in (height, width)
            )
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
    """Returns a canvas with an image in a box, and the cells that it fills."""
    x1, y1, x2, y2 = box
    canvas = np.zeros((side, side, 3), np.uint8)
    canvas[y1:y2, x1:x2] = resize(image, (x2 - x1, y2 - y1))
    known = np.zeros((side // step, side // step), bool)
    known[y1 // step : y2 // step, x1 // step : x2 // step] = True
    return canvas, known


def squared(pixels: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, "s s"]:
    """Returns a mask padded with False to a square, in its middle, as `images.source_view` pads."""
    height, width = pixels.shape
    longest = max(height, width)
    top, left = (longest - height) // 2, (longest - width) // 2
    square = np.zeros((longest, longest), bool)
    square[top : top + height, left : left + width] = pixels
    return square
