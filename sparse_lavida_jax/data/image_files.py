# SPDX-License-Identifier: Apache-2.0
"""Reads image files safely, and writes them completely or not at all.

In memory an image is bytes [h w 3], RGB.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import re
import stat
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageDraw, PngImagePlugin, UnidentifiedImageError

from sparse_lavida_jax import old_names
from sparse_lavida_jax.data import arrays, files
from sparse_lavida_jax.data.arrays import DAMAGED, MOST_PIXELS, ImageError, Pixels, as_rgb

Box = tuple[int | float, int | float, int | float, int | float]  # x1, y1, x2, y2 in pixels

# Larger images are refused before anything is decoded, also those of more than `MOST_PIXELS`.
LONGEST_SIDE = 2**14  # pixels
MOST_ASPECT = 64  # the longer side over the shorter: images are padded to squares
MOST_SCANS = 64  # of a progressive JPEG, each of which is decoded over all pixels
MOST_BLOCKS = 1000  # of EXIF metadata in a JPEG, and lists of images
SCAN_COST = 8  # scans beyond the first that take as long as the image itself
MOST_BYTES = 2**29  # of an image file
MOST_SECONDS = 20.0  # of processor time to read one image
FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
READ_SUFFIXES = (*SUFFIXES, ".jfif", ".jpe")  # of files in folders and archives of images
RECORD = "sparse-lavida"  # the text chunk of a PNG that records how it was drawn
SCALE = "sparse-lavida-scale"  # the text chunk that says how many times a PNG is enlarged
MOST_SCALE = 16
PNG_LEVEL = 1  # of zlib, for images that are sent: a quarter of the time of level 6, a third larger
FRAME_MILLISECONDS = 350
LAST_FRAME_MILLISECONDS = 2000
GAP = 4  # pixels between the images of a sheet
JPEG = b"\xff\xd8"  # every JPEG starts so
# What starts the EXIF data of a JPEG, and the list of its images if it has several, as from phones:
# the first one counts. Pillow shall read neither (`_orientation`).
_EXIF = re.compile(rb"\xff\xe1..Exif\0\0", re.DOTALL)
_METADATA = re.compile(rb"\xff\xe1..Exif\0\0|\xff\xe2..MPF\0", re.DOTALL)
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # of a JPEG, but for those within a scan
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
ORIENTATION = 0x0112  # of EXIF's tags
_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # views of an array [h w ...]
    2: lambda x: x[:, ::-1], 3: lambda x: x[::-1, ::-1], 4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1), 6: lambda x: np.rot90(x, -1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip


class ImageWriteError(OSError):
    """A file could not be written; no part of it is left."""


# ---------------------------------------------------------------------------------------------
# Reading.


def read(path: pathlib.Path | str, *, backdrop: bool = True) -> Pixels:
    """Returns an image file as RGB bytes, upright.

    Palettes, grey levels, 16 bits and CMYK are converted; transparent pixels become white. A PNG
    that `write` enlarged is returned as it was before.

    Args:
        backdrop: False: transparent pixels keep their hidden colour, often black, as in others'
            evaluation code.

    Raises:
        ImageError: there is no such file, or it is not a PNG, JPEG or WebP, is damaged or animated,
            or has too many pixels.
    """
    return read_bytes(_contents(path), str(path), backdrop=backdrop)


def read_bytes(
    contents: bytes,
    name: str = "the image",
    *,
    backdrop: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Pixels:
    """Does what `read` does with a file in memory; `name` is for error messages.

    Args:
        check: called now and then; may raise what ends the reading.

    Raises:
        ImageError: as `read`.
    """
    with _opened(contents, name, check) as image:
        pixels, orientation = as_rgb(image, backdrop), _orientation(image, contents)
        scale = str(image.info.get(SCALE, ""))
    return _as_drawn(_upright(pixels, orientation), scale)


def cost(
    contents: bytes, name: str = "the image", *, check: Callable[[], None] = lambda: None
) -> int:
    """Returns what it costs to decode a file, in pixels, from its headers alone.

    That is the number of its pixels, and an eighth of it for each further scan of a JPEG.

    Args:
        check: see `read_bytes`.

    Raises:
        ImageError: as `read`, for all that the headers say.
    """
    with _opened(contents, name, check, decode=False) as image:
        scans = max(1, _scans(contents)) if image.format == "JPEG" else 1
        return image.width * image.height * (SCAN_COST + scans - 1) // SCAN_COST


def read_mask(path: pathlib.Path | str, like: Pixels) -> Bool[np.ndarray, "h w"]:
    """Reads a mask file, see `check_mask`.

    Raises:
        ImageError: as `read`, or its size differs from that of the image `like`.
    """
    return check_mask(path, like, str(path))


def read_transparent(
    contents: bytes, name: str = "the mask", *, check: Callable[[], None] = lambda: None
) -> Bool[np.ndarray, "_h _w"]:
    """Returns where a mask file in memory is to be painted, upright, see `check_mask`.

    Args:
        check: see `read_bytes`.

    Raises:
        ImageError: as `read`, or there is nothing to paint.
    """
    with _opened(contents, name, check) as image:
        return _upright(arrays.painted(image, name), _orientation(image, contents))


def read_record(path: pathlib.Path | str) -> dict[str, Any]:
    """Returns the record of how a PNG was drawn that `write` stored in it.

    Raises:
        ImageError: as `read`, or there is no such record.
    """
    return record_in(_contents(path), str(path))


def record_in(contents: bytes, name: str = "the image") -> dict[str, Any]:
    """Does what `read_record` does with a file in memory; `name` is for error messages."""
    with _opened(contents, name) as image:
        text = image.info.get(RECORD)
    try:
        record = files.parse_json(text) if isinstance(text, str) else None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ImageError(
            f"{name} does not say how it was drawn: give a PNG that `sparse-lavida` wrote and"
            " no other program has saved since."
        )
    return old_names.current(record)


def _contents(path: pathlib.Path | str) -> bytes:
    """Returns an image file.

    Raises:
        ImageError: there is no such file, it is not a regular one, or it is too large.
    """
    try:
        return files.read_bytes(path, MOST_BYTES)
    except FileNotFoundError:
        raise ImageError(f"there is no image {path}.") from None
    except files.FileRefused as error:
        raise ImageError(f"{error}: give a file in {', '.join(FORMATS)}.") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ImageError(f"{path} is not an image that can be read: {error}.") from error


class _Source(io.BytesIO):
    """An image file in memory whose reading takes a bounded time.

    Args:
        name: for the error message.
        check: called at every read; may raise what ends the reading.
    """

    def __init__(self, contents: bytes, name: str, check: Callable[[], None]):
        super().__init__(contents)
        self._name, self._check = name, check
        self._end = time.thread_time() + MOST_SECONDS

    def read(self, size: int | None = -1) -> bytes:
        self._check()
        if time.thread_time() > self._end:
            raise ImageError(
                f"{self._name} takes more than {MOST_SECONDS:g} s to read, the most that is"
                " allowed: save it anew as PNG."
            )
        return super().read(size)


@contextlib.contextmanager
def _opened(
    contents: bytes, name: str, check: Callable[[], None] = lambda: None, *, decode: bool = True
) -> Iterator[Image.Image]:
    """Yields an image, not turned yet, whose headers were checked before it was decoded."""
    plain = contents
    if contents.startswith(JPEG):
        plain, blocks = _METADATA.subn(
            lambda match: match[0][:4].ljust(len(match[0]), b"-"), contents, MOST_BLOCKS + 1
        )
        if blocks > MOST_BLOCKS:
            raise ImageError(f"{name} has over {MOST_BLOCKS} blocks of metadata: save it as PNG.")
        if (scans := _scans(contents)) > MOST_SCANS:
            raise ImageError(
                f"{name} has {scans} scans: at most {MOST_SCANS} are read. Save it anew as PNG, or"
                " as a JPEG that is not progressive."
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(_Source(plain, name, check), formats=FORMATS) as image:
                _check_header(name, image)
                if decode:
                    image.load()
                yield image
    except Image.DecompressionBombError:
        raise ImageError(
            f"{name} has more than {MOST_PIXELS} pixels, the most that is read: make it smaller."
        ) from None
    except UnidentifiedImageError:
        raise ImageError(
            f"{name} is not an image that can be read: neither {' nor '.join(FORMATS)}, or damaged."
        ) from None
    except ImageError:
        raise
    except DAMAGED as error:
        raise ImageError(f"{name} is not an image that can be read: {error}") from error


def _scans(contents: bytes) -> int:
    """Returns the most scans that a JPEG can have.

    Those of a preview in its metadata and of what phones add after its end, such as a video, are
    not counted, as long as it has fewer than `MOST_BLOCKS` blocks.
    """
    scans, at = 0, len(JPEG)
    for _ in range(MOST_BLOCKS):
        found = _MARKER.search(contents, at)
        if found is None or found[0] == b"\xff\xd9":  # the end of the image
            return scans
        scans, at = scans + (found[0] == b"\xff\xda"), found.end()
        if found[0] >= b"\xff\xc0":  # these have a length
            at += int.from_bytes(contents[at : at + 2], "big")
    return scans + contents.count(b"\xff\xda", at)


def _orientation(image: Image.Image, contents: bytes) -> int:
    """Returns the orientation, 1 to 8, that the metadata of an image states; 1 if there is none.

    Only that entry of the EXIF metadata is read. Pillow copies the values of all entries, each of
    which may be as large as the file.
    """
    try:
        exif = image.info.get("exif") or b""
        if contents.startswith(JPEG) and (block := _EXIF.search(contents)):
            exif = contents[block.end() : block.end() + 2**16]
        elif "Raw profile type exif" in image.info:
            exif = bytes.fromhex("".join(image.info["Raw profile type exif"].split("\n")[3:]))
        exif = exif.removeprefix(b"Exif\0\0")
        order = {b"II": "<", b"MM": ">"}.get(exif[:2], "<")
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for i in range(count):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, start + 2 + 12 * i)
            if (tag, kind) == (ORIENTATION, 3):  # 3: 16 bits
                return value
    except (struct.error, ValueError):
        pass  # damaged, or none
    xmp = image.info.get("XML:com.adobe.xmp") or image.info.get("xmp") or b""
    stated = _XMP.search(xmp if isinstance(xmp, bytes) else xmp.encode())
    return int(stated[1]) if stated else 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Returns an array [h w ...] of an image with this orientation as it is to be shown."""
    turn = _TURNS.get(orientation)
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


