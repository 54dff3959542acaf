# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark: item by item, resumable, in shards; at the end its scores and its table.

A folder holds `settings.json` (what it is the evaluation of; another is refused), `shards/0-of-4/`
and so on with `items.jsonl` (a row an item, appended when it is done) and `made_with.json` (where),
`export/` (what the official scorer reads), `judged/` (what a person puts there: what scorers and
judges said), and when every item is there `results.json` and `table.md`.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import manifest, model_folder
from sparse_lavida_jax.data import files, markdown
from sparse_lavida_jax.evals import benchmark
from sparse_lavida_jax.evals.benchmark import EXPORT, JUDGED, Benchmark, Row, Score
from sparse_lavida_jax.evals.circumstances import circumstances, commit
from sparse_lavida_jax.evals.files import EvaluationError
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.training import runs

SCHEMA = "sparse-lavida-eval/1"
MADE_WITH = "made_with.json"  # of a shard: device, software and commit, an entry for each
# Settings that change where and how fast items are computed, and not what they are.
MAY_CHANGE = frozenset({"evaluate.batch_size", "evaluate.checkpoint", "evaluate.data"})

OnProgress = Callable[[int, int], None]


def evaluate(
    settings: config.Config,
    name: str,
    folder: pathlib.Path,
    *,
    shard: str = "",
    on_progress: OnProgress | None = None,
) -> str:
    """Computes the items of a shard that are not there yet, and scores when all are.

    Args:
        settings: of the evaluation, those of the checkpoint among them.
        name: the checkpoint.
        folder: of this evaluation; made, or gone on with.
        shard: "i/n" for every n-th item from the i-th on; "": all of them.
        on_progress: called with the items of the shard that are done, and all of them.

    Returns:
        The table in Markdown, or which items are still missing.

    Raises:
        EvaluationError: the benchmark cannot be run.
        CheckpointError: there is no such model.
        RunError: the folder is of another evaluation, or in use.
    """
    part, parts = _shard(shard)
    bench = benchmark.load(settings)
    checksum = _checksum(name)
    _claim(folder, settings, bench, checksum)
    release = runs.lock(_made(folder / "shards" / f"{part}-of-{parts}"))
    try:
        done = {row.index for row in _rows(folder)}
        mine = bench.items[part::parts]
        pending = [item for item in mine if item.index not in done]
        if pending:
            pipe = SparseLaViDa.from_pretrained(name, batch_size=settings.evaluate.batch_size)
            counted = _counted(on_progress, len(mine) - len(pending), len(mine))
            own = folder / "shards" / f"{part}-of-{parts}"
            _tell_circumstances(own / MADE_WITH)
            _compute(bench, pipe, pending, own / "items.jsonl", counted)
    finally:
        release()
    rows = _rows(folder)
    if missing := len(bench.items) - len(rows):
        return (
            f"{folder}: {len(rows)} of {len(bench.items)} items are there, {missing} are missing:"
            f" run the other shards of {parts}."
        )
    return _finish(bench, settings, rows, folder, {"name": name, "sha256": checksum})


def _shard(words: str) -> tuple[int, int]:
    """Reads "i/n"; "": the only one."""
    if not words:
        return 0, 1
    first, _, second = words.partition("/")
    if first.isdecimal() and second.isdecimal() and int(first) < int(second):
        return int(first), int(second)
    raise EvaluationError(f"--shard={words} is no shard: write i/n with i of 0 to n - 1, as 0/4.")


def _checksum(name: str) -> str:
    """Returns the SHA-256 of the manifest of a model, which holds those of all its files."""
    return manifest.digest(model_folder.find_model(name))


def _claim(folder: pathlib.Path, settings: config.Config, bench: Benchmark, checksum: str) -> None:
    """Writes down what the folder is the evaluation of.

    Raises:
        RunError: it is of another one, or holds something else.
    """
    path = folder / "settings.json"
    now = {
        "checkpoint": checksum,
        "items": len(bench.items),
        "keys": _digest(bench.items),
        "seed": settings.seed,
        "evaluate": config.to_dict(settings.evaluate),
        "sampling": config.to_dict(settings.sampling),
    }
    now = json.loads(json.dumps(now))  # tuples become lists, as in the file
    if not path.exists():
        if folder.exists() and not (folder / "shards").is_dir():
            if not folder.is_dir() or any(p.suffix != files.UNFINISHED for p in folder.iterdir()):
                raise runs.RunError(
                    f"{folder} holds files but no settings.json, so it is no evaluation. Choose"
                    " another --workdir."
                )
        files.write_json(_made(folder) / path.name, now)
    # Of shards that start together each may write; they go on if they wrote the same.
    try:
        before = dict(_flat(json.loads(path.read_text())))
    except (ValueError, AttributeError) as error:
        raise runs.RunError(
            f"{path} is damaged ({error}). Choose another --workdir, or delete this one."
        ) from error
    changed = [
        f"{name} was {before.get(name)!r} and is {value!r}"
        for name, value in _flat(now)
        if name not in MAY_CHANGE and before.get(name) != value
    ]
    if changed:
        raise runs.RunError(
            f"{folder} is another evaluation: {'; '.join(changed)}. Choose another --workdir, or"
            " delete that one to start anew."
        )


def _digest(items: Sequence[benchmark.Item]) -> str:
    """Returns what changes with any word of any item."""
    told = [(item.key, item.words, item.record) for item in items]
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()


