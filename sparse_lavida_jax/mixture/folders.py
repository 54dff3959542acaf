# SPDX-License-Identifier: Apache-2.0
"""Turns a plain folder of images with captions into a mixture, without a mixture file.

These are read, in the folder and in its subfolders:

    metadata.jsonl, .csv, .parquet   a row per image, `file_name` and `text`, as in the
                                     `imagefolder` convention of `datasets`
    cat.txt next to cat.png          captions of that image, one per line
    photos.tar                       7.jpg with 7.txt

The columns of a table, not its name, decide what its rows are for (`COLUMNS`): images with
captions, pairs to edit, questions or boxes; one kind per table. Image paths are relative to their
table. Captions that are only in text files are written as a table to the prepared folder.
"""

import contextlib
import dataclasses
import glob
import itertools
import json
import pathlib
from typing import NamedTuple

from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.mixture import ingest, tables
from sparse_lavida_jax.mixture.recipe import Dataset, PrepareError, Recipe
from sparse_lavida_jax.mixture.records import RecordError

MOST_TEXT = 2**20  # bytes of the captions of one image
TABLES = (".jsonl", ".csv", ".parquet", ".tar")
WRITTEN = "tables/captions.jsonl"  # in the prepared folder, from text files next to images
PEEKED = 8  # rows of a table that are read to find its columns: a row lacks its empty cells
_IMAGE = ("image", "file_name", "image_path", "path")
# The kinds of tables, by the columns that they need: our field, and the names it may have. A table
# is of the first kind whose fields are all present.
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "edit": {
        "source_images": ("source", "source_images"),
        "target_image": ("target", "target_image"),
        "instruction": ("instruction",),
    },
    "understanding": {"question": ("question",), "answer": ("answer",)},
    "grounding": {"image": _IMAGE, "label": ("phrase", "label"), "box": ("box",)},
    "text_to_image": {"image": _IMAGE, "caption": ("caption", "captions", "text", "prompt")},
}
OPTIONAL = {"understanding": {"image": _IMAGE}}
_ALLOWED = (
    "file_name and text (captions); source, target and instruction (pairs to edit); question and"
    " answer; or file_name, phrase and box"
)


class PlainFolder(NamedTuple):
    """A folder as a mixture.

    Attributes:
        recipe: a dataset for each of its tables; batches are drawn in proportion to their rows.
        left_out: images without a caption, relative to the folder; only if captions are in text
            files.
    """

    recipe: Recipe
    left_out: list[str]


def read(folder: pathlib.Path, prepared: pathlib.Path) -> PlainFolder:
    """Reads the contents of a folder, without opening its images.

    Args:
        prepared: folder to which the table of text files is written; nothing in it is read.

    Raises:
        PrepareError: the folder has no captions, or a table has unknown columns.
        OSError: the table of text files cannot be written.
    """
    inside = [path for path in sorted(folder.rglob("*")) if prepared not in path.parents]
    datasets: list[Dataset] = []
    of_tables = [path for path in inside if path.suffix in TABLES and path.is_file()]
    for path in of_tables:
        try:
            tables.inside(folder, str(path.relative_to(folder)))
        except ValueError:
            raise PrepareError(
                f"{path} is a link to a file outside of {folder}: copy it, or leave it out."
            ) from None
    # By folder and format.
    for (parent, _), alike in itertools.groupby(sorted(of_tables, key=_place), key=_place):
        datasets += _datasets(parent, [path for path in alike if tables.num_rows(path)])
    said, left_out = _captions(folder, inside)
    if said:
        written = prepared / WRITTEN
        _write(written, said)
        columns = {"image": "image", "caption": "caption"}
        datasets.append(_dataset("text_to_image", glob.escape(str(written)), folder, columns))
    if not datasets:
        raise PrepareError(
            f"nothing in {folder} says what its images show: add metadata.jsonl with file_name"
            " and text in every line, or a .txt file next to each image."
        )
    rows = [sum(map(tables.num_rows, tables.find(one.json_path))) for one in datasets]
    numbered = [
        dataclasses.replace(one, name=f"{one.kind}-{number}", within=str(folder))
        for number, one in enumerate(datasets, 1)
    ]
    weights = dict.fromkeys([one.group for one in datasets], 0.0)
    for dataset, count in zip(datasets, rows, strict=True):
        weights[dataset.group] += count
    even = dict.fromkeys(weights, 1.0)
    recipe = Recipe(datasets=tuple(numbered), weights=weights, batch_sizes=even)
    return PlainFolder(recipe, left_out)


