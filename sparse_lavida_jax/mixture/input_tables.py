# SPDX-License-Identifier: Apache-2.0
"""Input tables: Parquet, JSON lines, JSON, CSV, and tar files of samples.

Rows are identified by the path of their file and their number. A process scans a file once; a
`Reader` holds files open and returns rows and images. Members of a tar file form a sample if they
share a name up to the first dot: `7.json` its fields, `7.txt` its caption, `7.jpg` its `image`,
`7.source_images.png` its `source_images`. Empty cells, null and NaN count as left out.
"""

import contextlib
import csv
import functools
import glob
import io
import itertools
import math
import os
import pathlib
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.data import files, image_files, leftovers
from sparse_lavida_jax.mixture.recipe import PrepareError
from sparse_lavida_jax.mixture.records import RecordError

Row = dict[str, Any]
Places = Any  # how to find each row of a table by its number
Span = tuple[int, int] | Int[np.ndarray, "2"]  # of bytes of a file: offset and length

MOST_BYTES = 2**27  # of one row or image; more counts as damage
MOST_JSON = 2**31  # bytes of a table in JSON, which is read as a whole
MOST_ROWS = 2**27  # that Parquet states; its empty rows take no bytes
MOST_GROUP = 2**32  # bytes of a row group of Parquet, unpacked
SHOWN = 300  # characters of names of columns in a message
MOST_HEADER = 2**20  # bytes of the description of one file in a tar file
FORMATS = (".parquet", ".jsonl", ".json", ".csv", ".tar")
MEMBERS = (".json", ".txt", *image_files.READ_SUFFIXES)  # of a tar file
LOOKED_THROUGH = 16  # how many files' row positions a process keeps
LISTED = 64  # how many folders' names a process keeps
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|\Z)")


class TableError(PrepareError):
    """A table cannot be read at all; the message says which and why."""


# What Python, tarfile and pyarrow raise for a damaged table, or a damaged part of one.
UNREADABLE = (
    OSError, ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError,
    RecursionError, csv.Error, tarfile.TarError,
)  # fmt: skip


def find(patterns: Iterable[str]) -> list[pathlib.Path]:
    """Returns the files that match paths or patterns, sorted.

    Raises:
        TableError: there are none, or one has an unsupported format.
    """
    regular: list[pathlib.Path] = []
    for pattern in patterns:
        if (literal := pathlib.Path(pattern)).is_file():
            regular.append(literal)
            continue
        names = glob.glob(pattern, recursive=True)
        found = leftovers.without(map(pathlib.Path, names), _fixed_part(pattern))
        if not (found := [path for path in found if path.is_file()]):
            raise TableError(f"there is no table {pattern}: no regular file has that name.")
        regular += found
    for path in regular:
        if format_of(path) not in FORMATS:
            raise TableError(f"{path} is not a table that is read: {', '.join(FORMATS)} are.")
    return sorted({*regular})


def format_of(path: pathlib.Path) -> str:
    """Returns the suffix of a table in small letters."""
    return path.suffix.lower()


def _fixed_part(pattern: str) -> pathlib.Path:
    """Returns the folder that all matches of a pattern lie in."""
    parts = itertools.takewhile(lambda part: not glob.has_magic(part), pathlib.Path(pattern).parts)
    return pathlib.Path(*parts)


def num_rows(path: pathlib.Path) -> int:
    """Returns how many rows a table has.

    Raises:
        TableError: it cannot be read.
    """
    return len(_places(path)) - (format_of(path) == ".csv")


def check_columns(paths: Iterable[pathlib.Path], wanted: Iterable[Sequence[str]]) -> None:
    """Checks that the tables have at least one column of every group of wanted columns.

    Raises:
        TableError: none of a group is in them.
    """
    missing, seen = [*wanted], set[str]()
    with Reader() as reader:
        for path, number in ((one, i) for one in paths for i in range(num_rows(one))):
            if not (missing := [names for names in missing if seen.isdisjoint(names)]):
                return
            with contextlib.suppress(RecordError):  # a damaged row is reported later
                seen |= reader.columns(path, number)
    if missing := [" or ".join(names) for names in missing if seen.isdisjoint(names)]:
        raise TableError(
            f"`columns` of the mixture file names {', '.join(sorted(missing))}, and the columns of"
            f" {', '.join(map(str, paths))} are {', '.join(sorted(seen)):.{SHOWN}}."
        )


