# SPDX-License-Identifier: Apache-2.0
"""Turns the tables of a mixture file into shards of records with image codes.

The prepared folder:

    <dataset>/00003-of-00010.arrayrecord  records of some consecutive rows, without the bad ones
    <dataset>/00003-of-00010.json         outcome for those rows; if it exists, the shard is
                                          complete
    mixture.json                          the index for training; written last
    report.md                             what was used, what was left out, and every bad record

A shard is one task. It depends only on its rows, the settings and the image tokenizer, so it has
the same bytes whichever process makes it; an existing shard is not made again. Tasks run in this
process, in several, or on many machines (`workers.py`).
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data import files
from sparse_lavida_jax.mixture import (
    folders,
    ingest,
    preparation_report,
    recipe,
    records,
    shards,
    workers,
)
from sparse_lavida_jax.mixture.ingest import Draft, LeftOut
from sparse_lavida_jax.mixture.input_tables import Reader
from sparse_lavida_jax.mixture.preparation_report import Found, Summary
from sparse_lavida_jax.mixture.recipe import PrepareError, Recipe
from sparse_lavida_jax.mixture.shards import Outcome, Shard

FORMAT = "sparse-lavida-data/1"
INDEX = "mixture.json"
LONGEST_REASON = 300  # characters of what is wrong with a row
MANY_ROWS = 2**16  # of a table, checked at a time
TOKENIZER, SHEET = "tokenizer.json", "reconstructions.png"  # also written for a plain folder
LOCK = ".lock"
LEFT = {INDEX, preparation_report.READABLE, TOKENIZER, SHEET, LOCK}  # files that preparations write


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
OnProgress = Callable[[int, int], None]  # from the number of finished shards, and of all
NOTHING = Found({}, {})  # besides the rows of tables


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


def prepare(
    path: pathlib.Path | str | Recipe,
    folder: pathlib.Path | str,
    settings: config.Config,
    load_encoder: LoadEncoder,
    on_progress: OnProgress = lambda done, total: None,
) -> Summary:
    """Does what `fill` does, in a folder that it reserves, for a mixture file or its contents.

    Raises:
        RecipeError: the mixture file is wrong.
        PrepareError, OSError: see `fill` and `reserved`.
    """
    mixture = path if isinstance(path, Recipe) else recipe.read(pathlib.Path(path))
    with reserved(folder := pathlib.Path(folder)):
        return fill(mixture, folder, settings, load_encoder, on_progress)


def fill(
    mixture: Recipe,
    folder: pathlib.Path,
    settings: config.Config,
    load_encoder: LoadEncoder,
    on_progress: OnProgress = lambda done, total: None,
    found: Found = NOTHING,
    sentences: Sequence[str] = (),
) -> Summary:
    """Makes the missing shards of a mixture in a reserved folder.

    Args:
        on_progress: called with the number of finished shards, and of all.
        found: what else lies in the folder that the mixture was made from.
        sentences: of the report, on what was decided before.

    Raises:
        PrepareError: a table cannot be read, too many records are bad, or a worker died. Finished
            shards stay, and the report says what was found.
        OSError: the folder cannot be written to: the disk is full, for example.
    """
    wanted, encoder = settings.prepare, load_encoder()
    to = ingest.Settings(encoder.side, encoder.factor, wanted.crops, settings.seed)
    job = Job(folder, to, wanted.encode_batch, load_encoder)
    planned = [
        shard
        for dataset in mixture.datasets
        for shard in shards.plan(dataset, wanted.shard_rows, to, encoder.digest)
    ]
    done = {s.stem: made for s in planned if (made := shards.finished(folder, s)) is not None}
    try:
        left = _make_all(job, encoder, planned, done, wanted, on_progress)
    finally:
        told = preparation_report.as_markdown(planned, done, found, sentences)
        files.write_text(folder / preparation_report.READABLE, told)
    files.write_json(folder / INDEX, _index(mixture, encoder, planned, done))
    return preparation_report.summary(planned, left, done, found)


def trial(
    mixture: Recipe, settings: config.Config, found: Found, on_progress: OnProgress
) -> Summary:
    """Reads all that a preparation would, and writes nothing.

    Raises:
        PrepareError: a table cannot be read, or has no rows.
    """
    wanted = settings.prepare
    to = ingest.Settings(settings.vq.factor, settings.vq.factor, wanted.crops, settings.seed)
    planned = [
        shard
        for dataset in mixture.datasets
        for shard in shards.plan(dataset, wanted.shard_rows, to, digest="")
    ]
    done: dict[str, Outcome] = {}
    for shard in planned:
        on_progress(len(done), len(planned))
        left_out, bad = collections.Counter[str](), list[list[str]]()
        count = sum(1 for _ in _drafts(to, shard, left_out, bad))
        done[shard.stem] = Outcome("", len(shard.rows), count, 0, "", dict(left_out), bad)
    return preparation_report.summary(planned, 0, done, found)


# ---------------------------------------------------------------------------------------------
# One shard.


def drafts(mixture: Recipe, to: ingest.Settings, max_bad_fraction: float = 1.0) -> Iterator[Draft]:
    """Yields drafts of the rows of a mixture, with the images to encode; skips bad rows.

    Raises:
        PrepareError: a table cannot be read, or has no rows, or too many bad ones.
    """
    for dataset in mixture.datasets:
        rows, bad = 0, []
        for shard in shards.plan(dataset, MANY_ROWS, to, digest=""):
            yield from _drafts(to, shard, collections.Counter(), bad)
            rows += len(shard.rows)
        first = "; ".join(
            f"{name}: {what.rstrip('.')}" for name, what in bad[: preparation_report.NAMED]
        )
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
    with Reader(dataset.image_root, columns, dataset.within) as reader:
        for which, number, copy in shard.rows.tolist():
            path = shard.tables[which]
            name = printable(f"{path.name}:{number + 1}")
            try:
                row = reader.row(path, number)
                made = ingest.draft(row, name, number, copy, dataset, reader, to)
            except LeftOut as rule:
                left_out[str(rule)] += 1
            # Besides `RecordError` and `ImageError`, whatever hostile values make Python raise.
            except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
                bad.append([name, printable(str(error))])
            else:
                yield made


def printable(told: str) -> str:
    """Returns the start of a message, without half characters, which no file can hold."""
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
    planned: list[Shard],
    done: dict[str, Outcome],
    settings: config.Prepare,
    on_progress: Callable[[int, int], None],
) -> int:
    """Makes the missing shards, adds their outcomes to `done`, and returns how many there were.

    Raises:
        PrepareError: too many records of a dataset are bad, or a worker died.
    """
    rows, bad = collections.Counter[str](), collections.Counter[str]()
    for shard in planned:
        rows[shard.dataset.name] += len(shard.rows)
        bad[shard.dataset.name] += len(done[shard.stem].bad) if shard.stem in done else 0

    on_progress(len(done), len(planned))
    refused = {name for name in bad if bad[name] > settings.max_bad_fraction * rows[name]}
    for shard in planned:  # what was wrong with their rows may be repaired by now
        name, stem = shard.dataset.name, shard.stem
        if name in refused and stem in done and done[stem].bad:
            bad[name] -= len(done.pop(stem).bad)
    left = [shard for shard in planned if shard.stem not in done]
    with contextlib.closing(_outcomes(job, encoder, left, settings)) as made:
        for shard, outcome in made:
            done[shard.stem], name = outcome, shard.dataset.name
            on_progress(len(done), len(planned))
            bad[name] += len(outcome.bad)
            named = f"{job.folder / preparation_report.READABLE} names them"
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
    job: Job, encoder: ImageEncoder, planned: list[Shard], settings: config.Prepare
) -> Generator[tuple[Shard, Outcome], None, None]:
    """Yields shards and their outcomes as they are finished, in any order."""
    if settings.engine == "processes" and not settings.workers:
        for shard in planned:
            yield shard, make(job, encoder, shard)
    elif planned:
        elsewhere = dataclasses.replace(job, folder=job.folder.resolve())
        load = functools.partial(_maker, elsewhere, planned)
        over = workers.ray if settings.engine == "ray" else workers.processes
        for row in over(load, len(planned), settings.workers):
            yield planned[row["number"]], Outcome(**json.loads(row["outcome"]))


def _maker(job: Job, planned: list[Shard]) -> Callable[[int], dict[str, Any]]:
    """Returns a function that makes a shard by its number; called in a worker process."""
    encoder = job.load_encoder()

    def made(number: int) -> dict[str, Any]:
        outcome = make(job, encoder, planned[number])
        return {"number": number, "outcome": json.dumps(dataclasses.asdict(outcome))}

    return made


def check_folder(folder: pathlib.Path) -> None:
    """Checks that a folder is free or already a prepared one; creates nothing.

    Raises:
        PrepareError: it is a file, holds something else, or has a name that records cannot have.
    """
    if not files.has_text_name(folder):
        raise PrepareError(f"{folder}: give a folder whose name is text in UTF-8.")
    if folder.exists() and not folder.is_dir():
        raise PrepareError(f"{folder} is a file: name another folder for the shards.")
    there = {p.name for p in folder.glob("*") if p.is_file() and p.suffix != files.UNFINISHED}
    if there - LEFT:
        raise PrepareError(f"{folder} holds something else: name another folder for the shards.")


@contextlib.contextmanager
def reserved(folder: pathlib.Path) -> Iterator[None]:
    """Keeps a second preparation out of a folder, which is made; a process that dies frees it.

    If nothing but the table of text files is in it in the end, it is removed.

    Raises:
        PrepareError: another process holds it, or as `check_folder`.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = files.lock(folder / LOCK)
    except files.LockedError:
        raise PrepareError(
            f"{folder} is being prepared by another process: wait for it, or stop it."
        ) from None
    try:
        files.remove_unfinished(folder)
        yield
    finally:
        files.remove_unfinished(folder)
        table = folder / folders.WRITTEN
        if {table, table.parent, folder / LOCK}.issuperset(folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
        held.release()


# ---------------------------------------------------------------------------------------------
# The index for training.


def _index(
    mixture: Recipe, encoder: ImageEncoder, planned: list[Shard], done: dict[str, Outcome]
) -> dict[str, Any]:
    """Returns the index for training."""
    written = {dataset.name: [] for dataset in mixture.datasets}
    for shard in planned:
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
