# SPDX-License-Identifier: Apache-2.0
"""From the tables of a mixture file to shards of records with their codes.

The prepared folder:

    <dataset>/00003-of-00010.arrayrecord  records of some consecutive rows, without the bad ones
    <dataset>/00003-of-00010.json         what became of those rows; where it is there, the shard
                                          is whole
    mixture.json                          what training reads; written when everything is done
    report.json, report.md                every bad record by name

A shard is one task. It depends on its rows, the settings and the image tokenizer and on nothing
else, so it has the same bytes whichever process makes it; one that is there is not made again.
Tasks run in this process, in several, or over many machines (`prepare_ray.py`).
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import pathlib
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.data import files, markdown
from sparse_lavida_jax.data.image_files import ImageError
from sparse_lavida_jax.mixture import ingest, recipe, records, tables
from sparse_lavida_jax.mixture.ingest import Draft, LeftOut
from sparse_lavida_jax.mixture.recipe import Dataset, PrepareError, Recipe

FORMAT = "sparse-lavida-data/1"
INDEX = "mixture.json"
REPORT, READABLE = "report.json", "report.md"
MOST_NAMED = 50  # bad records that the readable report names, of each dataset


@runtime_checkable
class ImageEncoder(Protocol):
    """The image tokenizer: pixels to codes.

    Attributes:
        side: of the images it takes, in pixels.
        factor: pixels a side of one code.
        codebook_size: codes are below it.
        digest: tells one tokenizer from another.
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
    """What all shards of a preparation have in common; every worker has one.

    Attributes:
        folder: where everything goes.
        to: sizes, crops and seed.
        batch: images that are encoded together.
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
        dataset: whose.
        stem: path in the folder, without a suffix.
        tables: in which the rows are.
        rows: table, row and copy of each.
        fingerprint: of everything that decides what comes out.
    """

    dataset: Dataset
    stem: str
    tables: tuple[tables.Table, ...]
    rows: Int[np.ndarray, "r 3"]
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of the rows of a shard, as its .json has it."""

    fingerprint: str
    rows: int
    records: int
    num_bytes: int
    sha256: str
    left_out: dict[str, int]
    bad: list[list[str]]  # name of the row, what is wrong


@dataclasses.dataclass(frozen=True)
class Summary:
    """A finished preparation, in numbers."""

    shards: int
    made: int
    records: int
    left_out: int
    bad: int


def prepare(
    path: pathlib.Path | str,
    folder: pathlib.Path | str,
    settings: config.Config,
    load_encoder: LoadEncoder,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Makes the shards of a mixture file that are not there yet.

    Args:
        path: the mixture file (`recipe.read`).
        on_progress: called with how many shards are done, and of how many.

    Raises:
        RecipeError: the mixture file is wrong.
        PrepareError: a table cannot be read, too many records are bad, or a worker died. What was
            finished before stays, and the report says what was found.
        OSError: the folder cannot be written to: the disk is full, for example.
    """
    mixture, folder = recipe.read(pathlib.Path(path)), pathlib.Path(folder)
    try:
        plan = _plan(mixture, folder, settings, load_encoder)
        with _only_one(folder):
            return _carry_out(mixture, *plan, settings.prepare, on_progress)
    except tables.TableError as error:
        raise PrepareError(str(error)) from error


