# SPDX-License-Identifier: Apache-2.0
"""What a preparation used and what it left out, in a table, in report.md and in JSON."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.mixture.shards import Outcome, Shard

READABLE = "report.md"
NAMED = 3  # names in a line
LONGEST_NAME = 60  # characters in a line


class ReportLine(NamedTuple):
    """A line of the table.

    Attributes:
        state: "note": used, and perhaps not as meant.
        what: the records, or the reason why something was left out.
        count: how many there are.
        names: all of them; few are shown.
    """

    state: Literal["used", "left out", "note"]
    what: str
    count: int
    names: Sequence[str]


def named(names: Sequence[str]) -> str:
    """Returns the first of some names, in a form that every file and terminal takes."""
    first = (" ".join(name.split()) for name in names[:NAMED])
    cut = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in first]
    shown = ", ".join(cut) + ", ..." * (len(names) > NAMED)
    return shown.encode(errors="backslashreplace").decode()


class Found(NamedTuple):
    """What lies in a folder besides the rows of its tables, by reason (`folders.PlainFolder`)."""

    left_out: dict[str, list[str]]
    remarks: dict[str, list[str]]


def lines(shards: Sequence[Shard], done: Mapping[str, Outcome], found: Found) -> list[ReportLine]:
    """Returns the table of a preparation, with the shards that are finished."""
    used, unused = [], []
    for name, grouped in itertools.groupby(shards, lambda shard: shard.dataset.name):
        of = [*grouped]
        there = [done[shard.stem] for shard in of if shard.stem in done]
        tables = sorted({path.name for shard in of for path in shard.tables})
        used.append(
            ReportLine("used", f"records of {name}", sum(one.records for one in there), tables)
        )
        rules = sum((collections.Counter(one.left_out) for one in there), collections.Counter())
        unused += [
            ReportLine("left out", f"{name}: {rule}", n, ()) for rule, n in sorted(rules.items())
        ]
        if bad := [row for one in there for row, _ in one.bad]:
            unused.append(ReportLine("left out", f"{name}: bad rows", len(bad), bad))
    unused += [
        ReportLine("left out", why, len(names), names) for why, names in found.left_out.items()
    ]
    notes = [ReportLine("note", what, len(names), names) for what, names in found.remarks.items()]
    return [*used, *unused, *notes]


def as_text(table: Sequence[ReportLine]) -> str:
    """Returns the table for a terminal."""
    most = len(str(max((line.count for line in table), default=0)))
    return "\n".join(
        f"  {line.state:8}  {line.count:{most}}  {line.what}"
        + f"  ({named(line.names)})" * bool(line.names)
        for line in table
    )


def as_json(table: Sequence[ReportLine]) -> list[dict[str, Any]]:
    """Returns the table with all names."""
    return [line._asdict() | {"names": [*line.names]} for line in table]


def as_markdown(
    shards: Sequence[Shard], done: Mapping[str, Outcome], found: Found, sentences: Sequence[str]
) -> str:
    """Returns report.md: datasets, the table, and every bad row with its reason."""
    rows, bad = [], []
    for name, grouped in itertools.groupby(shards, lambda shard: shard.dataset.name):
        of = [*grouped]
        there = [done[shard.stem] for shard in of if shard.stem in done]
        listed = [f"- {row}: {' '.join(why.split())}" for one in there for row, why in one.bad]
        counts = [sum(len(shard.rows) for shard in of), sum(one.records for one in there)]
        left_out = sum(sum(one.left_out.values()) for one in there)
        rows.append((name, f"{len(there)} of {len(of)}", *counts, left_out, len(listed)))
        bad += ["", f"## Bad records of {name}", "", *listed] if listed else []
    head = ("dataset", "shards", "rows", "records", "left out", "bad")
    table = [
        (one.state, one.count, one.what, named(one.names).replace("|", r"\|"))
        for one in lines(shards, done, found)
    ]
    parts = ["# Prepared data", "", markdown.table(head, rows)]
    parts += ["", "## Used and left out", "", markdown.table(("", "count", "what", "names"), table)]
    return "\n".join([*parts, *(f"\n{one}" for one in sentences), *bad]) + "\n"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics of a preparation.

    Attributes:
        shards, made: how many there are, and were made now.
        records, left_out, bad: how many rows became records, were excluded by settings, were bad.
        table: what was used and left out.
    """

    shards: int
    made: int
    records: int
    left_out: int
    bad: int
    table: tuple[ReportLine, ...] = ()


def summary(
    shards: Sequence[Shard], made: int, done: Mapping[str, Outcome], found: Found
) -> Summary:
    """Returns the statistics of finished shards, of which `made` were made now."""
    outcomes = done.values()
    return Summary(
        shards=len(shards),
        made=made,
        records=sum(one.records for one in outcomes),
        left_out=sum(sum(one.left_out.values()) for one in outcomes),
        bad=sum(len(one.bad) for one in outcomes),
        table=tuple(lines(shards, done, found)),
    )
