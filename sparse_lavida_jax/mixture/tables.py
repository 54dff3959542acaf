# SPDX-License-Identifier: Apache-2.0
"""Tables that people have: Parquet, JSON lines, JSON, CSV, and tar files of samples.

A table says where its rows are, and is small enough to send to a worker; a `Reader` holds the
files open and returns rows and images. A sample of a tar file is what shares a name up to the
first dot: `7.json` its fields, `7.txt` its caption, `7.jpg` its `image`, `7.source_images.png` its
`source_images`.
"""

import codecs
import contextlib
import csv
import dataclasses
import functools
import glob
import itertools
import json
import os
import pathlib
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.mixture.records import RecordError

Row = dict[str, Any]
Span = tuple[int, int]  # of bytes of a file: where it begins, and how many

MOST_BYTES = 2**27  # of one row or image; more is taken for damage
IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp")
FORMATS = (".parquet", ".jsonl", ".json", ".csv", ".tar")


class TableError(Exception):
    """A table that cannot be read at all; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Where the rows of one file are.

    Attributes:
        path: the file.
        num_rows: how many it has.
        spans: of lines and of CSV rows.
        header: of CSV: its columns.
        samples: of a tar file: the fields of each sample and where they are.
        kept: the rows that `spans` and `samples` are of, sorted; None: all.
    """

    path: pathlib.Path
    num_rows: int
    spans: Int[np.ndarray, "r 2"] | None = None
    header: tuple[str, ...] = ()
    samples: tuple[dict[str, Span], ...] = ()
    kept: Int[np.ndarray, " r"] | None = None

    def part(self, rows: Iterable[int]) -> "Table":
        """Returns the same table without what is not needed for some of its rows."""
        kept = np.unique(np.asarray([*rows], np.int64))
        return dataclasses.replace(
            self,
            spans=None if self.spans is None else self.spans[kept],
            samples=tuple(self.samples[i] for i in kept) if self.samples else (),
            kept=kept,
        )

    def place(self, number: int) -> int:
        """Returns where a row stands in `spans` and `samples`."""
        return number if self.kept is None else int(np.searchsorted(self.kept, number))


def find(pattern: str) -> list[pathlib.Path]:
    """Returns the files that a path or a pattern names, sorted.

    Raises:
        TableError: there are none, or one is of a format that is not read.
    """
    found = [pathlib.Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in found if path.is_file()]
    if not files:
        raise TableError(f"there is no table {pattern}.")
    for path in files:
        if path.suffix not in FORMATS:
            raise TableError(f"{path} is no table that is read: {', '.join(FORMATS)} are.")
    return files


def locate(path: pathlib.Path) -> Table:
    """Looks through a file for its rows.

    Raises:
        TableError: it cannot be read.
    """
    try:
        match path.suffix:
            case ".parquet":
                return Table(path, _parquet(path).metadata.num_rows)
            case ".jsonl":
                return _with_spans(path, _lines(path))
            case ".json":
                return Table(path, len(_json_list(path)))
            case ".csv":
                rows = _csv_rows(path)
                if (first := next(rows, None)) is None:
                    raise ValueError("it has no line of column names")
                names = first[1][0].removeprefix(codecs.BOM_UTF8.decode()), *first[1][1:]
                return _with_spans(path, (span for span, _ in rows), names)
        samples = _tar_samples(path)
        return Table(path, len(samples), samples=samples)
    # `pyarrow` has errors of its own, derived from these two.
    except (OSError, ValueError, csv.Error, tarfile.TarError) as error:
        raise TableError(f"the table {path} cannot be read: {error}") from error


def _with_spans(path: pathlib.Path, spans: Iterable[Span], header: tuple[str, ...] = ()) -> Table:
    pairs = np.fromiter(itertools.chain.from_iterable(spans), np.int64).reshape(-1, 2)
    return Table(path, len(pairs), pairs, header)


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
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield at, len(line)
            at += len(line)


def _json_list(path: pathlib.Path) -> list[Any]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError("it holds no list of rows; is it one row a line? Then name it .jsonl")
    return rows


def _csv_rows(path: pathlib.Path) -> Iterator[tuple[Span, list[str]]]:
    """Yields rows and where they are: one may have line breaks inside its quotes."""
    at = before = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for line in file:
            at += len(line)
            yield line.decode("utf-8")

    with path.open("rb") as file:
        for row in csv.reader(lines()):
            if row:
                yield (before, at - before), row
            before = at


def _tar_members(path: pathlib.Path) -> Iterator[tuple[str, Span]]:
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isfile():
                yield member.name, (member.offset_data, member.size)


def _tar_samples(path: pathlib.Path) -> tuple[dict[str, Span], ...]:
    samples: dict[str, dict[str, Span]] = {}
    for name, span in _tar_members(path):
        folder, _, file = name.rpartition("/")
        stem, _, field = file.partition(".")
        samples.setdefault(f"{folder}/{stem}", {})[field.lower()] = span
    return tuple(samples.values())