def _tell_circumstances(path: pathlib.Path) -> None:
    """Adds device, software and commit to a file, unless its last entry has the same."""
    before = json.loads(path.read_text()) if path.exists() else []
    now = json.loads(json.dumps({**circumstances(), **commit()}))
    if not before or _without_times(before[-1]) != _without_times(now):
        files.write_json(path, [*before, now])


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "created"}


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _made(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _counted(on_progress: OnProgress | None, before: int, total: int) -> Callable[[int], None]:
    """Returns what is told how many items were just done."""
    done = before

    def tell(more: int) -> None:
        nonlocal done
        done += more
        if on_progress is not None:
            on_progress(done, total)

    tell(0)
    return tell


def _compute(
    bench: Benchmark,
    pipe: SparseLaViDa,
    pending: Sequence[benchmark.Item],
    path: pathlib.Path,
    counted: Callable[[int], None],
) -> None:
    """Appends a row for each item; what was appended is on the disk before the next batch."""
    folder = path.parents[2]
    with path.open("ab") as file:
        file.truncate(len(_whole(path)))  # a process that died may have left half a line
        for batch in bench.batches(pending):
            begin = time.perf_counter()
            outputs = bench.answer(pipe, batch, folder)
            seconds = (time.perf_counter() - begin) / len(batch)
            for item, output in zip(batch, outputs, strict=True):
                row = Row(item.index, item.key, bench.seed_of(item), output, round(seconds, 4))
                line = json.dumps(dataclasses.asdict(row), ensure_ascii=False)
                file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            counted(len(batch))


def _whole(path: pathlib.Path) -> bytes:
    """Returns the lines of a file that end."""
    contents = path.read_bytes()
    return contents[: contents.rfind(b"\n") + 1]


def _rows(folder: pathlib.Path) -> list[Row]:
    """Returns the rows of all shards, in the order of the items."""
    rows: dict[int, Row] = {}
    for path in sorted(folder.glob("shards/*/items.jsonl")):
        for number, line in enumerate(_whole(path).splitlines(), 1):
            try:
                row = Row(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise EvaluationError(
                    f"{path}, line {number}, is damaged ({error}). Delete that line: its item is"
                    " then computed again."
                ) from error
            rows[row.index] = row
    return [rows[index] for index in sorted(rows)]


def _finish(
    bench: Benchmark,
    settings: config.Config,
    rows: Sequence[Row],
    folder: pathlib.Path,
    source: dict[str, str],
) -> str:
    """Writes the export, `results.json` and `table.md`, and returns the table."""
    _made(folder / JUDGED)
    files.remove_unfinished(folder / EXPORT)
    bench.export(rows, _made(folder / EXPORT))
    scores = bench.scores(rows, folder)
    made = [
        entry
        for path in sorted(folder.glob(f"shards/*/{MADE_WITH}"))
        for entry in json.loads(path.read_text())
    ]
    results = {
        "schema": SCHEMA,
        "benchmark": settings.evaluate.benchmark,
        "title": bench.title,
        "scored": circumstances()["created"],
        "made_with": made,
        "checkpoint": source,
        "items": len(rows),
        "seed": settings.seed,
        "evaluate": config.to_dict(settings.evaluate),
        "sampling": config.to_dict(settings.sampling),
        "seconds": round(sum(row.seconds for row in rows), 2),
        "scores": [score.as_json() for score in scores],
    }
    files.write_json(folder / "results.json", results)
    text = _table(bench, scores, results, folder)
    files.write_text(folder / "table.md", text + "\n")
    return text


def _table(bench: Benchmark, scores: Sequence[Score], results: dict, folder: pathlib.Path) -> str:
    lines = [f"# {bench.title}", "", _description(results), ""]
    rows = []
    for score in scores:
        right, interval = "", ""
        if score.interval is not None:
            right = str(score.correct)
            interval = f"{score.interval[0]:.3f} to {score.interval[1]:.3f}"
        rows.append((score.name, f"{score.value:.5g}", right, score.count, interval))
    if rows:
        lines.append(markdown.table(("score", "value", "right", "of", "95 % interval"), rows))
    if bench.judge and not any((folder / JUDGED).iterdir()):
        lines += ["", f"To judge {folder / EXPORT}: {bench.judge} Then run this command again."]
    return "\n".join(lines)


def _description(results: dict[str, Any]) -> str:
    places = dict.fromkeys(map(_place, results["made_with"]))
    set_ = [
        *_changed(results["evaluate"], config.Evaluate()),
        *_changed(results["sampling"], config.Sampling()),
    ]
    return (
        f"{results['items']} items, {results['checkpoint']['name']} (SHA-256"
        f" {results['checkpoint']['sha256'][:12]}), seed {results['seed']}; {'; '.join(places)};"
        f" {results['seconds']:.0f} s. Other than the defaults: {', '.join(set_)}."
    )


def _place(made: dict[str, Any]) -> str:
    """Returns where and with what items were computed."""
    device, commit = made["device"], made["commit"] + ("+" if made["dirty"] else "")
    return (
        f"commit {commit or 'unknown'}, {device['count']} x {device['kind']}, jax"
        f" {made['software']['jax']}"
    )


def _changed(section: dict[str, Any], defaults: Any) -> list[str]:
    """Returns the settings of a section that are not the defaults."""
    before = config.to_dict(defaults)
    return [f"{name} {value}" for name, value in section.items() if value != before[name]]