# ---------------------------------------------------------------------------------------------
# Tables.


def _place(path: pathlib.Path) -> tuple[pathlib.Path, str]:
    return path.parent, path.suffix


def _datasets(folder: pathlib.Path, paths: list[pathlib.Path]) -> list[Dataset]:
    """Returns the datasets of tables of one format in one folder: a single one, if all are alike.

    Raises:
        PrepareError: a table has unknown columns.
    """
    if not paths:
        return []
    understood = [_understood(path) for path in paths]
    kind, columns = understood[0]
    if all(one == understood[0] for one in understood[1:]) and len(paths) > 1:
        pattern = f"{glob.escape(str(folder))}/*{paths[0].suffix}"
        return [_dataset(kind, pattern, folder, columns)]
    return [
        _dataset(kind, glob.escape(str(path)), folder, columns)
        for path, (kind, columns) in zip(paths, understood, strict=True)
    ]


def _dataset(kind: str, pattern: str, root: pathlib.Path, columns: dict[str, str]) -> Dataset:
    return Dataset(
        name=kind, json_path=pattern, preprocess_fn=kind, columns=columns, image_root=str(root)
    )


def _understood(path: pathlib.Path) -> tuple[str, dict[str, str]]:
    """Returns the kind of a table, and the mapping from our fields to its columns.

    Raises:
        PrepareError: its columns fit no kind.
    """
    seen: set[str] = set()
    with tables.Reader() as reader:
        for number in range(min(PEEKED, tables.num_rows(path))):
            with contextlib.suppress(RecordError):  # a damaged row is reported later
                seen |= reader.row(path, number).keys()
    for kind, fields in COLUMNS.items():
        names = fields | OPTIONAL.get(kind, {})
        found = {
            field: next(name for name in names[field] if name in seen)
            for field in names
            if seen.intersection(names[field])
        }
        if fields.keys() <= found.keys():
            return kind, found
    raise PrepareError(
        f"{path} has the columns"
        f" {', '.join(sorted(seen))[: tables.SHOWN] or 'of no row that can be read'}, which do not"
        f" say what it is for. It needs {_ALLOWED}."
    )


# ---------------------------------------------------------------------------------------------
# Text files next to images.


def _captions(
    folder: pathlib.Path, inside: list[pathlib.Path]
) -> tuple[list[tables.Row], list[str]]:
    """Returns a row for each image with a text file next to it, and the images without one."""
    said: list[tables.Row] = []
    silent: list[str] = []
    for path in inside:
        if path.suffix.lower() in image_files.SUFFIXES:
            name = path.relative_to(folder).as_posix()
            text = path.with_suffix(".txt")
            try:
                captions = _lines(tables.inside(folder, str(text.relative_to(folder))))
            except FileNotFoundError:
                captions = []
            except (OSError, ValueError) as error:
                why = f"its captions {text.name} cannot be read: {error}"
                said.append({"image": name, ingest.UNUSABLE: why})
                continue
            if captions:
                said.append({"image": name, "caption": captions})
            else:
                silent.append(name)
    return said, silent if said else []


def _lines(path: pathlib.Path) -> list[str]:
    try:
        lines = files.lines(files.read_text(path, MOST_TEXT))
    except UnicodeDecodeError as error:
        raise ValueError("no text in UTF-8: save it in that encoding") from error
    return [line.strip() for line in lines if line.strip()]


def _write(path: pathlib.Path, rows: list[tables.Row]) -> None:
    """Writes a table, unless it is unchanged: a new file time would mean that rows changed."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    contents = text.encode(errors="backslashreplace")  # of half characters, as JSON writes them
    try:
        is_there = files.read_bytes(path, len(contents)) == contents
    except OSError:
        is_there = False
    if not is_there:
        files.write_text(path, contents.decode())
