# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark item by item, resumable and in shards, and finally computes its metrics.

A folder contains `settings.json` (the evaluation it belongs to; any other is refused),
`shards/0-of-4/` and so on with `items.jsonl` (one line per item, appended when it is done) and
`made_with.json` (on which machine), `export/` (the input of the official scorer), `judged/` (where
people put the output of scorers and judges), and, once all items are done, `results.json` and
`table.md`.
"""

import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sparse_lavida_jax import config, schema
from sparse_lavida_jax.checkpoints import adapter_names, model_folder
from sparse_lavida_jax.data import files
from sparse_lavida_jax.data.leftovers import is_leftover
from sparse_lavida_jax.evals import benchmark, benchmarks, scorers
from sparse_lavida_jax.evals.benchmark import EXPORT, JUDGED, Answer, Benchmark
from sparse_lavida_jax.evals.circumstances import circumstances, commit
from sparse_lavida_jax.evals.official_files import EvaluationError
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.training import runs

SCHEMA = "sparse-lavida-eval/1"
MADE_WITH = "made_with.json"  # of a shard: device, software and commit, one entry for each
# Settings that change where and how fast items are computed, but not the items.
MAY_CHANGE = frozenset({"evaluate.batch_size", "evaluate.checkpoint", "evaluate.data"})


@jax_settings.defaults()
def evaluate(
    settings: config.Config,
    name: str,
    folder: pathlib.Path,
    *,
    adapters: str = "",
    shard: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> str:
    """Computes the missing items of a shard, and the scores once all shards are complete.

    Args:
        settings: of the evaluation, including those of the checkpoint.
        name: the checkpoint.
        folder: of this evaluation; it is created, or continued.
        adapters: to add to the model, in the syntax of `--adapters`.
        shard: "i/n" for every n-th item starting from the i-th; "": all of them.
        on_progress: called with the number of finished items of the shard, and its total.
        on_note: called with sentences about how much there is to do and how long it takes.

    Returns:
        The table in Markdown, or how many items are still missing.

    Raises:
        EvaluationError: the benchmark cannot be run.
        CheckpointError: there is no such model.
        RunError: the folder belongs to another evaluation, or is in use.
    """
    part, parts = _shard(shard)
    bench = benchmarks.find(settings.evaluate.benchmark)(settings)
    # The SHA-256 of the manifest of a model, which contains those of all its files.
    weights = adapter_names.parse(adapters)
    source = {"name": name, "sha256": adapter_names.digest(model_folder.find_model(name), weights)}
    if weights:
        source["adapters"] = adapter_names.written(weights)
    _claim(folder, settings, bench, source["sha256"])
    own = folder / "shards" / f"{part}-of-{parts}"
    own.mkdir(parents=True, exist_ok=True)
    release = runs.lock(own)
    try:
        done = {answer.item.index for answer in answers_of(bench, folder)}
        mine = bench.items[part::parts]
        if pending := [item for item in mine if item.index not in done]:
            how: Any = {"batch_size": settings.evaluate.batch_size, "adapters": adapters}
            pipe = SparseLaViDa.from_pretrained(name, **how)
            _note_circumstances(own / MADE_WITH)
            finished = len(mine) - len(pending)
            on_progress(finished, len(mine))
            on_note(f"{len(pending)} items to do; the first batch will show how long they take.")
            begin = time.monotonic()
            for number, count in enumerate(_compute(bench, pipe, pending, own / "items.jsonl")):
                finished += count
                on_progress(finished, len(mine))
                if number == 0 and (left := len(mine) - finished):
                    minutes = (time.monotonic() - begin) / count * left / 60
                    on_note(f"{left} items are left, for about {minutes:.1f} minutes or less.")
    finally:
        release()
    answers = answers_of(bench, folder)
    if missing := len(bench.items) - len(answers):
        return (
            f"{folder}: {len(answers)} of {len(bench.items)} items are there, {missing} are"
            f" missing: run the other shards of {parts}."
        )
    return _finish(bench, answers, folder, source)


def _shard(words: str) -> tuple[int, int]:
    """Parses "i/n"; "": the only shard."""
    if not words:
        return 0, 1
    first, _, second = words.partition("/")
    if first.isdecimal() and second.isdecimal() and int(first) < int(second):
        return int(first), int(second)
    raise EvaluationError(f"--shard={words} is no shard: write i/n with i of 0 to n - 1, as 0/4.")


def _claim(folder: pathlib.Path, settings: config.Config, bench: Benchmark, checksum: str) -> None:
    """Records which evaluation the folder belongs to.

    Raises:
        RunError: it belongs to another one, or contains something else.
    """
    path = folder / "settings.json"
    told = [(item.key, item.words, item.record) for item in bench.items]
    now = {
        "checkpoint": checksum,
        "items": len(bench.items),
        "keys": hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest(),
        "seed": settings.seed,
        **_settings(bench),
    }
    now = json.loads(json.dumps(now))  # turns tuples into lists, as in the file
    if not path.exists():
        if folder.exists() and not (folder / "shards").is_dir():
            if not folder.is_dir() or not all(is_leftover(p.name) for p in folder.iterdir()):
                raise runs.RunError(
                    f"{folder} holds files but no settings.json, so it is no evaluation. Choose"
                    " another --workdir."
                )
        files.write_json(path, now)
    # Shards that start together may all write this; they continue if they wrote the same.
    try:
        before = dict(_flat(files.read_json(path)))
    except (ValueError, AttributeError) as error:
        raise runs.RunError(
            f"{path} is damaged ({error}). Choose another --workdir, or delete this one."
        ) from error
    if changed := [
        f"{name} was {before.get(name)!r} and is {value!r}"
        for name, value in _flat(now)
        if name not in MAY_CHANGE and before.get(name) != value
    ]:
        raise runs.RunError(
            f"{folder} is another evaluation: {'; '.join(changed)}. Choose another --workdir, or"
            " delete that one to start again."
        )


def _settings(bench: Benchmark) -> dict[str, Any]:
    return {"evaluate": config.to_dict(bench.settings), "sampling": config.to_dict(bench.sampling)}


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _note_circumstances(path: pathlib.Path) -> None:
    """Adds device, software and commit to a file, unless its last entry is the same."""
    before = files.read_json(path) if path.exists() else []
    now = json.loads(json.dumps({**circumstances(), **commit()}))
    if not before or before[-1] | {"created": ""} != now | {"created": ""}:
        files.write_json(path, [*before, now])


def _compute(
    bench: Benchmark, pipe: SparseLaViDa, pending: Sequence[benchmark.Item], path: pathlib.Path
) -> Iterator[int]:
    """Appends a line for each item, and yields the size of each batch once it is on disk."""
    with path.open("ab") as file:
        file.truncate(len(_whole(path)))  # a process that died may have left an incomplete line
        for batch in bench.batches(pending):
            begin = time.perf_counter()
            outputs = bench.answer(pipe, batch, path.parents[2])
            seconds = round((time.perf_counter() - begin) / len(batch), 4)
            for item, output in zip(batch, outputs, strict=True):
                row = {"index": item.index, "key": item.key, "seed": bench.seed_of(item)}
                row |= {"output": output, "seconds": seconds}
                line = json.dumps(row, ensure_ascii=False) + "\n"
                file.write(line.encode(errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
            yield len(batch)


def _whole(path: pathlib.Path) -> bytes:
    """Returns the complete lines of a file."""
    contents = path.read_bytes()
    return contents[: contents.rfind(b"\n") + 1]


def answers_of(bench: Benchmark, folder: pathlib.Path) -> list[Answer]:
    """Returns the answers of all shards, in the order of the items.

    Raises:
        EvaluationError: a line of a shard is damaged.
    """
    found: dict[int, Answer] = {}
    for path in sorted(folder.glob("shards/*/items.jsonl")):
        for number, line in enumerate(_whole(path).splitlines(), 1):
            try:
                row = files.parse_json(line)
                item = bench.items[row["index"]]
                found[item.index] = Answer(item, row["seed"], row["output"], row["seconds"])
            except (ValueError, TypeError, LookupError) as error:
                raise EvaluationError(
                    f"{path}, line {number}, is damaged ({error!r}). Delete that line: its item is"
                    " then computed again."
                ) from error
    return [found[index] for index in sorted(found)]


def _finish(
    bench: Benchmark, answers: Sequence[Answer], folder: pathlib.Path, source: dict[str, str]
) -> str:
    """Writes the export, `results.json` and `table.md`, and returns the table."""
    (folder / JUDGED).mkdir(exist_ok=True)
    files.remove_unfinished(folder / EXPORT)
    for name, content in bench.export(answers).items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        files.write_text(folder / EXPORT / name, text)
    metrics = bench.metrics(answers, folder)
    made_with = sorted(folder.glob(f"shards/*/{MADE_WITH}"))
    results = {
        "schema": SCHEMA,
        "benchmark": bench.settings.benchmark,
        "title": bench.title,
        "scored": circumstances()["created"],
        "made_with": [entry for path in made_with for entry in files.read_json(path)],
        "checkpoint": source,
        "items": len(answers),
        "seed": bench.config.seed,
        **_settings(bench),
        "seconds": round(sum(answer.seconds for answer in answers), 2),
        "scores": [metric.as_json() for metric in metrics],
    }
    files.write_json(folder / "results.json", results)
    parts = [f"# {bench.title}", _description(bench, results)]
    if metrics:
        parts.append(scorers.table(metrics))
    if bench.judge and not any((folder / JUDGED).iterdir()):
        parts.append(f"To judge {folder / EXPORT}: {bench.judge} Then run this command again.")
    text = "\n\n".join(parts)
    files.write_text(folder / "table.md", text + "\n")
    return text


def _description(bench: Benchmark, results: dict[str, Any]) -> str:
    """Returns what was evaluated, where, and which settings differ from the defaults."""
    machines = dict.fromkeys(
        f"commit {(made['commit'] + '+' * made['dirty']) or 'unknown'}, {made['device']['count']} x"
        f" {made['device']['kind']}, jax {made['software']['jax']}"
        for made in results["made_with"]
    )
    changed = schema.changes(bench.settings) | schema.changes(bench.sampling)
    adapters = results["checkpoint"].get("adapters", "")
    return (
        f"{results['items']} items, {results['checkpoint']['name']}"
        f"{f' with the adapters {adapters}' * bool(adapters)} (SHA-256"
        f" {results['checkpoint']['sha256'][:12]}), seed {results['seed']}; {'; '.join(machines)};"
        f" {results['seconds']:.0f} s. Other than the defaults:"
        f" {', '.join(f'{name} {value}' for name, value in changed.items())}."
    )
