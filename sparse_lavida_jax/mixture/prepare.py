# SPDX-License-Identifier: Apache-2.0
"""Turns the tables of a mixture file into shards of records with image codes.

The prepared folder:

    <dataset>/00003-of-00010.arrayrecord  records of some consecutive rows, without the bad ones
    <dataset>/00003-of-00010.json         outcome for those rows; if it exists, the shard is
                                          complete
    mixture.json                          the index for training; written last
    report.md                             names every bad record

A shard is one task. It depends only on its rows, the settings and the image tokenizer, so it has
the same bytes whichever process makes it; an existing shard is not made again. Tasks run in this
process, in several, or on many machines (`workers.py`).
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data import files, markdown
from sparse_lavida_jax.mixture import ingest, recipe, records, tables, workers
from sparse_lavida_jax.mixture.ingest import Draft, LeftOut
from sparse_lavida_jax.mixture.recipe import Dataset, PrepareError, Recipe

FORMAT = "sparse-lavida-data/1"
INDEX = "mixture.json"
READABLE = "report.md"
LONGEST_REASON = 300  # characters of what is wrong with a row
NAMED = 3  # rows or images that are listed in a message
MANY_ROWS = 2**16  # of a table, checked at a time
TOKENIZER, SHEET = "tokenizer.json", "reconstructions.png"  # also written for a plain folder
# Files that preparations write; older ones wrote "report.json".
LEFT = {INDEX, READABLE, TOKENIZER, SHEET, "report.json", ".lock"}


@runtime_checkable
class ImageEncoder(Protocol):
    """The image tokenizer: pixels to codes.

    Attributes:
        side: of its input images, in pixels.
        factor: pixels per side of one code.
        codebook_size: codes are below this.
        digest: identifies the tokenizer.
    """

    side: int
    factor: int
    codebook_size: int

    @property
    def digest(self) -> str: ...

    def encode(self, pixels: UInt8[np.ndarray, "n side side 3"]) -> Int[np.ndarray, "n y x"]: ...


LoadEncoder = Callable[[], ImageEncoder]  # makes the tokenizer in the process that needs it


@dataclasses.dataclass(frozen=True)
class Job:
    """What all shards of a preparation share; every worker has a copy.

    Attributes:
        folder: the prepared folder.
        to: sizes, crops and seed.
        batch: number of images that are encoded together.
        load_encoder: makes the image tokenizer.
    """

    folder: pathlib.Path
    to: ingest.Settings
    batch: int
    load_encoder: LoadEncoder


@dataclasses.dataclass(frozen=True)
class Shard:
    """Rows of a dataset that become one shard.

    Attributes:
        dataset: the dataset of the rows.
        stem: path in the folder, without a suffix.
        tables: the tables of the rows.
        rows: table, row and copy of each.
        fingerprint: of everything that affects the result.
    """

    dataset: Dataset
    stem: str
    tables: tuple[pathlib.Path, ...]
    rows: Int[np.ndarray, "r 3"]
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome for the rows of a shard, as stored in its .json."""

    fingerprint: str
    rows: int
    records: int
    num_bytes: int
    sha256: str
    left_out: dict[str, int]
    bad: list[list[str]]  # name of the row, what is wrong


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics of a finished preparation."""

    shards: int
    made: int
    records: int
    left_out: int
    bad: int


def prepare(
    path: pathlib.Path | str | Recipe,
    folder: pathlib.Path | str,
    settings: config.Config,
    load_encoder: LoadEncoder,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Makes the missing shards of a mixture file.

    Args:
        path: the mixture file (`recipe.read`), or its contents.
        on_progress: called with the number of finished shards, and of all.

    Raises:
        RecipeError: the mixture file is wrong.
        PrepareError: a table cannot be read, too many records are bad, or a worker died. Finished
            shards stay, and the report says what was found.
        OSError: the folder cannot be written to: the disk is full, for example.
    """
    mixture = path if isinstance(path, Recipe) else recipe.read(pathlib.Path(path))
    folder, wanted, encoder = pathlib.Path(folder), settings.prepare, load_encoder()
    to = ingest.Settings(encoder.side, encoder.factor, wanted.crops, settings.seed)
    job = Job(folder, to, wanted.encode_batch, load_encoder)
    shards = [
        shard
        for dataset in mixture.datasets
        for shard in _shards(dataset, wanted.shard_rows, to, encoder.digest)
    ]
    with _only_one(folder):
        done = {s.stem: made for s in shards if (made := finished(folder, s)) is not None}
        try:
            left = _make_all(job, encoder, shards, done, wanted, on_progress)
        finally:
            _write_report(folder, shards, done)
        files.write_json(folder / INDEX, _index(mixture, encoder, shards, done))
    found = done.values()
    kept, bad = sum(one.records for one in found), sum(len(one.bad) for one in found)
    left_out = sum(sum(one.left_out.values()) for one in found)
    return Summary(len(shards), left, kept, left_out, bad)


