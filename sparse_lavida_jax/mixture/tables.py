# SPDX-License-Identifier: Apache-2.0
"""Input tables: Parquet, JSON lines, JSON, CSV, and tar files of samples.

Rows are identified by the path of their file and their number. A process scans a file once; a
`Reader` holds files open and returns rows and images. Members of a tar file form a sample if they
share a name up to the first dot: `7.json` its fields, `7.txt` its caption, `7.jpg` its `image`,
`7.source_images.png` its `source_images`.
"""

import contextlib
import csv
import functools
import glob
import io
import itertools
import pathlib
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.data import files
from sparse_lavida_jax.mixture.recipe import PrepareError
from sparse_lavida_jax.mixture.records import RecordError

Row = dict[str, Any]
Places = Any  # how to find each row of a table by its number
Span = tuple[int, int] | Int[np.ndarray, "2"]  # of bytes of a file: offset and length

MOST_BYTES = 2**27  # of one row or image; more counts as damage
MOST_JSON = 2**31  # bytes of a table in JSON, which is read as a whole
MOST_GROUP = 2**32  # bytes of a row group of Parquet, unpacked
SHOWN = 300  # characters of names of columns in a message
MOST_HEADER = 2**20  # bytes of the description of one file in a tar file
IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp")
FORMATS = (".parquet", ".jsonl", ".json", ".csv", ".tar")
LOOKED_THROUGH = 16  # how many files' row positions a process keeps


class TableError(PrepareError):
    """A table cannot be read at all; the message says which and why."""


# What Python, tarfile and pyarrow raise for a damaged table, or a damaged part of one.
UNREADABLE = (
    OSError, ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError,
    RecursionError, csv.Error, tarfile.TarError,
)  # fmt: skip


