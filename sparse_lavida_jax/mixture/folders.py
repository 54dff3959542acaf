# SPDX-License-Identifier: Apache-2.0
"""Turns a plain folder of images with captions into a mixture, without a mixture file.

These are read, in the folder, its subfolders, and folders that links lead to:

    metadata.jsonl, .csv, .parquet   a row per image, `file_name` and `text`, as in the
                                     `imagefolder` convention of `datasets`
    cat.txt next to cat.png          captions of that image, one per line
    photos.tar                       7.jpg with 7.txt

The columns of a table, not its name, decide what its rows are for (`COLUMNS`): images with
captions, pairs to edit, questions or boxes; one kind per table. Image paths are relative to their
table. Captions that are only in text files are written as a table to the prepared folder. All rows
are looked at, and everything else that lies in the folder is named with the reason why it is not
used.
"""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from sparse_lavida_jax.data import files, image_files, leftovers
from sparse_lavida_jax.mixture import ingest, input_tables
from sparse_lavida_jax.mixture.preparation_report import Found, named
from sparse_lavida_jax.mixture.recipe import Dataset, PrepareError, Recipe
from sparse_lavida_jax.mixture.records import RecordError

MOST_TEXT = 2**20  # bytes of the captions of one image
TABLES = (".jsonl", ".csv", ".parquet", ".tar")
WRITTEN = "tables/captions.jsonl"  # in the prepared folder, from text files next to images
_IMAGE = ("image", "file_name", "image_path", "path")
# The kinds of rows, by the columns that they need: our field, and the names it may have. A row is
# of the first kind whose fields it all has.
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
_NAMING = {*_IMAGE, "source", "source_images", "target", "target_image"}  # columns of images
_ALLOWED = (
    "file_name and text (captions); source, target and instruction (pairs to edit); question and"
    " answer; or file_name, phrase and box"
)
# Why a file is not used.
NO_CAPTION = "an image that no table names and no text file describes"
EMPTY = "an image whose text file is empty"
NO_IMAGE = "a text file without an image of its name"
SECOND_TEXT = "a second text file of one name"
NO_ROWS = "a table without rows"
OTHER_IMAGE = "an image of another format: save it as PNG, JPEG or WebP"
OTHER_TABLE = "a table or archive of another format: save it as .jsonl or .csv, or unpack it"
OTHER = "a file of another kind"
_KINDS_OF_OTHERS = {
    OTHER_IMAGE: ".bmp .gif .tif .tiff .heic .heif .avif .jxl .jp2 .svg .ico .psd .apng .dng .tga",
    OTHER_TABLE: ".json .tsv .xls .xlsx .ods .zip .gz .tgz .bz2 .xz .zst .7z .rar .arrow .feather"
    " .npy .npz .h5 .db .sqlite .yaml .yml",
}
_BY_SUFFIX = {suffix: why for why, named in _KINDS_OF_OTHERS.items() for suffix in named.split()}
SHARED = "several images with one text file: it is the caption of each"
UNKNOWN = "columns that are not read"
DOUBLED = "columns of one meaning: a row uses the first that has a value"


class PlainFolder(NamedTuple):
    """A folder as a mixture.

    Attributes:
        recipe: a dataset for each kind of its tables; batches are drawn in proportion to their
            rows.
        found: by reason, the names of what is not used, and of what is perhaps not used as meant,
            relative to the folder.
    """

    recipe: Recipe
    found: Found