def _carry_out(
    mixture: Recipe,
    job: Job,
    encoder: ImageEncoder,
    shards: list[Shard],
    settings: config.Prepare,
    on_progress: Callable[[int, int], None],
) -> Summary:
    """Makes the shards that are not there, and writes what training reads and the report."""
    done = {s.stem: outcome for s in shards if (outcome := finished(job.folder, s)) is not None}
    left = [shard for shard in shards if shard.stem not in done]
    rows, bad = collections.Counter[str](), collections.Counter[str]()
    for shard in shards:
        rows[shard.dataset.name] += len(shard.rows)
        bad[shard.dataset.name] += len(done[shard.stem].bad) if shard.stem in done else 0

    def check(name: str) -> None:
        allowed = settings.max_bad_fraction * rows[name]
        if bad[name] > allowed:
            raise PrepareError(
                f"{bad[name]} records of {name} are bad, and prepare.max_bad_fraction allows"
                f" {int(allowed)}: {job.folder / READABLE} names them. Mend them, or allow more;"
                " what is finished stays."
            )

    on_progress(len(done), len(shards))
    try:
        for name in bad:
            check(name)
        with contextlib.closing(_outcomes(job, encoder, left, settings)) as made:
            for shard, outcome in made:
                done[shard.stem] = outcome
                on_progress(len(done), len(shards))
                bad[shard.dataset.name] += len(outcome.bad)
                check(shard.dataset.name)
    finally:
        _write_report(job.folder, shards, done)
    files.write_json(job.folder / INDEX, _index(mixture, encoder, shards, done))
    return Summary(
        len(shards),
        len(left),
        sum(one.records for one in done.values()),
        sum(sum(one.left_out.values()) for one in done.values()),
        sum(len(one.bad) for one in done.values()),
    )


# ---------------------------------------------------------------------------------------------
# What is to be done.


def _plan(
    mixture: Recipe, folder: pathlib.Path, settings: config.Config, load_encoder: LoadEncoder
) -> tuple[Job, ImageEncoder, list[Shard]]:
    """Looks through the tables and divides their rows."""
    encoder = load_encoder()
    to = ingest.Settings(encoder.side, encoder.factor, settings.prepare.crops, settings.seed)
    job = Job(folder, to, settings.prepare.encode_batch, load_encoder)
    shards = []
    for dataset in mixture.datasets:
        found = [tables.locate(path) for path in tables.find(dataset.json_path)]
        chosen = dataset.chosen(sum(table.num_rows for table in found))
        if not len(chosen):
            raise PrepareError(
                f"the dataset {dataset.name} has no rows: {dataset.json_path} is empty, or"
                f" sampling_strategy={dataset.sampling_strategy} takes none."
            )
        shards += _shards(dataset, found, chosen, settings.prepare.shard_rows, to, encoder)
    return job, encoder, shards


