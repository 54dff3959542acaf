# SPDX-License-Identifier: Apache-2.0
"""Training samples on disk: records, and the ArrayRecord shards that hold them.

A record has only what training needs: strings, the encoded images for the vision tower, and the
codes of the images that are drawn or edited. It is a flat msgpack dict that includes its version.
The records of a shard can be read by number, in any order.
"""

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import flax.serialization
import numpy as np
from array_record.python import array_record_module  # type: ignore
from jaxtyping import Float, Int

from sparse_lavida_jax.data import files

VERSION = 2
SUFFIX = ".arrayrecord"
# One record per group: each can be read without its neighbours.
WRITER_OPTIONS = "group_size:1"


class RecordError(ValueError):
    """A record or a shard cannot be used; the message says which and why."""


# Empty fields.
_NO_CODES = functools.partial(np.zeros, (0, 0, 0), np.int32)
_NO_PLACES = functools.partial(np.zeros, (0, 2), np.int32)
_NO_LIGHT = functools.partial(np.zeros, (0, 2), np.float32)
_NO_BOXES = functools.partial(np.zeros, (0, 4), np.float32)


@dataclasses.dataclass(frozen=True)
class Record:
    """One sample.

    Attributes:
        kind: one of `recipe.KINDS`.
        source: name of its dataset.
        name: the row it was made from, for messages.
        asked: what the user says, one string per turn: a caption, an instruction, a phrase, or
            questions, in which `<image>` stands for an image. For an image to draw without a
            layout: alternative captions.
        answered: the answer of the assistant to each; empty if `layout` or `target` is the
            response.
        layout: a layout in LOC tokens.
        operation: what an edit does, in the words of its layout: "adding", "removing", ...
        form: "plan_only": only the layout is learned; "no_plan": only the image.
        feedback: what is wrong with each of the earlier attempts that `images` shows.
        images: encoded images for the vision tower, in their original files.
        target: codes of the image to draw, in one crop or several.
        crops: top and left of each crop, in pixels of the resized image.
        light: luminance and contrast of each crop.
        sources: codes of the images to be edited.
        size: width and height of the image to draw, or of the first one shown, in pixels.
        score, hps, pixel_diff: of the image to draw, if known (`chat.micro_condition`).
        phrases: descriptions of the things in `boxes`.
        boxes: x1, y1, x2, y2 in pixels of an image of `size`.
    """

    kind: str
    source: str
    name: str
    asked: tuple[str, ...]
    answered: tuple[str, ...] = ()
    layout: str = ""
    operation: str = ""
    form: str = ""
    feedback: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()
    target: Int[np.ndarray, "_k _y _x"] = dataclasses.field(default_factory=_NO_CODES)
    crops: Int[np.ndarray, "_k 2"] = dataclasses.field(default_factory=_NO_PLACES)
    light: Float[np.ndarray, "_k 2"] = dataclasses.field(default_factory=_NO_LIGHT)
    sources: Int[np.ndarray, "_n _y _x"] = dataclasses.field(default_factory=_NO_CODES)
    size: tuple[int, int] = (0, 0)
    score: float | None = None
    hps: float | None = None
    pixel_diff: float | None = None
    phrases: tuple[str, ...] = ()
    boxes: Float[np.ndarray, "_b 4"] = dataclasses.field(default_factory=_NO_BOXES)

    @property
    def draws(self) -> bool:
        """Whether the response includes an image."""
        return len(self.target) > 0 and self.form != "plan_only"


_FLOATS = ("light", "boxes")  # all other arrays hold whole numbers


def encode(record: Record) -> bytes:
    """Returns a record as msgpack; equal records have equal bytes."""
    flat: dict[str, Any] = {"version": VERSION}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            kind = np.float32 if field.name in _FLOATS else np.int32
            value = np.ascontiguousarray(value, kind)
        elif isinstance(value, tuple):
            value = list(value)
        flat[field.name] = value
    return flax.serialization.msgpack_serialize(flat)