def read(
    folder: pathlib.Path, prepared: pathlib.Path, written: pathlib.Path | None = None
) -> PlainFolder:
    """Reads the contents of a folder, without opening its images.

    Args:
        prepared: the folder of the results; nothing in it is read.
        written: where the table of text files is written; None: in `prepared`.

    Raises:
        PrepareError: the folder has no captions, or a table has unknown columns.
        OSError: the table of text files cannot be written.
    """
    contents = leftovers.walk(folder, prepared)
    found = _Sorter(folder, contents.left_out)
    datasets = found.datasets([path for path in contents.files if _suffix(path) in TABLES])
    rows = found.captions([path for path in contents.files if _suffix(path) not in TABLES])
    if rows:
        table = prepared / WRITTEN if written is None else written
        _write(table, rows)
        datasets.append(_dataset("text_to_image", [table], folder))
    if not datasets:
        there = [f"{why} ({named(names)})" for why, names in found.left_out.items()]
        raise PrepareError(
            f"nothing in {folder} says what its images show: add metadata.jsonl with file_name"
            " and text in every line, or a .txt file next to each image."
            + f" Left out: {'; '.join(there)}."
            * bool(there)
        )
    counts = [sum(map(input_tables.num_rows, input_tables.find(one.patterns))) for one in datasets]
    within = tuple(map(str, contents.roots))
    numbered = [
        dataclasses.replace(one, name=f"{one.kind}-{number}", within=within)
        for number, one in enumerate(datasets, 1)
    ]
    weights = dict.fromkeys([one.group for one in datasets], 0.0)
    for dataset, count in zip(datasets, counts, strict=True):
        weights[dataset.group] += count
    even = dict.fromkeys(weights, 1.0)
    recipe = Recipe(datasets=tuple(numbered), weights=weights, batch_sizes=even)
    return PlainFolder(recipe, Found(found.left_out, found.remarks))


def _suffix(path: pathlib.Path) -> str:
    return path.suffix.lower()


def _dataset(kind: str, paths: list[pathlib.Path], root: pathlib.Path) -> Dataset:
    return Dataset(
        name=kind,
        json_path=tuple(map(str, paths)),
        preprocess_fn=kind,
        columns=COLUMNS[kind] | OPTIONAL.get(kind, {}),
        image_root=str(root),
    )


class _Sorter:
    """Sorts the files of a folder by what they are used for."""

    def __init__(self, folder: pathlib.Path, left_out: dict[str, list[str]]):
        self.folder = folder
        self.left_out = left_out
        self.remarks: dict[str, list[str]] = {}
        self.named: set[str] = set()  # paths of the images in tables

    def _leave(self, reason: str, name: pathlib.Path | str) -> None:
        if isinstance(name, pathlib.Path):
            name = name.relative_to(self.folder).as_posix()
        self.left_out.setdefault(reason, []).append(name)

    # Tables.

    def datasets(self, paths: list[pathlib.Path]) -> list[Dataset]:
        """Returns a dataset for the tables of each folder, format and kind.

        Raises:
            PrepareError: a table has unknown columns.
        """
        alike: dict[tuple[Any, ...], list[pathlib.Path]] = {}
        for path in sorted(paths, key=lambda path: (path.parent, _suffix(path), path)):
            for reason, names in input_tables.unread(path).items():
                for name in names:
                    self._leave(reason, f"{path.relative_to(self.folder).as_posix()}/{name}")
            if input_tables.num_rows(path):
                place = path.parent, _suffix(path), self._kind(path)
                alike.setdefault(place, []).append(path)
            else:
                self._leave(NO_ROWS, path)
        return [_dataset(kind, of, parent) for (parent, _, kind), of in alike.items()]

    def _kind(self, path: pathlib.Path) -> str:
        """Returns the kind that most rows of a table are of.

        Raises:
            PrepareError: no row is of any kind.
        """
        kinds, seen, damaged = collections.Counter[str](), set[str](), list[str]()
        for row in _rows(path, damaged):
            seen |= row.keys()
            kinds.update(itertools.islice(_kinds_of(row), 1))
            for value in (row[name] for name in _NAMING & row.keys()):
                self.named.update(_paths(path.parent, value))
        if not kinds:
            columns = (
                ", ".join(sorted(seen))[: input_tables.SHOWN]
                or f"of no row ({[*damaged, 'all are empty'][0]})"
            )
            raise PrepareError(
                f"{path} has the columns {columns}, which do not say what it is for. It needs"
                f" {_ALLOWED}. If it is something else, move it out of the folder."
            )
        ((kind, _),) = kinds.most_common(1)
        fields, name = COLUMNS[kind] | OPTIONAL.get(kind, {}), path.relative_to(self.folder)
        unknown = seen.difference(ingest.READ, *fields.values())
        doubled = [" or ".join(sorted(seen & {*names})) for names in fields.values()]
        for remark, columns in (
            (UNKNOWN, sorted(unknown)),
            (DOUBLED, [one for one in doubled if " or " in one]),
        ):
            if columns:
                said = f"{', '.join(columns)} of {name.as_posix()}"
                self.remarks.setdefault(remark, []).append(said)
        return kind

    # Text files next to images.

    def captions(self, paths: list[pathlib.Path]) -> list[input_tables.Row]:
        """Returns a row for each image with a text file next to it."""
        rows: list[input_tables.Row] = []
        texts: dict[tuple[pathlib.Path, str], pathlib.Path] = {}
        users: dict[pathlib.Path, list[str]] = {}
        for path in (path for path in paths if _suffix(path) == ".txt"):
            if _stem(path) in texts:
                self._leave(SECOND_TEXT, path)
            texts.setdefault(_stem(path), path)
        for path in (path for path in paths if _suffix(path) != ".txt"):
            name = path.relative_to(self.folder).as_posix()
            if _suffix(path) not in image_files.READ_SUFFIXES:
                self._leave(_BY_SUFFIX.get(_suffix(path), OTHER), name)
            elif text := texts.get(_stem(path)):
                users.setdefault(text, []).append(name)
                try:
                    captions = _lines(text)
                except (OSError, ValueError) as error:
                    why = f"its captions {text.name} cannot be read: {error}"
                    rows.append({"image": name, ingest.UNUSABLE: why})
                    continue
                if captions:
                    rows.append({"image": name, "caption": captions})
                elif _spelling(path) not in self.named:
                    self._leave(EMPTY, name)
            elif _spelling(path) not in self.named:
                self._leave(NO_CAPTION, name)
        for path in texts.values():
            if path not in users:
                self._leave(NO_IMAGE, path)
        shared = [" and ".join(names) for names in users.values() if len(names) > 1]
        self.remarks |= {SHARED: shared} if shared else {}
        return rows