def unread(path: pathlib.Path) -> dict[str, list[str]]:
    """Returns, by reason, the names of what is in a tar file and not in a row of it.

    Raises:
        TableError: it cannot be read.
    """
    return {} if format_of(path) != ".tar" else _places(path).unread


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
    match format_of(path):
        case ".parquet":
            with _parquet(path) as file:
                if file.metadata.num_rows > MOST_ROWS:
                    raise ValueError(f"it has more than {MOST_ROWS} rows")
                groups = range(file.num_row_groups)
                if any(file.metadata.row_group(i).total_byte_size > MOST_GROUP for i in groups):
                    raise ValueError(f"a row group of it has more than {MOST_GROUP} bytes")
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
    is_csv = format_of(path) == ".csv"
    spans = _csv_spans(path) if is_csv else _lines(path)
    pairs = np.fromiter(itertools.chain.from_iterable(spans), np.int64).reshape(-1, 2)
    if is_csv and not len(pairs):
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
    r"""Yields the lines of a file, each with its size; too long ones without their end.

    They end at \n, \r\n and \r, as those of all texts (`files.lines`).
    """
    while piece := file.readline(MOST_BYTES):
        size, end = len(piece), piece
        while not end.endswith(b"\n") and (end := file.readline(MOST_BYTES)):
            size += len(end)
        *lines, last = filter(None, _LINE.findall(piece)) if b"\r" in piece else (piece,)
        yield from ((line, len(line)) for line in lines)
        yield last, size - sum(map(len, lines))


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
    raw: Any = files.open_regular(path).detach()
    raw.seek(0)
    with _Headers(raw) as file:
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


class _Samples(list[dict[str, Span]]):
    """The samples of a tar file, and by reason the names of what is in none of them."""

    unread: dict[str, list[str]]


def _tar_samples(path: pathlib.Path) -> _Samples:
    samples: dict[str, dict[str, Span]] = {}
    unread: dict[str, list[str]] = {}
    for name, span in _tar_members(path):
        folder, _, file = files.composed(name.removeprefix("./")).rpartition("/")
        stem, _, field = file.partition(".")
        if leftovers.has_leftover(name):
            unread.setdefault(leftovers.BEHIND, []).append(name)
        elif f".{field.lower().rpartition('.')[-1]}" not in MEMBERS:
            unread.setdefault("a member of another kind", []).append(name)
        else:
            samples.setdefault(f"{folder}/{stem}", {})[field.lower()] = span
    found = _Samples(samples.values())
    found.unread = unread
    return found


class Reader(contextlib.ExitStack):
    """Reads rows and images, and keeps their files open.

    Args:
        image_root: folder, or tar file, of the images that rows name; "": the folder of the table.
        columns: of a Parquet file to read; empty: all.
        within: folders that no name of an image leads out of; none: `image_root`.
    """

    def __init__(
        self, image_root: str = "", columns: Iterable[str] = (), within: Sequence[str] = ()
    ):
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
        match format_of(path):
            case ".parquet":
                return self._parquet_row(path, number)
            case ".json":
                return _checked(places[number])
            case ".tar":
                return self._sample(path, places[number])
            case ".jsonl":
                return _parsed(self._text(path, places[number]))
        if path not in self._headers:
            self._headers[path] = _header(path, self._text(path, places[0]))
        names, cells = self._headers[path], _cells(self._text(path, places[number + 1]))
        if len(cells) != len(names):
            raise RecordError(f"it has {len(cells)} cells, and the table {len(names)} columns")
        return {name: cell for name, cell in zip(names, cells, strict=True) if cell and name}

    def columns(self, path: pathlib.Path, number: int) -> set[str]:
        """Returns the columns of a table; of JSON and tar files, the fields with values in a row.

        Raises:
            RecordError, TableError: see `row`.
        """
        if format_of(path) == ".parquet":
            return {*self._held(path, lambda: _parquet(path)).schema_arrow.names}
        return {*self.row(path, number), *self._headers.get(path, ())}

    def texts(self, path: pathlib.Path) -> Iterator[Row]:
        """Yields the undamaged rows of a Parquet file with True in place of bytes, as of images.

        Raises:
            TableError: it cannot be read.
        """
        file = self._held(path, lambda: _parquet(path))
        leaves = [file.schema.column(i) for i in range(len(file.schema))]
        texts = [
            leaf.path
            for leaf in leaves
            if leaf.physical_type != "BYTE_ARRAY" or leaf.logical_type.type != "NONE"
        ]
        others = {leaf.path.split(".")[0] for leaf in leaves} - {one.split(".")[0] for one in texts}
        try:
            for batch in file.iter_batches(columns=texts):
                for number in range(batch.num_rows):
                    with contextlib.suppress(UnicodeDecodeError, ArithmeticError):
                        (row,) = batch.slice(number, 1).to_pylist()
                        yield dict.fromkeys(others, True) | _without_none(row)
        except UNREADABLE as error:
            raise TableError(f"the table {path} cannot be read: {error}") from error

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
        if self._root.lower().endswith(".tar"):
            span = self._members.get(files.composed(value.removeprefix("./")))
            if span is None:
                raise RecordError(f"there is no image {value} in {self._root}")
            return self._read(pathlib.Path(self._root), span)
        folder = pathlib.Path(self._root) if self._root else self._beside
        if folder is None:
            raise RecordError(f"the image {value} is only named, and no folder of images is given")
        try:
            path = inside(folder, value, self._within)
            return files.read_bytes(path, MOST_BYTES)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise RecordError(f"the image {value} cannot be read: {why}") from error

    @functools.cached_property
    def _members(self) -> dict[str, Span]:
        try:
            found = _tar_members(pathlib.Path(self._root))
            return {files.composed(name.removeprefix("./")): span for name, span in found}
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
                row |= _parsed(self._text(path, span))
                continue
            name = name or ("caption" if suffix == "txt" else "image")
            if name in row and suffix != "txt":
                raise RecordError(f"it has two of the field {name}")
            is_text = suffix == "txt"
            row[name] = self._text(path, span).strip() if is_text else self._read(path, span)
        return _without_none(row)

    def _held(self, path: pathlib.Path, opened: Callable[[], Any]) -> Any:
        if path not in self._opened:
            self._opened[path] = self.enter_context(opened())
        return self._opened[path]

    def _text(self, path: pathlib.Path, span: Span) -> str:
        try:
            return self._read(path, span).decode("utf-8-sig")
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


