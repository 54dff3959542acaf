# SPDX-License-Identifier: Apache-2.0
"""Runs a suite row by row: finished rows, and the run that they are of."""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

from sparse_lavida_jax import config
from sparse_lavida_jax.bench import record, requests, suites
from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.bench.suites import RequestCase
from sparse_lavida_jax.bench.timing import calibrate

Row = dict[str, Any]


def run_suite(
    subject: requests.Subject,
    suite: str,
    cases: Sequence[RequestCase],
    *,
    runs: int,
    vq_dtype: str,
    variant: str = "",
    missing: bool = False,
    minutes: float = 0.0,
) -> str:
    """Measures a suite and writes a row as soon as it is measured; returns the id of the run.

    Args:
        runs: timed requests of each row.
        vq_dtype: of the subject's decoder of images.
        variant: after the ids of what is measured in another way, with other flags perhaps.
        missing: goes on with the newest run of this code, model, software and device, and measures
            what it lacks.
        minutes: no row is begun that would end later, if it takes as long as the longest so far;
            0: all are. Rows that are timed in turn are begun together.

    Raises:
        ConfigError: a row that is there was measured in another way and would be lost.
    """
    bench, how = Bench(suite), _how(subject, vq_dtype, variant)
    wanted = {f"{case.id}/{variant}" if variant else case.id: case for case in cases}
    there = {row_id: row for row_id in wanted if (row := _row(suite, how["model"], row_id))}
    _refuse_to_lose(there, how)
    if missing:
        bench, done = _newest_run(bench, there, how)
        wanted = {row_id: case for row_id, case in wanted.items() if row_id not in done}
    if not wanted:
        return bench.run
    calibration = calibrate()
    together = [[row_id] for row_id in wanted]
    if suites.in_turn(suite):
        by_task = itertools.groupby(wanted, lambda row_id: wanted[row_id].task)
        together = [[*ids] for _, ids in by_task]
    begin, longest = time.monotonic(), 0.0
    for number, ids in enumerate(together):
        begun = time.monotonic() - begin
        if minutes and number and begun + longest > 60 * minutes:
            left = list(itertools.chain(*together[number:]))
            print(f"no time for {', '.join(left)}: --missing measures the rest.", flush=True)
            break
        of_ids = [wanted[row_id] for row_id in ids]
        rows = requests.measure(subject, of_ids, runs=runs, calibration=calibration)
        for row_id, row in zip(ids, rows, strict=True):
            path = bench.write(row_id, row | how, name=f"{how['model']}/{row_id}")
            print(
                f"{path.name}: median {row['median_s']:.4f} s, loop {row['split_s']['loop']:.4f} s,"
                f" floor {row['floor_s']:.4f} s, compiled in {row['compile_s']:.1f} s",
                flush=True,
            )
        longest = max(longest, time.monotonic() - begin - begun)
    return bench.run


def _how(subject: requests.Subject, vq_dtype: str, variant: str) -> Row:
    """Returns what rows of one run have in common besides code, software and device."""
    return {
        "model": subject.settings.name,
        "settings": hashlib.sha256(repr(subject.settings).encode()).hexdigest()[:12],
        "random_weights": subject.random_weights,
        "vq_dtype": vq_dtype,
        "variant": variant,
    }


def _row(suite: str, model: str, row_id: str) -> Row:
    """Returns a row that is there, or nothing."""
    path = record.path_of(suite, f"{model}/{row_id}")
    return json.loads(path.read_text()) if path.exists() else {}


def _refuse_to_lose(there: dict[str, Row], how: Row) -> None:
    now = (record.circumstances()["software"]["xla_flags"], how["vq_dtype"])
    for row_id, row in there.items():
        found = (row["software"]["xla_flags"], row.get("vq_dtype", how["vq_dtype"]))
        if found != now:
            raise config.ConfigError(
                f"{row_id} is there, measured with XLA_FLAGS and --vq-dtype {found}, and now they"
                f" are {now}: name this way, such as --variant=cb_off, or delete the row."
            )


def _newest_run(bench: Bench, there: dict[str, Row], how: Row) -> tuple[Bench, set[str]]:
    """Returns the run to go on with, and its rows; rows are compared within a run."""
    now = record.circumstances()
    expected = how | {"code": bench.source["code"], "software": now["software"]}
    expected["host_cores"] = now["device"]["host_cores"]
    done: set[str] = set()
    for row_id, row in sorted(there.items(), key=lambda pair: pair[1]["created"], reverse=True):
        row_of = row | {"host_cores": row["device"]["host_cores"]}
        other = record.differing(row_of, expected)
        if not done and not other:
            bench = dataclasses.replace(bench, run=row["run"])
        if not other and row["run"] == bench.run:
            done.add(row_id)
        else:
            told = f"other {', '.join(other)}" if other else "of another run"
            print(f"{row_id} is measured again: {told}", flush=True)
    return bench, done
