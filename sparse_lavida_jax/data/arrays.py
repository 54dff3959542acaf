# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library, and the one rule by which their numbers are levels of grey or colour.

* Bytes (uint8) are levels, 0..255; of bool, False is 0 and True is 255.
* Of wider types the largest number decides: up to 1, numbers are 0..1; up to 255, they are levels;
  above that, whole numbers are 16 bits, 0..65535. They are rounded to levels.
* What lies outside is refused, and so are floats whose largest is between 1 and 2: they are 0..1,
  overshot, or almost black.

Pillow's modes F, I and I;16 are such arrays; its other modes are bytes.
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image

from sparse_lavida_jax.schema import InputError

Pixels = UInt8[np.ndarray, "_h _w 3"]  # RGB, each of its own size

MOST_PIXELS = 2**26  # of an image: 8192 x 8192
BAND = 2**22  # pixels that are converted at once
BACKDROP = (255, 255, 255)  # colour of transparent pixels
BLACK = 127  # the lightest grey of a mask that is not painted
WHITE = 255
DEEP_WHITE = 2**16 - 1  # of 16 bits
UNCLEAR = 2.0  # floats with a largest number between 1 and this one
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # Pillow's modes of 16-bit grey
# Pillow raises these for damaged files.
DAMAGED = (OSError, SyntaxError, EOFError, ValueError, LookupError, struct.error)
TAKEN = "give an array, a Pillow image, a file or the bytes of one"


class ImageError(InputError):
    """An image file, mask or box that cannot be used; the message says why."""


def array_of(values: Any, name: str) -> np.ndarray:
    """Returns an array of any library (`__array__` or DLPack), or nested lists, as one of numpy.

    Raises:
        ImageError: it is not an array, or its library does not give it away.
    """
    kind = f"{name} is of type {type(values).__name__}"
    numpys = isinstance(values, list | tuple | memoryview) or any(
        hasattr(values, name) for name in ("__array__", "__array_interface__")
    )
    if not numpys and not hasattr(values, "__dlpack__"):
        raise ImageError(f"{kind}: {TAKEN}.")
    try:
        foreign: Any = values
        array = np.asarray(values) if numpys else np.from_dlpack(foreign)
        # bfloat16 and other types of few bits that numpy lacks
        few = array.dtype.kind == "V" and array.dtype.names is None
        return array.astype(np.float32) if few else array
    except Exception as error:  # whatever another library raises
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ImageError(f"{kind}, which cannot be read: {reason}.") from error


def levels(array: np.ndarray, name: str) -> UInt8[np.ndarray, "..."]:
    """Returns the numbers of an array that is not empty as levels, 0..255, by the rule above.

    Raises:
        ImageError: they are not real numbers, or are out of range.
    """
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array * np.uint8(WHITE)
    if array.dtype.kind not in "iuf":
        raise ImageError(
            f"{name} is an array of {array.dtype}: give bool, whole numbers or floats."
        )
    whole, least, most = array.dtype.kind != "f", float(array.min()), float(array.max())
    half = 0.5 / WHITE  # less than half a level is rounded away
    white = 1 if most < 1 + half else DEEP_WHITE if whole and most > WHITE else WHITE
    unclear = white == WHITE and not whole and most < UNCLEAR
    if unclear or not (least > -half * white and most < (1 + half) * white):  # or NaN
        raise ImageError(
            f"{name} holds numbers from {least:g} to {most:g}: they must lie in 0..1 or 0..{WHITE},"
            f" or whole numbers in 0..{DEEP_WHITE}."
        )
    scaled = array.astype(np.float32)
    scaled *= WHITE / white
    return np.rint(scaled, out=scaled).clip(0, WHITE).astype(np.uint8)


def levels_of(image: Any, name: str) -> Image.Image | Pixels:
    """Returns a Pillow image of bytes; of an array [h w 3], an array of bytes.

    Raises:
        ImageError: as `array_of` and `levels`, or it has another shape, or too many pixels.
    """
    pillow = isinstance(image, Image.Image)
    if not pillow or image.mode in (*_DEEP, "F"):
        image = array_of(image, name)
    shape = (image.height, image.width, 1) if isinstance(image, Image.Image) else image.shape
    shape = (*shape, 1) if len(shape) == 2 else shape
    if len(shape) != 3 or 0 in shape or shape[-1] > 4:
        raise ImageError(
            f"{name} has the shape {list(shape)}: it must be [h w 3] or [h w], not empty, channels"
            " last (of a torch tensor: permute(1, 2, 0))."
        )
    if shape[0] * shape[1] > MOST_PIXELS:
        size = f"{shape[1]}x{shape[0]}"
        raise ImageError(f"{name} is {size}: more than {MOST_PIXELS} pixels. Make it smaller.")
    if isinstance(image, Image.Image):
        try:
            as_rgb(image.crop((0, 0, 1, 1)))  # reads the file, if Pillow has only opened it
        except DAMAGED as error:
            what = f"{name}, in Pillow's mode {image.mode},"
            raise ImageError(f"{what} cannot be read as RGB: {error}.") from error
        return image
    found = levels(image, name).reshape(shape)
    return found if shape[-1] == 3 else Image.fromarray(found[..., 0] if shape[-1] == 1 else found)


def painted(mask: Any, name: str) -> Bool[np.ndarray, "_h _w"]:
    """Returns where a mask is to be painted, see `image_files.check_mask`.

    Raises:
        ImageError: nowhere, or as `levels_of`.
    """
    image = levels_of(mask, name)
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    totals = np.empty((image.height, image.width), np.uint16)  # of the three colours
    clear, most = np.zeros(totals.shape, bool), 0
    for rows, band in _bands(image):
        if image.has_transparency_data:
            clear[rows] = np.asarray(band.convert("RGBA").getchannel("A")) == 0
        colours = _band_as_rgb(band, backdrop=False)
        totals[rows], most = colours.sum(axis=-1), max(most, colours.max())
    found = clear if clear.any() else totals > 3 * (BLACK if most > 1 else 0.5)
    if not found.any():
        raise ImageError(
            f"{name} is black everywhere and transparent nowhere: paint white, or make"
            " transparent, what is to be drawn."
        )
    return found


def _bands(image: Image.Image) -> Iterator[tuple[slice, Image.Image]]:
    """Yields an image in bands of rows, so that converting it takes little memory."""
    step = max(1, BAND // image.width)
    for top in range(0, image.height, step):
        bottom = min(top + step, image.height)
        yield slice(top, bottom), image.crop((0, top, image.width, bottom))


def as_rgb(image: Image.Image, backdrop: bool = True) -> Pixels:
    """Returns a Pillow image as bytes; 16 bits of grey are 16 bits, whatever their largest."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for rows, band in _bands(image):
        pixels[rows] = _band_as_rgb(band, backdrop)
    return pixels


def _band_as_rgb(image: Image.Image, backdrop: bool) -> Pixels:
    if image.mode in _DEEP:
        grey = (np.asarray(image).astype(np.int64).clip(0, 65535) / 257).round().astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    if backdrop and image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (*BACKDROP, 255))
        image = Image.alpha_composite(white, image)
    return np.array(image.convert("RGB"))