class Reader(contextlib.ExitStack):
    """Reads rows and images, and keeps the files open that it read from.

    Args:
        image_root: folder, or tar file, of the images that rows name; "": where they say.
        columns: of a Parquet file, the ones to read; none: all.
    """

    def __init__(self, image_root: str = "", columns: Iterable[str] = ()):
        super().__init__()
        self._root = image_root
        self._columns = list(columns)
        self._opened: dict[pathlib.Path, Any] = {}
        self._group: tuple[Any, int, list[Row]] | None = None

    def row(self, table: Table, number: int) -> Row:
        """Returns a row by its number.

        Raises:
            RecordError: it is damaged.
        """
        match table.path.suffix:
            case ".parquet":
                return self._parquet_row(table.path, number)
            case ".json":
                return _checked(self._held(table.path, lambda: _json_list(table.path))[number])
            case ".tar":
                return self._sample(table, number)
        assert table.spans is not None
        start, size = table.spans[table.place(number)].tolist()
        try:
            text = self._read(table.path, (start, size)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RecordError(f"it is no UTF-8 ({error})") from error
        if not table.header:
            return _parsed(text)
        (cells,) = csv.reader(text.splitlines(keepends=True))
        if len(cells) != len(table.header):
            raise RecordError(
                f"it has {len(cells)} cells, and the table {len(table.header)} columns"
            )
        return {name: cell for name, cell in zip(table.header, cells, strict=True) if cell != ""}

    def image(self, value: Any) -> bytes:
        """Returns an encoded image: its bytes, or what lies under the name given.

        Raises:
            RecordError: there is none.
        """
        if isinstance(value, dict):  # as Parquet files of Hugging Face have it
            inside = (value.get("bytes"), value.get("path"))
            value = next((one for one in inside if isinstance(one, bytes | str)), value)
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value:
            raise RecordError(f"{value!r} is neither an image nor the name of one")
        if "://" in value:
            raise RecordError(f"the image {value} is not on this machine: download it first")
        if self._root.endswith(".tar"):
            span = self._members.get(value.removeprefix("./"))
            if span is None:
                raise RecordError(f"there is no image {value} in {self._root}")
            return self._read(pathlib.Path(self._root), span)
        inside = os.path.normpath(value)
        if self._root and (os.path.isabs(inside) or inside.split(os.sep)[0] == os.pardir):
            raise RecordError(f"the image {value} lies outside image_root")
        path = pathlib.Path(self._root, inside)
        try:
            if path.stat().st_size > MOST_BYTES:
                raise RecordError(f"the image {value} is larger than {MOST_BYTES} bytes")
            return path.read_bytes()
        except OSError as error:
            raise RecordError(f"the image {value} cannot be read: {error.strerror}") from error

    @functools.cached_property
    def _members(self) -> dict[str, Span]:
        found = _tar_members(pathlib.Path(self._root))
        return {name.removeprefix("./"): span for name, span in found}

    def _parquet_row(self, path: pathlib.Path, number: int) -> Row:
        file = self._held(path, lambda: self.enter_context(_parquet(path)))
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        group = int(np.searchsorted(ends, number, side="right"))
        if self._group is None or self._group[:2] != (path, group):
            columns = [name for name in self._columns if name in file.schema_arrow.names]
            try:
                rows = file.read_row_group(group, columns=columns if self._columns else None)
                self._group = path, group, rows.to_pylist()
            except (OSError, ValueError) as error:
                raise TableError(f"the table {path} cannot be read: {error}") from error
        return _without_none(self._group[2][number - (ends[group] - sizes[group])])

    def _sample(self, table: Table, number: int) -> Row:
        row: Row = {}
        for field, span in table.samples[table.place(number)].items():
            name, _, suffix = field.rpartition(".")
            if suffix == "json":
                row |= _parsed(self._read(table.path, span).decode("utf-8", "replace"))
            elif suffix == "txt":
                text = self._read(table.path, span).decode("utf-8", "replace")
                row[name or "caption"] = text.strip()
            elif suffix in IMAGE_SUFFIXES:
                row[name or "image"] = self._read(table.path, span)
        return row

    def _held(self, path: pathlib.Path, opened: Callable[[], Any]) -> Any:
        if path not in self._opened:
            self._opened[path] = opened()
        return self._opened[path]

    def _read(self, path: pathlib.Path, span: Span) -> bytes:
        start, size = span
        if size > MOST_BYTES:
            raise RecordError(f"{size} bytes in one piece are taken for damage")
        file = self._held(path, lambda: self.enter_context(path.open("rb")))
        file.seek(start)
        data = file.read(size)
        if len(data) != size:
            raise RecordError(f"{path} ends in the middle of it")
        return data


def _parsed(text: str) -> Row:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise RecordError(f"it is no JSON ({error})") from error
    return _checked(row)


def _checked(row: Any) -> Row:
    if not isinstance(row, dict):
        raise RecordError("it has no fields by name")
    return _without_none({str(name): value for name, value in row.items()})


def _without_none(row: Row) -> Row:
    return {name: value for name, value in row.items() if value is not None}
