# SPDX-License-Identifier: Apache-2.0
"""Picture files in and out: read with care, written whole or not at all.

In memory a picture is bytes [h w 3], RGB.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image, ImageDraw, ImageOps, PngImagePlugin, UnidentifiedImageError

Picture = UInt8[np.ndarray, "_h _w 3"]  # each of its own size
Box = tuple[int | float, int | float, int | float, int | float]  # x1, y1, x2, y2 in pixels

MOST_PIXELS = 2**26  # 8192 x 8192; refused beyond, before anything is decoded
FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
RECORD = "sparse-lavida"  # the text chunk of a PNG that says how it was drawn
FRAME_MILLISECONDS = 350
LAST_FRAME_MILLISECONDS = 2000
BACKDROP = (255, 255, 255)  # shows through transparent pixels
GAP = 4  # pixels between the pictures of a sheet
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # 16 bits of grey a pixel


class PictureError(ValueError):
    """A picture file, mask or box that cannot be used; the message says why."""


class WriteError(OSError):
    """A file that could not be written; there is no part of it."""


# ---------------------------------------------------------------------------------------------
# In.


def read(path: pathlib.Path | str, *, backdrop: bool = True) -> Picture:
    """Returns a picture file as RGB bytes, upright.

    Palettes, grey levels, 16 bits and CMYK are converted; transparency shows white.

    Args:
        backdrop: False: transparent pixels keep the colour that the file hides, often black, as
            other people's evaluations read them.

    Raises:
        PictureError: no file, no PNG, JPEG or WebP, damaged, animated, or too many pixels.
    """
    with _opened(pathlib.Path(path)) as image:
        return _as_rgb(ImageOps.exif_transpose(image), backdrop)


def read_bytes(contents: bytes, name: str = "the picture", *, backdrop: bool = True) -> Picture:
    """Returns what `read` does, of a file that is in memory; `name` is for the message.

    Raises:
        PictureError: as `read`.
    """
    with _opened(io.BytesIO(contents), name) as image:
        return _as_rgb(ImageOps.exif_transpose(image), backdrop)


def read_mask(path: pathlib.Path | str, like: Picture) -> Bool[np.ndarray, "h w"]:
    """Returns where a mask is white: that is to be painted.

    Raises:
        PictureError: as `read`, or the mask has another size than the picture `like`.
    """
    grey = read(path).mean(axis=-1) > 127
    return check_mask(grey, like, str(path))


def read_record(path: pathlib.Path | str) -> dict[str, Any]:
    """Returns how a PNG of ours was drawn.

    Raises:
        PictureError: as `read`, or it says nothing of how it was drawn.
    """
    with _opened(pathlib.Path(path)) as image:
        text = image.info.get(RECORD)
    try:
        record = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise PictureError(
            f"{path} does not say how it was drawn: replay a PNG that `sparse-lavida` wrote and"
            " no other program has saved since."
        )
    return record


@contextlib.contextmanager
def _opened(file: pathlib.Path | io.BytesIO, name: str = "") -> Iterator[Image.Image]:
    """Yields an image whose size and kind were looked at before its pixels are."""
    path = name or file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                _check_header(path, image)
                image.load()
                yield image
    except Image.DecompressionBombError:
        raise PictureError(
            f"{path} has more than {MOST_PIXELS} pixels, the most that is read: make it smaller."
        ) from None
    except UnidentifiedImageError:
        raise PictureError(
            f"{path} is no picture that can be read: neither {' nor '.join(FORMATS)}, or damaged."
        ) from None
    except FileNotFoundError:
        raise PictureError(f"there is no picture {path}.") from None
    # Damaged files make Pillow raise these three.
    except (OSError, SyntaxError, EOFError) as error:
        raise PictureError(f"{path} is no picture that can be read: {error}") from error


def _check_header(path: object, image: Image.Image) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise PictureError(
            f"{path} is {width}x{height}: more than {MOST_PIXELS} pixels, the most that is read."
            " Make it smaller."
        )
    if width < 1 or height < 1:
        raise PictureError(f"{path} is {width}x{height}: it has no pixels.")
    frames = getattr(image, "n_frames", 1)
    # A JPEG of several pictures, as phones write them, is no animation: its first is the picture.
    if frames > 1 and image.format != "MPO":
        raise PictureError(f"{path} is animated, {frames} frames: give one of them as a picture.")


def _as_rgb(image: Image.Image, backdrop: bool = True) -> Picture:
    if image.mode in _DEEP:
        grey = (np.asarray(image).astype(np.int64).clip(0, 65535) / 257).round().astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    if backdrop and image.has_transparency_data:
        image = image.convert("RGBA")
        behind = Image.new("RGBA", image.size, (*BACKDROP, 255))
        image = Image.alpha_composite(behind, image)
    return np.array(image.convert("RGB"))


def check(picture: Any, name: str = "the picture") -> Picture:
    """Returns an array or a Pillow image as RGB bytes.

    Raises:
        PictureError: it is neither, is empty, or has too many pixels.
    """
    if isinstance(picture, Image.Image):
        picture = _as_rgb(picture)
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8:
        kind = getattr(picture, "dtype", type(picture).__name__)
        raise PictureError(f"{name} is a {kind}: give a Pillow image or bytes [h w 3].")
    if picture.ndim != 3 or picture.shape[-1] != 3 or 0 in picture.shape:
        raise PictureError(f"{name} has the shape {picture.shape}: it must be [h w 3], not empty.")
    if picture.shape[0] * picture.shape[1] > MOST_PIXELS:
        raise PictureError(f"{name} is {_size(picture)}: more than {MOST_PIXELS} pixels.")
    return picture


def check_mask(mask: Any, like: Picture, name: str = "the mask") -> Bool[np.ndarray, "h w"]:
    """Returns a mask, True where a picture is to be painted.

    Raises:
        PictureError: it has another size than the picture `like`, or nothing is to be painted.
    """
    if isinstance(mask, Image.Image):
        mask = _as_rgb(mask).mean(axis=-1) > 127
    mask = np.asarray(mask).astype(bool)
    if mask.shape != like.shape[:2]:
        size = "x".join(map(str, mask.shape[::-1]))
        raise PictureError(f"{name} is {size} and the picture {_size(like)}: make them one size.")
    if not mask.any():
        raise PictureError(f"{name} is black everywhere: paint white what is to be drawn.")
    return mask


def check_box(box: Sequence[int | float], size: tuple[int, int]) -> Box:
    """Returns a box x1, y1, x2, y2 that spans an area inside a picture of `size` (width, height).

    Raises:
        PictureError: it does not.
    """
    width, height = size
    if len(box) != 4 or not all(map(math.isfinite, box)):
        raise PictureError(f"the box {tuple(box)} is not four numbers: x1, y1, x2, y2 in pixels.")
    x1, y1, x2, y2 = box
    if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
        raise PictureError(
            f"the box {','.join(f'{edge:g}' for edge in box)} is not inside the picture:"
            f" x1 < x2 lie in 0..{width}, y1 < y2 in 0..{height}."
        )
    return x1, y1, x2, y2


def _size(picture: Picture) -> str:
    return f"{picture.shape[1]}x{picture.shape[0]}"


# ---------------------------------------------------------------------------------------------
# Out.


def write(path: pathlib.Path | str, picture: Picture, record: dict[str, Any] | None = None) -> None:
    """Writes a picture; a PNG says in its metadata how it was drawn.

    Raises:
        PictureError: a suffix of no format that is written.
        WriteError: the disk is full, or the place cannot be written to.
    """
    path = check_writable(path)
    format = SUFFIXES[path.suffix.lower()]
    more: dict[str, Any] = {}
    if format == "PNG" and record is not None:
        notes = PngImagePlugin.PngInfo()
        notes.add_itxt(RECORD, json.dumps(record, ensure_ascii=False))
        more["pnginfo"] = notes
    with replacing(path) as file:
        Image.fromarray(picture).save(file, format, **more)


def write_animation(path: pathlib.Path | str, frames: Sequence[Picture]) -> None:
    """Writes frames as a GIF that stays a while on its last.

    Raises:
        PictureError: the name does not end in .gif, or there is no frame.
        WriteError: as `write`.
    """
    path = check_writable(path, {".gif": "GIF"})
    if not frames:
        raise PictureError(f"{path}: there is no step to show, so no animation.")
    first, *rest = map(Image.fromarray, frames)
    durations = [FRAME_MILLISECONDS] * len(rest) + [LAST_FRAME_MILLISECONDS]
    with replacing(path) as file:
        first.save(file, "GIF", save_all=True, append_images=rest, duration=durations, loop=0)


def check_writable(
    path: pathlib.Path | str, suffixes: dict[str, str] | None = None
) -> pathlib.Path:
    """Returns a path whose name says the format of what will be written there.

    Raises:
        PictureError: another suffix, or a folder.
    """
    path, known = pathlib.Path(path), suffixes or SUFFIXES
    if path.suffix.lower() not in known:
        raise PictureError(
            f"the picture cannot be written to {path}: its name must end in {', '.join(known)}."
        )
    if path.is_dir():
        raise PictureError(f"the picture cannot be written to {path}: that is a folder.")
    return path


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[Any]:
    """Yields a binary file that becomes `path` if everything goes well, and vanishes otherwise.

    Raises:
        WriteError: the disk is full, or the place cannot be written to.
    """
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        scratch = pathlib.Path(name)
        with os.fdopen(descriptor, "wb") as file:
            yield file
        scratch.chmod(0o666 & ~_umask())
        os.replace(scratch, path)
        scratch = None
    except OSError as error:
        reason = error.strerror or error
        raise WriteError(f"the picture cannot be written to {path}: {reason}.") from error
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sheet(pictures: Sequence[Picture]) -> Picture:
    """Returns pictures side by side, as near to a square as they go, in the order given."""
    columns = math.ceil(math.sqrt(len(pictures)))
    height = max(picture.shape[0] for picture in pictures) + GAP
    width = max(picture.shape[1] for picture in pictures) + GAP
    rows = -(-len(pictures) // columns)
    page = np.full((rows * height - GAP, columns * width - GAP, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = i // columns * height, i % columns * width
        page[y : y + picture.shape[0], x : x + picture.shape[1]] = picture
    return page


def with_boxes(picture: Picture, boxes: Sequence[Box | None]) -> Picture:
    """Returns a picture with boxes drawn in it; None draws nothing."""
    image = Image.fromarray(picture)
    pen = ImageDraw.Draw(image)
    for box in boxes:
        if box is not None:
            pen.rectangle(box, outline=(0, 0, 0), width=max(1, min(image.size) // 96))
    return np.array(image)