# ---------------------------------------------------------------------------------------------
# Planning the shards.


def _shards(dataset: Dataset, size: int, to: ingest.Settings, digest: str) -> Iterator[Shard]:
    """Reads the tables of a dataset and divides their rows into shards."""
    paths = tables.find(dataset.json_path)
    counts = [tables.num_rows(path) for path in paths]
    chosen = dataset.chosen(sum(counts))
    if not len(chosen):
        raise PrepareError(
            f"the dataset {dataset.name} has no rows: {dataset.json_path} is empty, or"
            f" sampling_strategy={dataset.sampling_strategy} takes none."
        )
    columns: Any = dataset.columns
    tables.check_columns(paths, columns.values() if isinstance(columns, dict) else columns)
    ends = np.cumsum(counts)
    which = np.searchsorted(ends, chosen, side="right")
    # The strategy may repeat the rows, always in the same order.
    copies = np.arange(len(chosen)) // len(np.unique(chosen))
    rows = np.stack([which, chosen - (ends - counts)[which], copies], axis=1).astype(np.int64)
    described = dataclasses.asdict(dataset)
    # Fields that do not change the contents of rows: how they are grouped, and where files are.
    for name in ("length_group", "sampling_strategy", "json_path", "within"):
        del described[name]
    described["image_root"] = pathlib.Path(dataset.image_root).name
    common = json.dumps(
        [records.VERSION, records.WRITER_OPTIONS, described, dataclasses.asdict(to), digest]
    )
    count = -(-len(rows) // size)
    for i in range(count):
        part = rows[i * size : (i + 1) * size]
        used, part[:, 0] = np.unique(part[:, 0], return_inverse=True)
        held = tuple(paths[j] for j in used)
        mark = hashlib.sha256(common.encode())
        for path in held:
            about = path.stat()
            mark.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
        mark.update(part.tobytes())
        stem = f"{dataset.name}/{i:05d}-of-{count:05d}"
        yield Shard(dataset, stem, held, part, mark.hexdigest())


def finished(folder: pathlib.Path, shard: Shard) -> Outcome | None:
    """Returns the outcome of a shard if it exists and was made from the same inputs."""
    try:
        outcome = Outcome(**files.read_json(folder / f"{shard.stem}.json"))
        path = folder / f"{shard.stem}{records.SUFFIX}"
        size = path.stat().st_size if outcome.records else 0
    except (OSError, ValueError, TypeError):
        return None
    whole = outcome.fingerprint == shard.fingerprint and outcome.num_bytes == size
    return outcome if whole else None


# ---------------------------------------------------------------------------------------------
# One shard.


def drafts(mixture: Recipe, to: ingest.Settings, max_bad_fraction: float = 1.0) -> Iterator[Draft]:
    """Yields drafts of the rows of a mixture, with the images to encode; skips bad rows.

    Raises:
        PrepareError: a table cannot be read, or has no rows, or too many bad ones.
    """
    for dataset in mixture.datasets:
        rows, bad = 0, []
        for shard in _shards(dataset, MANY_ROWS, to, digest=""):
            yield from _drafts(to, shard, collections.Counter(), bad)
            rows += len(shard.rows)
        first = "; ".join(f"{name}: {what.rstrip('.')}" for name, what in bad[:NAMED])
        _check_bad(dataset.name, len(bad), rows, max_bad_fraction, first)


def make(job: Job, encoder: ImageEncoder, shard: Shard) -> Outcome:
    """Makes a shard and writes it, completely or not at all.

    Raises:
        TableError: one of its tables can no longer be read.
        OSError: it cannot be written.
    """
    path = job.folder / f"{shard.stem}{records.SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Otherwise the old outcome would be taken for that of the new shard.
    (job.folder / f"{shard.stem}.json").unlink(missing_ok=True)
    left_out: collections.Counter[str] = collections.Counter()
    bad: list[list[str]] = []
    made = _encoded(_drafts(job.to, shard, left_out, bad), encoder, job.batch)
    if (first := next(made, None)) is None:
        path.unlink(missing_ok=True)
        written = 0, 0, ""
    else:
        written = records.write_shard(path, itertools.chain([first], made))
    rules = dict(sorted(left_out.items()))
    outcome = Outcome(shard.fingerprint, len(shard.rows), *written, rules, bad)
    files.write_json(job.folder / f"{shard.stem}.json", dataclasses.asdict(outcome))
    return outcome


def _drafts(to: ingest.Settings, shard: Shard, left_out, bad) -> Iterator[Draft]:
    dataset = shard.dataset
    columns = dataset.columns if isinstance(dataset.columns, tuple) else ()
    with tables.Reader(dataset.image_root, columns, dataset.within) as reader:
        for which, number, copy in shard.rows.tolist():
            path = shard.tables[which]
            name = f"{path.name}:{number + 1}"
            try:
                row = reader.row(path, number)
                made = ingest.draft(row, name, number, copy, dataset, reader, to)
            except LeftOut as rule:
                left_out[str(rule)] += 1
            # Besides `RecordError` and `ImageError`, whatever hostile values make Python raise.
            except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
                bad.append([name, _printable(error)])
            else:
                yield made


def _printable(error: Exception) -> str:
    """Returns the start of a message, without half characters, which no file can hold."""
    told = str(error)
    told = told if len(told) <= LONGEST_REASON else f"{told[:LONGEST_REASON]}..."
    return told.encode(errors="backslashreplace").decode()


def _encoded(
    drafts: Iterable[Draft], encoder: ImageEncoder, batch: int
) -> Iterator[records.Record]:
    """Yields records in order, encoding `batch` images at a time."""
    drafts = iter(drafts)
    while held := [*itertools.islice(drafts, batch)]:
        squares = [square for one in held for square in (*one.targets, *one.sources)]
        # Full batches: the tokenizer is compiled for one size.
        squares += [np.zeros_like(squares[0])] * (-len(squares) % batch) if squares else []
        codes: list[np.ndarray] = []
        for start in range(0, len(squares), batch):
            codes += [*encoder.encode(np.stack(squares[start : start + batch])).astype(np.int32)]
        in_order = iter(codes)
        for one in held:
            yield one.finished(in_order)


# ---------------------------------------------------------------------------------------------
# Many shards.


def _make_all(
    job: Job,
    encoder: ImageEncoder,
    shards: list[Shard],
    done: dict[str, Outcome],
    settings: config.Prepare,
    on_progress: Callable[[int, int], None],
) -> int:
    """Makes the missing shards, adds their outcomes to `done`, and returns how many there were.

    Raises:
        PrepareError: too many records of a dataset are bad, or a worker died.
    """
    rows, bad = collections.Counter[str](), collections.Counter[str]()
    for shard in shards:
        rows[shard.dataset.name] += len(shard.rows)
        bad[shard.dataset.name] += len(done[shard.stem].bad) if shard.stem in done else 0

    on_progress(len(done), len(shards))
    refused = {name for name in bad if bad[name] > settings.max_bad_fraction * rows[name]}
    for shard in shards:  # what was wrong with their rows may be repaired by now
        name, stem = shard.dataset.name, shard.stem
        if name in refused and stem in done and done[stem].bad:
            bad[name] -= len(done.pop(stem).bad)
    left = [shard for shard in shards if shard.stem not in done]
    with contextlib.closing(_outcomes(job, encoder, left, settings)) as made:
        for shard, outcome in made:
            done[shard.stem], name = outcome, shard.dataset.name
            on_progress(len(done), len(shards))
            bad[name] += len(outcome.bad)
            named = f"{job.folder / READABLE} names them"
            _check_bad(name, bad[name], rows[name], settings.max_bad_fraction, named)
    return len(left)


def _check_bad(name: str, bad: int, rows: int, most: float, named: str) -> None:
    """Refuses a dataset of which a larger share than `most` is bad; `named` says which rows."""
    if bad > (allowed := int(most * rows)):
        raise PrepareError(
            f"{bad} of {rows} records of {name} are bad, and prepare.max_bad_fraction allows"
            f" {allowed}: {named}. Repair them, or allow more, and run it again; finished shards"
            " are kept."
        )


def _outcomes(
    job: Job, encoder: ImageEncoder, shards: list[Shard], settings: config.Prepare
) -> Generator[tuple[Shard, Outcome], None, None]:
    """Yields shards and their outcomes as they are finished, in any order."""
    if settings.engine == "processes" and not settings.workers:
        for shard in shards:
            yield shard, make(job, encoder, shard)
    elif shards:
        elsewhere = dataclasses.replace(job, folder=job.folder.resolve())
        load = functools.partial(_maker, elsewhere, shards)
        over = workers.ray if settings.engine == "ray" else workers.processes
        for row in over(load, len(shards), settings.workers):
            yield shards[row["number"]], Outcome(**json.loads(row["outcome"]))


def _maker(job: Job, shards: list[Shard]) -> Callable[[int], dict[str, Any]]:
    """Returns a function that makes a shard by its number; called in a worker process."""
    encoder = job.load_encoder()

    def made(number: int) -> dict[str, Any]:
        outcome = make(job, encoder, shards[number])
        return {"number": number, "outcome": json.dumps(dataclasses.asdict(outcome))}

    return made


def check_folder(folder: pathlib.Path) -> None:
    """Checks that a folder is free or already a prepared one; creates nothing.

    Raises:
        PrepareError: it is a file, or holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise PrepareError(f"{folder} is a file: name another folder for the shards.")
    there = {p.name for p in folder.glob("*") if p.is_file() and p.suffix != files.UNFINISHED}
    if there - LEFT:
        raise PrepareError(f"{folder} holds something else: name another folder for the shards.")


@contextlib.contextmanager
def _only_one(folder: pathlib.Path) -> Iterator[None]:
    """Keeps a second preparation out of the folder; a process that dies releases its lock."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = files.lock(folder / ".lock")
    except files.LockedError:
        raise PrepareError(
            f"{folder} is being prepared by another process: wait for it, or stop it."
        ) from None
    try:
        files.remove_unfinished(folder)
        yield
    finally:
        files.remove_unfinished(folder)
        held.release()


# ---------------------------------------------------------------------------------------------
# The report, and the index for training.


def _write_report(folder: pathlib.Path, shards: list[Shard], done: dict[str, Outcome]) -> None:
    rows, bad = [], []
    for name, grouped in itertools.groupby(shards, lambda shard: shard.dataset.name):
        of = [*grouped]
        there = [done[shard.stem] for shard in of if shard.stem in done]
        left_out = sum((collections.Counter(one.left_out) for one in there), collections.Counter())
        rules = ", ".join(f"{rule}: {count}" for rule, count in sorted(left_out.items()))
        named = [f"- {row}: {' '.join(why.split())}" for one in there for row, why in one.bad]
        num_rows = sum(len(shard.rows) for shard in of)
        num_records = sum(outcome.records for outcome in there)
        shown = f"{len(there)} of {len(of)}"
        rows.append((name, shown, num_rows, num_records, rules or "0", len(named)))
        bad += ["", f"## Bad records of {name}", "", *named] if named else []
    table = markdown.table(("dataset", "shards", "rows", "records", "left out", "bad"), rows)
    files.write_text(folder / READABLE, "\n".join(["# Prepared data", "", table, *bad]) + "\n")


def _index(
    mixture: Recipe, encoder: ImageEncoder, shards: list[Shard], done: dict[str, Outcome]
) -> dict[str, Any]:
    """Returns the index for training."""
    written = {dataset.name: [] for dataset in mixture.datasets}
    for shard in shards:
        one = done[shard.stem]
        about = {"records": one.records, "bytes": one.num_bytes, "sha256": one.sha256}
        file = {"file": f"{shard.stem}{records.SUFFIX}"} | about
        written[shard.dataset.name] += [file] if one.records else []
    return {
        "format": FORMAT,
        "tokenizer": {
            name: getattr(encoder, name) for name in ("digest", "side", "factor", "codebook_size")
        },
        "weights": mixture.weights,
        "batch_sizes": mixture.batch_sizes,
        "datasets": [
            {"name": one.name, "kind": one.kind, "group": one.group, "shards": written[one.name]}
            for one in mixture.datasets
        ],
    }
