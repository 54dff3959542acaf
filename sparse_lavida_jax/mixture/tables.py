# SPDX-License-Identifier: Apache-2.0
"""Tables that people have: Parquet, JSON lines, JSON, CSV, and tar files of samples.

A table says where its rows are, and is small enough to send to a worker; a `Reader` holds the
files open and returns rows and images. A sample of a tar file is what shares a name up to the
first dot: `7.json` its fields, `7.txt` its caption, `7.jpg` its `image`, `7.source_images.png` its
`source_images`.
"""

import array
import codecs
import contextlib
import csv
import dataclasses
import glob
import itertools
import json
import os
import pathlib
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.mixture.records import RecordError

Row = dict[str, Any]

MOST_BYTES = 2**27  # of one row or image; more is taken for damage
IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp")
FORMATS = {
    ".parquet": "parquet", ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tar": "tar"
}  # fmt: skip


class TableError(Exception):
    """A table that cannot be read at all; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Table:
    """Where the rows of one file are.

    Attributes:
        path: the file.
        format: a value of `FORMATS`.
        num_rows: how many it has.
        spans: of lines and of CSV rows: where each begins and ends.
        header: of CSV: its columns.
        samples: of a tar file: the fields of each sample and where they are.
        kept: the rows that `spans` and `samples` are of, sorted; None: all.
    """

    path: pathlib.Path
    format: str
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
    kind = FORMATS[path.suffix]
    try:
        match kind:
            case "parquet":
                return Table(path, kind, _parquet(path).metadata.num_rows)
            case "jsonl":
                return _lines(path)
            case "json":
                return Table(path, kind, len(_json_list(path)))
            case "csv":
                return _csv_rows(path)
        samples = _tar_samples(path)
        return Table(path, kind, len(samples), samples=samples)
    # `pyarrow` has errors of its own, derived from these two.
    except (OSError, ValueError, csv.Error, tarfile.TarError) as error:
        raise TableError(f"the table {path} cannot be read: {error}") from error


def _parquet(path: pathlib.Path):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TableError(
            f"{path} needs pyarrow to be read: `pip install 'sparse-lavida-jax[data]'`."
        ) from error
    return pyarrow.parquet.ParquetFile(path)


def _lines(path: pathlib.Path) -> Table:
    spans, at = array.array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                spans.extend((at, at + len(line)))
            at += len(line)
    return _with_spans(path, "jsonl", spans)


def _with_spans(path: pathlib.Path, kind: str, spans: array.array, header=()) -> Table:
    pairs = np.array(spans, np.int64).reshape(-1, 2)
    return Table(path, kind, len(pairs), pairs, tuple(header))


def _json_list(path: pathlib.Path) -> list[Any]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError("it holds no list of rows; is it one row a line? Then name it .jsonl")
    return rows


def _csv_rows(path: pathlib.Path) -> Table:
    """Finds where rows begin: one may have line breaks inside its quotes."""
    with path.open("rb") as file:
        at = 0

        def lines() -> Iterator[str]:
            nonlocal at
            for line in file:
                at += len(line)
                yield line.decode("utf-8")

        reader, spans, before = csv.reader(lines()), array.array("q"), 0
        header: list[str] = []
        for row in reader:
            if row and not header:
                header = [row[0].removeprefix(codecs.BOM_UTF8.decode()), *row[1:]]
            elif row:
                spans.extend((before, at))
            before = at
    if not header:
        raise ValueError("it has no line of column names")
    return _with_spans(path, "csv", spans, header)


def _tar_samples(path: pathlib.Path) -> tuple[dict[str, Span], ...]:
    samples: dict[str, dict[str, Span]] = {}
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isfile():
                folder, _, file = member.name.rpartition("/")
                stem, _, field = file.partition(".")
                span = Span(member.offset_data, member.size)
                samples.setdefault(f"{folder}/{stem}", {})[field.lower()] = span
    return tuple(samples.values())


class Reader:
    """Reads rows and images, and keeps the files open that it read from.

    Args:
        image_root: folder, or tar file, of the images that rows name; "": where they say.
        columns: of a Parquet file, the ones to read; none: all.
    """

    def __init__(self, image_root: str = "", columns: Iterable[str] = ()):
        self._root = image_root
        self._columns = list(columns) or None
        self._closing = contextlib.ExitStack()
        self._files: dict[pathlib.Path, BinaryIO] = {}
        self._parquet_files: dict[pathlib.Path, Any] = {}
        self._lists: dict[pathlib.Path, list[Any]] = {}
        self._group: tuple[Any, int, list[Row]] | None = None
        self._members: dict[str, Span] | None = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._closing.close()

    def row(self, table: Table, number: int) -> Row:
        """Returns a row by its number.

        Raises:
            RecordError: it is damaged.
        """
        match table.format:
            case "parquet":
                return self._parquet_row(table.path, number)
            case "json":
                if table.path not in self._lists:
                    self._lists[table.path] = _json_list(table.path)
                return _checked(self._lists[table.path][number])
            case "tar":
                return self._sample(table, number)
        assert table.spans is not None
        start, stop = table.spans[table.place(number)].tolist()
        data = self._read(table.path, Span(start, stop - start))
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RecordError(f"it is no UTF-8 ({error})") from error
        if table.format == "jsonl":
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
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return value["bytes"]
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            value = value["path"]
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value:
            raise RecordError(f"{value!r} is neither an image nor the name of one")
        if "://" in value:
            raise RecordError(f"the image {value} is not on this machine: download it first")
        if self._root.endswith(".tar"):
            return self._member(value)
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

    def _parquet_row(self, path: pathlib.Path, number: int) -> Row:
        file = self._parquet_files.get(path)
        if file is None:
            file = self._closing.enter_context(_parquet(path))
            self._parquet_files[path] = file
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        group = int(np.searchsorted(ends, number, side="right"))
        if self._group is None or self._group[:2] != (path, group):
            columns = None
            if self._columns is not None:
                columns = [name for name in self._columns if name in file.schema_arrow.names]
            try:
                rows = file.read_row_group(group, columns=columns).to_pylist()
            except (OSError, ValueError) as error:
                raise TableError(f"the table {path} cannot be read: {error}") from error
            self._group = path, group, rows
        row = self._group[2][number - (ends[group] - sizes[group])]
        return {name: value for name, value in row.items() if value is not None}

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

    def _member(self, name: str) -> bytes:
        root = pathlib.Path(self._root)
        if self._members is None:
            with tarfile.open(root, "r:") as archive:
                self._members = {
                    member.name.removeprefix("./"): Span(member.offset_data, member.size)
                    for member in archive
                    if member.isfile()
                }
        span = self._members.get(name.removeprefix("./"))
        if span is None:
            raise RecordError(f"there is no image {name} in {root}")
        return self._read(root, span)

    def _read(self, path: pathlib.Path, span: Span) -> bytes:
        if span.size > MOST_BYTES:
            raise RecordError(f"{span.size} bytes in one piece are taken for damage")
        file = self._files.get(path)
        if file is None:
            file = self._closing.enter_context(path.open("rb"))
            self._files[path] = file
        file.seek(span.start)
        data = file.read(span.size)
        if len(data) != span.size:
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
    return {str(name): value for name, value in row.items() if value is not None}
