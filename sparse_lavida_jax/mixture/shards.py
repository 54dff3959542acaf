# SPDX-License-Identifier: Apache-2.0
"""Shards of a preparation: which rows become one, and what became of them."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.data import files
from sparse_lavida_jax.mixture import ingest, input_tables, records
from sparse_lavida_jax.mixture.recipe import Dataset, PrepareError


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


def plan(dataset: Dataset, size: int, to: ingest.Settings, digest: str) -> Iterator[Shard]:
    """Reads the tables of a dataset and divides their rows into shards."""
    paths = input_tables.find(dataset.patterns)
    counts = [input_tables.num_rows(path) for path in paths]
    chosen = dataset.chosen(sum(counts))
    if not len(chosen):
        raise PrepareError(
            f"the dataset {dataset.name} has no rows: {', '.join(map(str, paths))} is empty, or"
            f" sampling_strategy={dataset.sampling_strategy} takes none."
        )
    columns: Any = dataset.columns if not dataset.within else ()  # a folder's tables were read
    names = columns.values() if isinstance(columns, dict) else columns
    input_tables.check_columns(paths, [[one] if isinstance(one, str) else one for one in names])
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