def _shards(dataset, found, chosen, size: int, to, encoder) -> list[Shard]:
    ends = np.cumsum([table.num_rows for table in found])
    which = np.searchsorted(ends, chosen, side="right")
    numbers = chosen - (ends - [table.num_rows for table in found])[which]
    # The strategy may take the rows more than once, always in the same order.
    copies = np.arange(len(chosen)) // len(np.unique(chosen))
    rows = np.stack([which, numbers, copies], axis=1).astype(np.int64)
    count = -(-len(rows) // size)
    described = dataclasses.asdict(dataset)
    # What moves rows and changes none, and where things lie.
    for name in ("length_group", "sampling_strategy", "json_path"):
        del described[name]
    described["image_root"] = pathlib.Path(dataset.image_root).name
    common = json.dumps(
        [records.VERSION, records.WRITER_OPTIONS, described, dataclasses.asdict(to), encoder.digest]
    )
    shards = []
    for i in range(count):
        part = rows[i * size : (i + 1) * size]
        used = sorted(set(part[:, 0].tolist()))
        held = tuple(found[j].part(part[part[:, 0] == j, 1].tolist()) for j in used)
        part = np.concatenate([np.searchsorted(used, part[:, :1]), part[:, 1:]], axis=1)
        mark = hashlib.sha256(common.encode())
        for table in held:
            about = table.path.stat()
            mark.update(f"{table.path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
        mark.update(part.tobytes())
        stem = f"{dataset.name}/{i:05d}-of-{count:05d}"
        shards.append(Shard(dataset, stem, held, part, mark.hexdigest()))
    return shards


def finished(folder: pathlib.Path, shard: Shard) -> Outcome | None:
    """Returns what became of a shard if it is there and was made of the same things."""
    try:
        outcome = Outcome(**json.loads((folder / f"{shard.stem}.json").read_text()))
        path = folder / f"{shard.stem}{records.SUFFIX}"
        size = path.stat().st_size if outcome.records else 0
    except (OSError, ValueError, TypeError):
        return None
    whole = outcome.fingerprint == shard.fingerprint and outcome.num_bytes == size
    return outcome if whole else None


# ---------------------------------------------------------------------------------------------
# One shard.


def make(job: Job, encoder: ImageEncoder, shard: Shard) -> Outcome:
    """Makes a shard and writes it, whole or not at all.

    Raises:
        TableError: a table of it cannot be read any more.
        OSError: it cannot be written.
    """
    path = job.folder / f"{shard.stem}{records.SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Next to a new file the old one would be taken for its outcome.
    (job.folder / f"{shard.stem}.json").unlink(missing_ok=True)
    left_out: collections.Counter[str] = collections.Counter()
    bad: list[list[str]] = []
    drafts = _drafts(job, shard, left_out, bad)
    made = _encoded(drafts, encoder, job.batch)
    if (first := next(made, None)) is None:
        path.unlink(missing_ok=True)
        written = 0, 0, ""
    else:
        written = records.write_shard(path, itertools.chain([first], made))
    rules = dict(sorted(left_out.items()))
    outcome = Outcome(shard.fingerprint, len(shard.rows), *written, rules, bad)
    files.write_json(job.folder / f"{shard.stem}.json", dataclasses.asdict(outcome))
    return outcome


def _drafts(job: Job, shard: Shard, left_out, bad) -> Iterator[Draft]:
    dataset = shard.dataset
    columns = dataset.columns if isinstance(dataset.columns, tuple) else ()
    with tables.Reader(dataset.image_root, columns) as reader:
        for which, number, copy in shard.rows.tolist():
            table = shard.tables[which]
            name = f"{table.path.name}:{number + 1}"
            try:
                row = reader.row(table, number)
                yield ingest.draft(row, name, number, copy, dataset, reader, job.to)
            except LeftOut as rule:
                left_out[str(rule)] += 1
            except (records.RecordError, ImageError) as error:
                bad.append([name, str(error)])


def _encoded(
    drafts: Iterable[Draft], encoder: ImageEncoder, batch: int
) -> Iterator[records.Record]:
    """Yields records in their order, encoding `batch` images at a time."""
    waiting: list[Draft] = []
    squares: list[np.ndarray] = []

    def flush() -> Iterator[records.Record]:
        # Whole batches: the tokenizer is compiled for one size.
        blank = [np.zeros_like(squares[0])] * (-len(squares) % batch) if squares else []
        pixels = [*squares, *blank]
        codes = [
            encoder.encode(np.stack(pixels[i : i + batch])) for i in range(0, len(pixels), batch)
        ]
        flat, at = np.concatenate(codes) if codes else np.zeros((0, 0, 0), np.int32), 0
        for one in waiting:
            stop = at + len(one.targets) + len(one.sources)
            yield one.finished(flat[at:stop].astype(np.int32))
            at = stop
        waiting.clear()
        squares.clear()

    for one in drafts:
        waiting.append(one)
        squares += [*one.targets, *one.sources]
        if len(squares) >= batch or len(waiting) >= 64 * batch:
            yield from flush()
    yield from flush()


# ---------------------------------------------------------------------------------------------
# Many shards.


def _outcomes(
    job: Job, encoder: ImageEncoder, shards: list[Shard], settings: config.Prepare
) -> Generator[tuple[Shard, Outcome], None, None]:
    """Yields what became of shards as they are finished, in any order."""
    if settings.engine == "ray":
        from sparse_lavida_jax.mixture import prepare_ray

        elsewhere = dataclasses.replace(job, folder=job.folder.resolve())
        load = functools.partial(_maker, elsewhere, shards)
        for row in prepare_ray.outcomes(load, len(shards), settings.workers):
            yield shards[row["number"]], Outcome(**json.loads(row["outcome"]))
    elif settings.workers and shards:
        yield from _in_processes(job, shards, min(settings.workers, len(shards)))
    else:
        for shard in shards:
            yield shard, make(job, encoder, shard)


def _maker(job: Job, shards: list[Shard]) -> Callable[[int], dict[str, Any]]:
    """Returns, on another machine, a function that makes a shard by its number."""
    encoder = job.load_encoder()

    def made(number: int) -> dict[str, Any]:
        outcome = make(job, encoder, shards[number])
        return {"number": number, "outcome": json.dumps(dataclasses.asdict(outcome))}

    return made


_encoder: ImageEncoder  # of a worker process


def _start_worker(load_encoder: LoadEncoder) -> None:
    global _encoder
    # Ctrl-C reaches every process of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _encoder = load_encoder()


def _in_worker(job: Job, shard: Shard) -> Outcome:
    return make(job, _encoder, shard)


def _in_processes(job: Job, shards: list[Shard], workers: int) -> Iterator[tuple[Shard, Outcome]]:
    others = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (job.load_encoder,)
    )
    try:
        waiting = {pool.submit(_in_worker, job, shard): shard for shard in shards}
        for future in concurrent.futures.as_completed(waiting):
            yield waiting.pop(future), future.result()
    except BrokenProcessPool as error:
        raise PrepareError(
            "a worker process died, perhaps for want of memory: lower prepare.workers or"
            " prepare.encode_batch and run the same command again. What is finished stays."
        ) from error
    finally:
        # Shards that are still being made will not be used.
        pool.shutdown(wait=False, cancel_futures=True)
        if waiting:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
        pool.shutdown(wait=True)
        files.remove_unfinished(job.folder)


@contextlib.contextmanager
def _only_one(folder: pathlib.Path) -> Iterator[None]:
    """Keeps a second preparation out of the folder; the lock of a process that dies is dropped."""
    if folder.exists() and not folder.is_dir():
        raise PrepareError(f"{folder} is a file: name another folder for the shards.")
    folder.mkdir(parents=True, exist_ok=True)
    there = {p.name for p in folder.iterdir() if p.is_file() and p.suffix != files.UNFINISHED}
    if there - {INDEX, REPORT, READABLE, ".lock"}:
        raise PrepareError(f"{folder} holds something else: name another folder for the shards.")
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
        held.release()


# ---------------------------------------------------------------------------------------------
# The report, and what training reads.


def _write_report(folder: pathlib.Path, shards: list[Shard], done: dict[str, Outcome]) -> None:
    report: dict[str, Any] = {}
    for name, grouped in itertools.groupby(shards, lambda shard: shard.dataset.name):
        of = [*grouped]
        there = [done[shard.stem] for shard in of if shard.stem in done]
        left_out = sum((collections.Counter(one.left_out) for one in there), collections.Counter())
        report[name] = {
            "shards": len(of),
            "shards_finished": len(there),
            "rows": sum(len(shard.rows) for shard in of),
            "records": sum(outcome.records for outcome in there),
            "left_out": dict(sorted(left_out.items())),
            "bad": [one for outcome in there for one in outcome.bad],
        }
    files.write_json(folder / REPORT, {"format": FORMAT, "datasets": report})
    files.write_text(folder / READABLE, _readable(report))


def _readable(report: dict[str, Any]) -> str:
    rows = []
    for name, of in report.items():
        shards = f"{of['shards_finished']} of {of['shards']}"
        left = ", ".join(f"{rule}: {count}" for rule, count in of["left_out"].items()) or "0"
        rows.append((name, shards, of["rows"], of["records"], left, len(of["bad"])))
    columns = ("dataset", "shards", "rows", "records", "left out", "bad")
    lines = ["# Prepared data", "", markdown.table(columns, rows)]
    for name, of in report.items():
        if of["bad"]:
            lines += ["", f"## Bad records of {name}", ""]
            lines += [f"- {row}: {' '.join(why.split())}" for row, why in of["bad"][:MOST_NAMED]]
            if len(of["bad"]) > MOST_NAMED:
                lines.append(f"- and {len(of['bad']) - MOST_NAMED} more: see {REPORT}")
    return "\n".join(lines) + "\n"


def _index(
    mixture: Recipe, encoder: ImageEncoder, shards: list[Shard], done: dict[str, Outcome]
) -> dict[str, Any]:
    """Returns what training reads."""
    written = {dataset.name: [] for dataset in mixture.datasets}
    for shard in shards:
        one = done[shard.stem]
        file = {
            "file": f"{shard.stem}{records.SUFFIX}",
            "records": one.records,
            "bytes": one.num_bytes,
            "sha256": one.sha256,
        }
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
