# SPDX-License-Identifier: Apache-2.0
"""One row of a benchmark: the conditions of the measurement, and the file it is written to."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import uuid
from typing import Any

import jax

from sparse_lavida_jax import old_names
from sparse_lavida_jax.data import files
from sparse_lavida_jax.evals.circumstances import circumstances, commit, device

SCHEMA = "sparse-lavida-bench/1"
# The folder for rows; `launch/device_day.sh` overrides it with SPARSE_LAVIDA_RESULTS.
RESULTS = pathlib.Path(
    os.environ.get("SPARSE_LAVIDA_RESULTS") or pathlib.Path(__file__).with_name("results")
)
ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Bench:
    """One call of a benchmark: rows of one `run` were measured together and may be compared.

    Attributes:
        suite: folder of the rows.
        run: random name of this call.
        source: commit of the code, whether it had changes, and its digest, at the start of the
            call.
    """

    suite: str
    run: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])
    source: dict[str, Any] = dataclasses.field(default_factory=lambda: commit() | {"code": code()})

    def write(self, row_id: str, values: dict[str, Any], *, name: str = "") -> pathlib.Path:
        """Writes a row, replacing an older row of the same name on the same device.

        Args:
            name: of the file; by default the id of the row.
        """
        row = {
            "schema": SCHEMA,
            "suite": self.suite,
            "id": row_id,
            "status": "ok",
            **self.source,
            "run": self.run,
            **circumstances(),
            **values,
        }
        path = path_of(self.suite, name or row_id, row["device"]["kind"])
        files.write_json(path, row)
        return path

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of this call."""
        return [row for row in read_rows(self.suite) if row["run"] == self.run]


def path_of(suite: str, name: str, kind: str = "") -> pathlib.Path:
    """Returns the path of a row for a kind of device, by default this one."""
    folder = re.sub(r"[^a-z0-9]+", "-", (kind or device()["kind"]).lower()).strip("-")
    return RESULTS / folder / suite / f"{name.replace('/', '.')}.json"


def read_rows(suite: str) -> list[dict[str, Any]]:
    """Returns all rows of a suite, on all devices."""
    paths = sorted(RESULTS.glob(f"*/{suite}/*.json"))
    return [read_row(path) for path in paths]


def read_row(path: pathlib.Path) -> dict[str, Any]:
    """Returns a row with today's names; the id of a score holds the name of its task."""
    row = json.loads(path.read_text())
    if "task" not in row or "id" not in row:
        return old_names.current(row)
    parts = [old_names.NAMES.get(one) or one for one in row["id"].split("/")]
    return old_names.current(row) | {"id": "/".join(parts)}


def differing(row: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Returns the names of values that a row lacks or that differ in it."""
    return [name for name, value in expected.items() if row.get(name) != value]


def code() -> str:
    """Returns a digest of the code, without the tables, which measure nothing."""
    package = ROOT / "sparse_lavida_jax"
    paths = [*package.rglob("*.py"), *package.glob("kernels/*.json")]
    paths += {*ROOT.glob("benchmarks/*.py")} - {ROOT / "benchmarks" / "table.py"}
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@dataclasses.dataclass
class CompileCount:
    """Programs compiled by this process.

    Attributes:
        seconds: of each.
        kept: how many of them were loaded from the folder of compiled programs.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    kept: int = 0


@functools.cache
def compiled() -> CompileCount:
    """Returns a counter of compilations from its first call on, which keeps counting."""
    found = CompileCount()

    def listen(event: str, duration_secs: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.seconds.append(duration_secs)

    def hit(event: str, **_) -> None:
        found.kept += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(hit)
    return found