def find(pattern: str) -> list[pathlib.Path]:
    """Returns the files that match a path or a pattern, sorted.

    Raises:
        TableError: there are none, or one has an unsupported format.
    """
    found = [pathlib.Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    regular = [path for path in found if path.is_file()]
    if not regular:
        raise TableError(f"there is no table {pattern}: no regular file has that name.")
    for path in regular:
        if path.name != path.name.encode(errors="replace").decode():
            raise TableError(f"{path} has a name that is not text in UTF-8: rename it.")
        if path.suffix not in FORMATS:
            raise TableError(f"{path} is no table that is read: {', '.join(FORMATS)} are.")
    return regular


def num_rows(path: pathlib.Path) -> int:
    """Returns how many rows a table has.

    Raises:
        TableError: it cannot be read.
    """
    return len(_places(path)) - (path.suffix == ".csv")


def check_columns(paths: Iterable[pathlib.Path], wanted: Iterable[str]) -> None:
    """Checks that every wanted column is in one of the tables at least.

    Raises:
        TableError: a column is in none of them.
    """
    missing, seen = {*wanted}, set[str]()
    with Reader() as reader:
        for path, number in ((one, i) for one in paths for i in range(num_rows(one))):
            if missing <= seen:
                return
            with contextlib.suppress(RecordError):  # a damaged row is reported later
                seen |= reader.columns(path, number)
    if missing := sorted(missing - seen):
        raise TableError(
            f"`columns` of the mixture file names {', '.join(missing)}, and the columns of"
            f" {', '.join(map(str, paths))} are {', '.join(sorted(seen)):.{SHOWN}}."
        )


def _places(path: pathlib.Path) -> Places:
    """Returns how to find each row of a table.

    For JSON, the row itself; for JSON lines and CSV, its bytes, with those of the header first; for
    a tar file, the bytes of each field; for Parquet, its number.

    Raises:
        TableError: it cannot be read.
    """
    try:
        about = path.stat()
        return _looked_through(path, about.st_size, about.st_mtime_ns)
    except UNREADABLE as error:
        raise TableError(f"the table {path} cannot be read: {error}") from error


@functools.lru_cache(LOOKED_THROUGH)
def _looked_through(path: pathlib.Path, *_version: int) -> Places:
    match path.suffix:
        case ".parquet":
            with _parquet(path) as file:
                return range(file.metadata.num_rows)
        case ".json":
            if path.stat().st_size > MOST_JSON:
                raise ValueError(f"it has more than {MOST_JSON} bytes: write it as JSON lines")
            rows = files.parse_json(files.read_text(path, MOST_JSON))
            if not isinstance(rows, list):
                raise ValueError("it holds no list of rows; is it one row a line? Name it .jsonl")
            return rows
        case ".tar":
            return _tar_samples(path)
    spans = _csv_spans(path) if path.suffix == ".csv" else _lines(path)
    pairs = np.fromiter(itertools.chain.from_iterable(spans), np.int64).reshape(-1, 2)
    if path.suffix == ".csv" and not len(pairs):
        raise ValueError("it has no line of column names")
    return pairs


def _parquet(path: pathlib.Path):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TableError(
            f"{path} needs pyarrow to be read: `pip install 'sparse-lavida-jax[data]'`."
        ) from error
    return pyarrow.parquet.ParquetFile(path)


def _lines(path: pathlib.Path) -> Iterator[Span]:
    at = 0
    with files.open_regular(path) as file:
        for line, size in _bounded(file):
            if line.strip():
                yield at, size
            at += size


def _bounded(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yields the lines of a file, each with its size; too long ones without their end."""
    while line := file.readline(MOST_BYTES):
        size, end = len(line), line
        while not end.endswith(b"\n") and (end := file.readline(MOST_BYTES)):
            size += len(end)
        yield line, size


def _csv_spans(path: pathlib.Path) -> Iterator[Span]:
    """Yields the positions of rows, which may have line breaks inside quotes."""
    at = before = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for line, size in _bounded(file):
            at += size
            yield line.decode("utf-8", "replace")

    with files.open_regular(path) as file:
        rows = csv.reader(lines())
        while True:
            try:
                row: Any = next(rows, None)
            except csv.Error as error:  # reported when the row is read
                row = error
            if row is None:
                return
            if row:
                yield before, at - before
            before = at


def _tar_members(path: pathlib.Path) -> Iterator[tuple[str, Span]]:
    with _Headers(files.open_regular(path).detach()) as file:  # pyright: ignore
        for member in tarfile.open(fileobj=file, mode="r:"):
            if member.size < 0:  # it would lead back
                raise ValueError(f"{member.name} has {member.size} bytes")
            if member.isfile():
                yield member.name, (member.offset_data, member.size)


class _Headers(io.BufferedReader):
    """A tar file of which only descriptions of the files in it are read."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MOST_HEADER:
            raise ValueError(f"a description in it has {size} bytes, more than {MOST_HEADER}")
        return super().read(size)


def _tar_samples(path: pathlib.Path) -> list[dict[str, Span]]:
    samples: dict[str, dict[str, Span]] = {}
    for name, span in _tar_members(path):
        folder, _, file = name.rpartition("/")
        stem, _, field = file.partition(".")
        samples.setdefault(f"{folder}/{stem}", {})[field.lower()] = span
    return list(samples.values())


class Reader(contextlib.ExitStack):
    """Reads rows and images, and keeps their files open.

    Args:
        image_root: folder, or tar file, of the images that rows name; "": the folder of the table.
        columns: of a Parquet file to read; empty: all.
        within: folder that no name of an image leads out of; "": `image_root`.
    """

    def __init__(self, image_root: str = "", columns: Iterable[str] = (), within: str = ""):
        super().__init__()
        self._root, self._within = image_root, within
        self._beside: pathlib.Path | None = None  # the folder of the table that was read last
        self._columns = list(columns)
        self._opened: dict[pathlib.Path, Any] = {}
        self._rows: dict[pathlib.Path, Places] = {}
        self._headers: dict[pathlib.Path, list[str]] = {}
        self._group: tuple[Any, int, Any] | None = None

    def row(self, path: pathlib.Path, number: int) -> Row:
        """Returns a row of a table by its number.

        Raises:
            RecordError: it is damaged.
            TableError: the table cannot be read.
        """
        self._beside = path.parent
        if path not in self._rows:
            self._rows[path] = _places(path)
        places = self._rows[path]
        match path.suffix:
            case ".parquet":
                return self._parquet_row(path, number)
            case ".json":
                return _checked(places[number])
            case ".tar":
                return self._sample(path, places[number])
            case ".jsonl":
                return _parsed(self._text(path, places[number]))
        if path not in self._headers:
            self._headers[path] = _cells(self._text(path, places[0]))
        names, cells = self._headers[path], _cells(self._text(path, places[number + 1]))
        if len(cells) != len(names):
            raise RecordError(f"it has {len(cells)} cells, and the table {len(names)} columns")
        return {name: cell for name, cell in zip(names, cells, strict=True) if cell != ""}

    def columns(self, path: pathlib.Path, number: int) -> set[str]:
        """Returns the columns of a table; of JSON and tar files, the fields with values in a row.

        Raises:
            RecordError, TableError: see `row`.
        """
        if path.suffix == ".parquet":
            return {*self._held(path, lambda: _parquet(path)).schema_arrow.names}
        return {*self.row(path, number), *self._headers.get(path, ())}

    def image(self, value: Any) -> bytes:
        """Returns an encoded image, given its bytes or its name.

        Raises:
            RecordError: there is none.
        """
        if isinstance(value, dict):  # the form in Parquet files of Hugging Face
            either = (value.get("bytes"), value.get("path"))
            value = next((one for one in either if isinstance(one, bytes | str)), value)
        if isinstance(value, bytes) and len(value) <= MOST_BYTES:
            return value
        if not isinstance(value, str) or not value:
            raise RecordError(f"{value!r:.99} is neither an image nor the name of one")
        if "://" in value:
            raise RecordError(f"the image {value} is not on this machine: download it first")
        if self._root.endswith(".tar"):
            span = self._members.get(value.removeprefix("./"))
            if span is None:
                raise RecordError(f"there is no image {value} in {self._root}")
            return self._read(pathlib.Path(self._root), span)
        folder = pathlib.Path(self._root) if self._root else self._beside
        if folder is None:
            raise RecordError(f"the image {value} is only named, and no folder of images is given")
        try:
            path = inside(folder, value, pathlib.Path(self._within or folder))
            return files.read_bytes(path, MOST_BYTES)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise RecordError(f"the image {value} cannot be read: {why}") from error

    @functools.cached_property
    def _members(self) -> dict[str, Span]:
        try:
            found = _tar_members(pathlib.Path(self._root))
            return {name.removeprefix("./"): span for name, span in found}
        except UNREADABLE as error:
            raise TableError(f"the images {self._root} cannot be read: {error}") from error

    def _parquet_row(self, path: pathlib.Path, number: int) -> Row:
        file = self._held(path, lambda: _parquet(path))
        about = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        sizes = [one.num_rows for one in about]
        ends = list(itertools.accumulate(sizes))
        group = int(np.searchsorted(ends, number, side="right"))
        if self._group is None or self._group[:2] != (path, group):
            columns = [name for name in self._columns if name in file.schema_arrow.names]
            try:
                if not 0 <= about[group].total_byte_size <= MOST_GROUP:
                    raise ValueError(f"a row group of it has more than {MOST_GROUP} bytes")
                rows = file.read_row_group(group, columns=columns if self._columns else None)
                self._group = path, group, rows
            except UNREADABLE as error:
                raise TableError(f"the table {path} cannot be read: {error}") from error
        try:
            (row,) = self._group[2].slice(number - (ends[group] - sizes[group]), 1).to_pylist()
        except UNREADABLE as error:
            raise RecordError(f"its fields cannot be read: {error}") from error
        return _without_none(row)

    def _sample(self, path: pathlib.Path, spans: dict[str, Span]) -> Row:
        row: Row = {}
        for field, span in spans.items():
            name, _, suffix = field.rpartition(".")
            if suffix == "json":
                row |= _parsed(self._text(path, span, "replace"))
            elif suffix == "txt":
                row[name or "caption"] = self._text(path, span, "replace").strip()
            elif suffix in IMAGE_SUFFIXES:
                row[name or "image"] = self._read(path, span)
        return row

    def _held(self, path: pathlib.Path, opened: Callable[[], Any]) -> Any:
        if path not in self._opened:
            self._opened[path] = self.enter_context(opened())
        return self._opened[path]

    def _text(self, path: pathlib.Path, span: Span, errors: str = "strict") -> str:
        try:
            return self._read(path, span).decode("utf-8-sig", errors)
        except UnicodeDecodeError as error:
            raise RecordError(f"it is no UTF-8 ({error})") from error

    def _read(self, path: pathlib.Path, span: Span) -> bytes:
        start, size = map(int, span)
        if size > MOST_BYTES:
            raise RecordError(f"{size} bytes in one piece are taken for damage")
        file = self._held(path, lambda: files.open_regular(path))
        file.seek(start)
        data = file.read(size)
        if len(data) != size:
            raise RecordError(f"{path} ends in the middle of it")
        return data


def inside(folder: pathlib.Path, name: str, within: pathlib.Path | None = None) -> pathlib.Path:
    """Returns the path of a file, given its name in a folder, wherever that and links lead.

    Args:
        within: the folder that it must lie in; None: `folder`.

    Raises:
        ValueError: it lies elsewhere, or that is no name of a file.
        OSError: links lead around in a circle.
    """
    path = files.resolve(folder / name)
    if not path.is_relative_to(files.resolve(within or folder)):
        raise ValueError(f"it lies outside {within or folder}, the folder of the images")
    return path


def _cells(text: str) -> list[str]:
    try:
        (cells,) = csv.reader(io.StringIO(text, newline=""))
    except (csv.Error, ValueError) as error:
        raise RecordError(f"it is no row of CSV ({error})") from error
    return cells


def _parsed(text: str) -> Row:
    try:
        row = files.parse_json(text)
    except ValueError as error:
        raise RecordError(f"it is no JSON ({error})") from error
    return _checked(row)


def _checked(row: Any) -> Row:
    if not isinstance(row, dict):
        raise RecordError("it has no fields by name")
    return _without_none({str(name): value for name, value in row.items()})


def _without_none(row: Row) -> Row:
    return {name: value for name, value in row.items() if value is not None}