def decode(data: bytes) -> Record:
    """Decodes a record from `encode`.

    Raises:
        RecordError: it is damaged, or of another version.
    """
    try:
        flat: dict[str, Any] = dict(flax.serialization.msgpack_restore(data))  # type: ignore
        version = flat.pop("version")
    except Exception as error:  # msgpack raises many kinds
        raise RecordError(f"it is no record ({error})") from error
    if version != VERSION:
        raise RecordError(
            f"it is a record of version {version}, and this program reads version {VERSION}:"
            " prepare the data again"
        )
    names = {field.name for field in dataclasses.fields(Record)}
    if set(flat) != names:
        raise RecordError(f"it has the fields {sorted(flat)}, not {sorted(names)}")
    flat |= {name: tuple(value) for name, value in flat.items() if isinstance(value, list)}
    return Record(**flat)


# ---------------------------------------------------------------------------------------------
# Shards.


def write_shard(path: pathlib.Path, records: Iterable[Record]) -> tuple[int, int, str]:
    """Writes a shard completely, verified by reading it back, or not at all.

    Returns: its numbers of records and bytes, and its SHA-256.

    Raises:
        OSError: it cannot be written: the disk is full, for example.
    """
    count, written = 0, hashlib.sha256()
    with files.replacing(path) as new:
        with _explained(path):
            writer = array_record_module.ArrayRecordWriter(str(new), WRITER_OPTIONS)
        with contextlib.ExitStack() as closing:
            closing.callback(_close, writer, path)
            for record in records:
                data = encode(record)
                with _explained(path):
                    writer.write(data)
                written.update(data)
                count += 1
        # The library does not report every failed write.
        if not count or _digest_of_records(new, count) != written.hexdigest():
            raise OSError(f"{path} did not come out as it was written: is the disk full?")
        return count, new.stat().st_size, files.sha256(new)


def _close(writer, path: pathlib.Path) -> None:
    with _explained(path):
        if writer.is_open():
            writer.close()


def _digest_of_records(path: pathlib.Path, count: int) -> str | None:
    """Returns a digest over all records of a shard; None if there are not `count`."""
    digest = hashlib.sha256()
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        if reader.num_records() != count:
            return None
        for _ in range(count):
            digest.update(reader.read())
        reader.close()
    except (RuntimeError, IndexError, ValueError):  # for a truncated file
        return None
    return digest.hexdigest()


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
    """Turns the library's errors, which may be empty, into OSError."""
    try:
        yield
    except RuntimeError as error:
        said = f"{error}" or "is the disk full?"
        raise OSError(f"{path.parent} cannot be written to: {said}") from error


class ShardedRecords:
    """The records of several shards, numbered from the first shard on.

    Args:
        shards: files, with the numbers of records and bytes of each.

    Raises:
        RecordError: a shard is missing or has another size.
    """

    def __init__(self, shards: Sequence[tuple[pathlib.Path, int, int]]):
        for path, _, num_bytes in shards:
            found = path.stat().st_size if path.is_file() else None
            if found != num_bytes:
                state = "is missing" if found is None else f"has {found} bytes, not {num_bytes}"
                raise RecordError(
                    f"the shard {path} {state}: copy it again, or run the `prepare` that wrote it"
                    " again, which writes what is missing."
                )
        self._files = [(path, count) for path, count, _ in shards if count]
        whole = [
            types.SimpleNamespace(filename=str(path), skip=0, take=count, examples_in_shard=count)
            for path, count in self._files
        ]
        self._source: Any = ()
        if whole:
            import grain  # takes a quarter of a second

            self._source = grain.sources.ArrayRecordDataSource(whole)  # type: ignore

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Record:
        """Returns record `index`.

        Raises:
            RecordError: its shard is damaged.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are records 0..{len(self) - 1}, not {index}.")
        try:
            return decode(self._source[index])
        # For a damaged file the reader may raise just `RuntimeError("")`.
        except (RuntimeError, RecordError, ValueError) as error:
            ends = np.cumsum([count for _, count in self._files])
            path, _ = self._files[int(np.searchsorted(ends, index, side="right"))]
            raise RecordError(
                f"record {index} cannot be read from {path}: {error or 'the file is damaged'}."
                " Copy the shard again, or delete it and run the `prepare` that wrote it again."
            ) from error