def _rows(path: pathlib.Path, damaged: list[str]) -> Iterator[input_tables.Row]:
    """Yields the rows of a table that can be read; of a Parquet file, without its images.

    Args:
        damaged: gets the reason why a row cannot be read; `prepare` reports it.
    """
    with input_tables.Reader() as reader:
        if _suffix(path) == ".parquet":
            yield from reader.texts(path)
            return
        for number in range(input_tables.num_rows(path)):
            try:
                yield reader.row(path, number)
            except RecordError as error:
                damaged.append(f"row {number + 1}: {error}")


def _kinds_of(row: input_tables.Row) -> Iterator[str]:
    for kind, fields in COLUMNS.items():
        if all(row.keys() & {*names} for names in fields.values()):
            yield kind


def _paths(folder: pathlib.Path, value: Any) -> Iterator[str]:
    """Yields the paths that a cell may name, without looking whether there is such a file."""
    for one in ingest.listed(value):
        one = one.get("path") if isinstance(one, dict) else one
        if isinstance(one, str) and "\0" not in one:
            yield _spelling(folder / one.replace("\\", "/"))


def _spelling(path: pathlib.Path) -> str:
    """Returns a path in one of the forms in which different systems write it."""
    return files.composed(os.path.normpath(path)).casefold()


def _stem(path: pathlib.Path) -> tuple[pathlib.Path, str]:
    return path.parent, files.composed(path.stem)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        lines = files.lines(files.read_text(path, MOST_TEXT))
    except UnicodeDecodeError as error:
        raise ValueError("it is not text in UTF-8: save it in that encoding") from error
    return [line.strip() for line in lines if line.strip()]


def _write(path: pathlib.Path, rows: list[input_tables.Row]) -> None:
    """Writes a table, unless it is unchanged: a new file time would mean that rows changed."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    contents = text.encode(errors="backslashreplace")  # of half characters, as JSON writes them
    try:
        is_there = files.read_bytes(path, len(contents)) == contents
    except OSError:
        is_there = False
    if not is_there:
        files.write_text(path, contents.decode())