def _as_drawn(pixels: Pixels, scale: str) -> Pixels:
    """Returns an enlarged image as it was before; others, and one that was changed, as they are."""
    if scale not in map(str, range(2, MOST_SCALE + 1)):
        return pixels
    times = int(scale)
    small = np.ascontiguousarray(pixels[::times, ::times])
    parts = (pixels[y::times, x::times] for y in range(times) for x in range(times))
    return small if all(np.array_equal(part, small) for part in parts) else pixels


def _check_header(path: str, image: Image.Image) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ImageError(
            f"{path} is {width}x{height}: more than {MOST_PIXELS} pixels, the most that is read."
            " Make it smaller."
        )
    if width < 1 or height < 1:
        raise ImageError(f"{path} is {width}x{height}: it has no pixels.")
    if max(width, height) > LONGEST_SIDE or max(width, height) > MOST_ASPECT * min(width, height):
        raise ImageError(
            f"{path} is {width}x{height}: a side may have at most {LONGEST_SIDE} pixels, and"
            f" {MOST_ASPECT} times those of the other. Cut it."
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise ImageError(f"{path} is animated, {frames} frames: give one of them as an image.")


def check(image: Any, name: str = "the image") -> Pixels:
    """Returns an image that a program holds as RGB bytes; transparent pixels become white.

    Args:
        image: an array [h w 3] of any library, or [h w], [h w 1], or [h w 2] or [h w 4] with
            opacity, read by the rule of `data/arrays.py`; a Pillow image, which is not turned
            upright; or a file: its name, its bytes, or a binary file that is open.

    Raises:
        ImageError: it is none of these, is empty, or has too many pixels.
    """
    if (contents := _contents_of(image, name)) is not None:
        return read_bytes(contents, name)
    found = arrays.levels_of(image, name)
    return found if isinstance(found, np.ndarray) else as_rgb(found)


def _contents_of(image: Any, name: str) -> bytes | None:
    """Returns the file that is named, or that bytes or an open file hold; None if there is none."""
    if isinstance(image, str | os.PathLike):
        return _contents(pathlib.Path(image))
    if isinstance(image, bytes | bytearray) or (isinstance(image, memoryview) and image.ndim == 1):
        return bytes(image)
    file: Any = image
    if not callable(getattr(file, "read", None)):
        return None
    try:
        if file.seekable():
            file.seek(0)
        contents = file.read(MOST_BYTES + 1)
    except Exception as error:  # closed, or whatever another library raises
        raise ImageError(f"{name} is a file that cannot be read: {error}.") from error
    if not isinstance(contents, bytes) or len(contents) > MOST_BYTES:
        raise ImageError(
            f'{name} is a file of text (open it with "rb"), or over {MOST_BYTES} bytes.'
        )
    return contents


def check_mask(mask: Any, like: Pixels, name: str = "the mask") -> Bool[np.ndarray, "h w"]:
    """Returns a mask, True where an image is to be painted.

    If a pixel is wholly transparent, the mask is painted where it is so, whatever the colours, as
    in OpenAI's form. Otherwise it is where it is white: where the mean of the colours is above
    `arrays.BLACK`, or, in a mask of only 0 and 1, above a half.

    Args:
        mask: as for `check`.

    Raises:
        ImageError: it cannot be read, its size is not that of the image `like`, enlarged or not,
            or nothing is to be painted.
    """
    contents = _contents_of(mask, name)
    mask = arrays.painted(mask, name) if contents is None else read_transparent(contents, name)
    (height, width), times = like.shape[:2], len(mask) // len(like)
    if 1 < times <= MOST_SCALE and mask.shape == (times * height, times * width):
        mask = mask.reshape(height, times, width, times).any(axis=(1, 3))
    if mask.shape != like.shape[:2]:
        size = "x".join(map(str, mask.shape[::-1]))
        raise ImageError(f"{name} is {size} and the image {_size(like)}: make them one size.")
    return mask


def check_box(box: Sequence[int | float], size: tuple[int, int]) -> Box:
    """Returns a box x1, y1, x2, y2 after checking it against an image of `size` (width, height).

    Raises:
        ImageError: it has no area, or is not inside the image.
    """
    width, height = size
    if len(box) != 4 or not all(map(math.isfinite, box)):
        raise ImageError(f"the box {tuple(box)} is not four numbers: x1, y1, x2, y2 in pixels.")
    x1, y1, x2, y2 = box
    if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
        raise ImageError(
            f"the box {','.join(f'{edge:g}' for edge in box)} is not inside the image:"
            f" x1 < x2 lie in 0..{width}, y1 < y2 in 0..{height}."
        )
    return x1, y1, x2, y2


def _size(image: Pixels) -> str:
    return f"{image.shape[1]}x{image.shape[0]}"


# ---------------------------------------------------------------------------------------------
# Writing.


def enlarged(image: Pixels, scale: int) -> Pixels:
    """Returns an image with every pixel a square of `scale` x `scale` pixels."""
    return image.repeat(scale, axis=0).repeat(scale, axis=1)


def write(
    path: pathlib.Path | str,
    image: Pixels,
    record: dict[str, Any] | None = None,
    *,
    scale: int = 1,
) -> None:
    """Writes an image; a PNG records in its metadata how it was drawn.

    Args:
        scale: how many times to enlarge it for a viewer's eye, 1 to `MOST_SCALE`. A PNG says so,
            and `read` returns the original image.

    Raises:
        ImageError: the suffix is of an unsupported format.
        ImageWriteError: the disk is full, or the place cannot be written to.
    """
    path = check_writable(path)
    format = SUFFIXES[path.suffix.lower()]
    shown = Image.fromarray(enlarged(image, scale))
    _save(path, shown, format, **(_noted(record, scale) if format == "PNG" else {}))


def encoded(
    image: Pixels, format: str = "PNG", record: dict[str, Any] | None = None, quality: int = 100
) -> bytes:
    """Returns an encoded image; a PNG has the record that `write` stores, and is written faster.

    Args:
        format: one of `FORMATS`.
        quality: of JPEG and WebP, 0 to 100.
    """
    file = io.BytesIO()
    png = format == "PNG"
    how = _noted(record) | {"compress_level": PNG_LEVEL} if png else {"quality": quality}
    Image.fromarray(image).save(file, format, **how)
    return file.getvalue()


def _noted(record: dict[str, Any] | None, scale: int = 1) -> dict[str, Any]:
    """Returns arguments that make Pillow record in a PNG how it was drawn, and how enlarged."""
    if record is None and scale == 1:
        return {}
    notes = PngImagePlugin.PngInfo()
    if record is not None:
        noted = json.dumps(record, ensure_ascii=False)
        notes.add_itxt(RECORD, noted.encode(errors="backslashreplace").decode())
    if scale > 1:
        notes.add_text(SCALE, str(scale))
    return {"pnginfo": notes}


def write_animation(path: pathlib.Path | str, frames: Sequence[Pixels]) -> None:
    """Writes frames as a GIF that pauses on its last frame.

    Raises:
        ImageError: the name does not end in .gif, or there are no frames.
        ImageWriteError: as `write`.
    """
    path = check_writable(path, {".gif": "GIF"})
    if not frames:
        raise ImageError(f"{path}: there is no step to show, so no animation.")
    first, *rest = map(Image.fromarray, frames)
    durations = [FRAME_MILLISECONDS] * len(rest) + [LAST_FRAME_MILLISECONDS]
    _save(path, first, "GIF", save_all=True, append_images=rest, duration=durations, loop=0)


def check_writable(
    path: pathlib.Path | str, suffixes: dict[str, str] | None = None
) -> pathlib.Path:
    """Checks that an image can be written to a path; returns the path.

    Raises:
        ImageError: the suffix is unsupported, the path is a folder, or its parent is a file.
    """
    path, known = files.expanded(path), suffixes or SUFFIXES
    if path.suffix.lower() not in known:
        raise ImageError(
            f"the image cannot be written to {path}: its name must end in {', '.join(known)}."
        )
    try:
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        if not stat.S_ISREG(path.stat().st_mode):
            raise ImageError(f"the image cannot be written to {path}: that is {kind}.")
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise ImageError(
            f"the image cannot be written to {path}: {path.parent} is a file."
        ) from None
    except OSError as error:  # links in a circle, or too long a name
        raise ImageError(f"the image cannot be written to {path}: {error.strerror}.") from error
    return path


def _save(path: pathlib.Path, image: Image.Image, format: str, **options: Any) -> None:
    try:
        with files.replacing(path) as new:
            image.save(new, format, **options)
    except OSError as error:
        reason = error.strerror or error
        raise ImageWriteError(f"the image cannot be written to {path}: {reason}.") from error


def sheet(images: Sequence[Pixels]) -> Pixels:
    """Returns images arranged in a grid that is as square as possible, in the given order."""
    columns = math.ceil(math.sqrt(len(images)))
    height = max(image.shape[0] for image in images) + GAP
    width = max(image.shape[1] for image in images) + GAP
    rows = -(-len(images) // columns)
    page = np.full((rows * height - GAP, columns * width - GAP, 3), 255, np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * height, i % columns * width
        page[y : y + image.shape[0], x : x + image.shape[1]] = image
    return page


def with_boxes(image: Pixels, boxes: Sequence[Box | None]) -> Pixels:
    """Returns an image with boxes drawn on it; None draws nothing."""
    drawn = Image.fromarray(image)
    pen = ImageDraw.Draw(drawn)
    for box in boxes:
        if box is not None:
            pen.rectangle(box, outline=(0, 0, 0), width=max(1, min(drawn.size) // 96))
    return np.array(drawn)
