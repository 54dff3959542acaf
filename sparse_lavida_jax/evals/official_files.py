# SPDX-License-Identifier: Apache-2.0
"""Readers of official benchmark files. Errors say what is missing or wrong."""

import csv
import functools
import io
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sparse_lavida_jax.data import files
from sparse_lavida_jax.mixture import input_tables
from sparse_lavida_jax.mixture.records import RecordError

Names = Sequence[str]
Record = dict[str, Any]

MOST_BYTES = 2**31  # of a file: some have images in their cells
MOST_CELL = 2**27  # characters in a cell with an image


class EvaluationError(Exception):
    """A benchmark that cannot be run: files are missing or wrong; the message says what to do."""


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a file in UTF-8, without a byte order mark.

    Raises:
        EvaluationError: it is not text.
    """
    try:
        return files.read_text(path, MOST_BYTES)
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is no text in UTF-8: {error}. Get it again.") from error


def read(path: pathlib.Path) -> Any:
    """Returns the contents of a file: JSON, JSON Lines, CSV or TSV, according to its suffix.

    Raises:
        EvaluationError: it is not in that format.
    """
    text = read_text(path)
    try:
        match path.suffix:
            case ".jsonl":
                return list(_json_lines(text))
            case ".csv" | ".tsv":
                return _rows(text, "\t" if path.suffix == ".tsv" else ",")
            case _:
                return files.parse_json(text)
    except (ValueError, csv.Error) as error:
        raise EvaluationError(
            f"{path} is no {path.suffix[1:].upper()}: {error}. Get it again."
        ) from error


def _json_lines(text: str) -> Iterator[Any]:
    # Not `splitlines`: JSON strings may contain other line breaks, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield files.parse_json(line)
            except json.JSONDecodeError as error:
                where = f"line {number}, column {error.colno}"
                raise ValueError(f"{error.msg} in {where}") from error


def _rows(text: str, delimiter: str) -> list[dict[str, str]]:
    limit = csv.field_size_limit(MOST_CELL)  # for the whole process
    try:
        lines = io.StringIO(text, newline="")
        return list(csv.DictReader(lines, restval="", delimiter=delimiter))
    finally:
        csv.field_size_limit(limit)


def records(
    path: pathlib.Path,
    fields: Names,
    *,
    inside: str = "",
    load: Callable[[pathlib.Path], Any] = read,
) -> Iterator[tuple[str, Record, str]]:
    """Yields each record of a file, preceded by its key or number, and followed by its location.

    Args:
        fields: what every record must have.
        inside: the field of the file that contains the records; "": the file contains only them.
        load: reads the file.

    Raises:
        EvaluationError: the file cannot be read, or a record lacks a field.
    """
    found = load(path)
    if inside:
        found = check_fields(found, (inside,), str(path))[inside]
    if not isinstance(found, list | dict):
        raise EvaluationError(f"{path} holds {found!r:.80}, where records belong.")
    named = found if isinstance(found, dict) else {f"{i}": one for i, one in enumerate(found)}
    for key, record in named.items():
        where = f"{path}, {key}," if named is found else f"{path}, entry {key},"
        yield key, check_fields(record, fields, where), where


def check_fields(record: Any, fields: Iterable[str], where: str) -> Record:
    """Returns the record, if it has all of the fields.

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


def image_name(name: Any, where: str) -> str:
    """Returns the name of an image if it stays inside its folder.

    Raises:
        EvaluationError: it is not a name, or leads out of the folder.
    """
    path = pathlib.PurePosixPath(name if isinstance(name, str) else "")
    if path == pathlib.PurePosixPath() or path.is_absolute() or ".." in path.parts:
        raise EvaluationError(
            f"{where} names the image {name!r}, which is no file inside its folder."
            " Get the file again."
        )
    return name


def read_parquet(
    paths: Iterable[pathlib.Path], fields: Names, others: Names, images: Names
) -> Iterator[tuple[Record, dict[str, Callable[[], bytes]]]]:
    """Yields the rows of Parquet files, each with its images by column.

    An image is a function that returns its encoded bytes or raises EvaluationError if it is absent.

    Args:
        paths: the files.
        fields: columns that every row must have.
        others: columns to read if a row has them.
        images: image columns in Hugging Face's format (`bytes` and `path`).

    Raises:
        EvaluationError: a file cannot be read, or lacks a column.
    """
    try:
        for path in paths:
            with input_tables.Reader(columns=(*fields, *others, *images)) as reader:
                for number in range(input_tables.num_rows(path)):
                    where = f"{path}, row {number},"
                    row = check_fields(reader.row(path, number), fields, where)
                    shown = {
                        name: functools.partial(_image, row.pop(name), f"{where} {name}")
                        for name in images
                        if name in row
                    }
                    yield row, shown
    except input_tables.TableError as error:
        raise EvaluationError(str(error)) from error


def _image(value: Any, where: str) -> bytes:
    try:
        return input_tables.Reader().image(value)
    except RecordError as error:
        raise EvaluationError(f"{where} holds no image: {error}. Get the file again.") from error