def inside(folder: pathlib.Path, name: str, within: Sequence[str] = ()) -> pathlib.Path:
    """Returns the path of a file, given its name in a folder, wherever that and links lead.

    Of a name that does not exist, other spellings are tried (`_spelled`).

    Args:
        within: the folders of which it must lie in one; none: `folder`.

    Raises:
        ValueError: it lies elsewhere, or that is not the name of a file.
        OSError: links lead around in a circle.
    """
    path = files.resolve(folder / name)
    if not path.exists():
        path = files.resolve(_spelled(folder, name))
    roots = [files.resolve(root) for root in within or [folder]]
    if not any(path.is_relative_to(root) for root in roots):
        raise ValueError(f"it lies outside {roots[0]}, the folder of the images")
    return path


def _spelled(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns a path as its folders spell it, given a name that another system wrote.

    Windows separates folders by backslashes and ignores the case of letters; macOS decomposes them.
    """
    path = folder
    for part in pathlib.PurePosixPath(name.replace("\\", "/")).parts:
        if not (path / part).exists():
            alike = _names(path, path.stat().st_mtime_ns).get(files.composed(part).casefold(), [])
            part = alike[0] if len(alike) == 1 else part
        path /= part
    return path


@functools.lru_cache(LISTED)
def _names(folder: pathlib.Path, changed: int) -> dict[str, list[str]]:
    """Returns the names in a folder, by their composed form in small letters."""
    names: dict[str, list[str]] = {}
    for name in os.listdir(folder):
        names.setdefault(files.composed(name).casefold(), []).append(name)
    return names


def _header(path: pathlib.Path, text: str) -> list[str]:
    names = [name.strip() for name in _cells(text)]
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise TableError(f"{path} has two columns {', '.join(twice)}: give each a name of its own.")
    return names


def _cells(text: str) -> list[str]:
    try:
        (cells,) = csv.reader([text])
    except (csv.Error, ValueError) as error:
        raise RecordError(f"it is no row of CSV ({error})") from error
    return cells


def _parsed(text: str) -> Row:
    try:
        row = files.parse_json(text, unique=True)
    except ValueError as error:
        raise RecordError(f"it is no JSON ({error})") from error
    return _checked(row)


def _checked(row: Any) -> Row:
    if not isinstance(row, dict):
        raise RecordError("it has no fields by name")
    return _without_none({str(name): value for name, value in row.items()})


def _without_none(row: Row) -> Row:
    """Returns the fields that have a value; pandas writes NaN for a missing one."""
    return {
        name: value
        for name, value in row.items()
        if value is not None and not (isinstance(value, float) and math.isnan(value))
    }
