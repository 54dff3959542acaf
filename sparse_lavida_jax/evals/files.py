# SPDX-License-Identifier: Apache-2.0
"""Readers of official benchmark files. An error names what is missing or wrong."""

import csv
import functools
import io
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.mixture import tables
from sparse_lavida_jax.mixture.records import RecordError

T = TypeVar("T")
Names = Sequence[str]
Record = dict[str, Any]
Pixels = image_files.Pixels

MOST_CELL = 2**27  # characters of a cell that holds an image


class EvaluationError(Exception):
    """A benchmark that cannot be run: files are missing or wrong; the message says what to do."""


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a file in UTF-8, without a byte order mark.

    Raises:
        EvaluationError: it is no text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is no text in UTF-8: {error}. Get it again.") from error


def read_json(path: pathlib.Path, kind: type[T] = object) -> T:
    """Returns the value in a JSON file.

    Raises:
        EvaluationError: it is no JSON, or of another kind.
    """
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise EvaluationError(f"{path} is no JSON: {error}. Get it again.") from error
    return of_kind(found, kind, str(path))


def of_kind(value: Any, kind: type[T], where: str) -> T:
    """Returns the value if it is of a kind.

    Raises:
        EvaluationError: it is of another.
    """
    if not isinstance(value, kind):
        raise EvaluationError(
            f"{where} holds {type(value).__name__} where {kind.__name__} belongs: {value!r:.80}. Is"
            " it another benchmark, or another version of this one?"
        )
    return value


def read_lines(path: pathlib.Path) -> list[Any]:
    """Returns the values of a JSON Lines file.

    Raises:
        EvaluationError: a line is no JSON.
    """
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise EvaluationError(f"{path}, line {number}, is no JSON: {error}.") from error
    return found


def read_separated(
    path: pathlib.Path, delimiter: str, fields: Iterable[str]
) -> list[dict[str, str]]:
    """Returns the rows of a table whose first line names the columns.

    Raises:
        EvaluationError: it cannot be read, or a field is no column.
    """
    before = csv.field_size_limit(MOST_CELL)
    try:
        text = io.StringIO(read_text(path), newline="")
        rows = list(csv.DictReader(text, delimiter=delimiter))
    except csv.Error as error:
        raise EvaluationError(f"{path} cannot be read: {error}. Get it again.") from error
    finally:
        csv.field_size_limit(before)
    if rows:
        check_fields(rows[0], fields, str(path))
    return [{str(k): "" if v is None else str(v) for k, v in row.items()} for row in rows]


def check_fields(record: Any, fields: Iterable[str], where: str) -> Record:
    """Returns the record if it has all of the fields.

    Raises:
        EvaluationError: it lacks one.
    """
    if not isinstance(record, Mapping):
        raise EvaluationError(f"{where} is no object with fields, but {type(record).__name__}.")
    if missing := [name for name in fields if name not in record]:
        raise EvaluationError(
            f"{where} has no {', '.join(missing)}; it has {', '.join(map(str, record))}. Is it"
            " another benchmark, or another version of this one?"
        )
    return dict(record)


def records(
    found: list[Any] | dict[str, Any], fields: Sequence[str], path: pathlib.Path
) -> Iterator[tuple[str, Record, str]]:
    """Yields each record with its key, or number, in front and where it stands after it.

    Raises:
        EvaluationError: a record lacks a field.
    """
    named = found if isinstance(found, dict) else {f"{i}": one for i, one in enumerate(found)}
    for key, record in named.items():
        where = f"{path}, {key}," if named is found else f"{path}, entry {key},"
        yield key, check_fields(record, fields, where), where


def read_image(path: pathlib.Path) -> list[Pixels]:
    """Returns the one image of a file as RGB bytes, transparent pixels as lmms-eval reads them.

    Raises:
        ImageError: see `image_files.read`.
    """
    return [image_files.read(path, backdrop=False)]


def image_name(name: Any, where: str) -> str:
    """Returns the name of an image if it stays inside its folder.

    Raises:
        EvaluationError: it is none, or leads out of there.
    """
    path = pathlib.PurePosixPath(of_kind(name, str, where))
    if not name or path.is_absolute() or ".." in path.parts:
        raise EvaluationError(f"{where} names the image {name!r}, which is no file inside it.")
    return name


def read_parquet(
    paths: Iterable[pathlib.Path], fields: Names, others: Names, images: Names
) -> Iterator[tuple[Record, Callable[[Names], list[Pixels]]]]:
    """Yields the rows of Parquet files, each with a function that reads images of it.

    That function takes the names of columns of images, and raises an EvaluationError where the row
    has none in one of them, and an ImageError where one cannot be read.

    Args:
        paths: the files.
        fields: columns that every file must have.
        others: columns to read where a file has them.
        images: columns of images, as Hugging Face writes them (`bytes` and `path`).

    Raises:
        EvaluationError: a file cannot be read, or lacks a column.
    """
    later = tables.Reader(columns=images)
    try:
        for path in paths:
            table = tables.locate(path)
            with tables.Reader(columns=(*fields, *others)) as reader:
                for number in range(table.num_rows):
                    row = check_fields(reader.row(table, number), fields, f"{path}, row {number},")
                    yield row, functools.partial(_images, later, table, number)
    except (tables.TableError, RecordError) as error:
        raise EvaluationError(str(error)) from error


def _images(reader: tables.Reader, table: tables.Table, number: int, fields: Names) -> list[Pixels]:
    found = []
    for field in fields:
        where = f"{table.path}, row {number}, {field}"
        try:
            contents = reader.image(reader.row(table, number).get(field))
        except (tables.TableError, RecordError) as error:
            raise EvaluationError(f"{where}: {error}.") from error
        found.append(image_files.read_bytes(contents, where, backdrop=False))
    return found
