# SPDX-License-Identifier: Apache-2.0
"""The page of the ablations, with its tables and plots, from the committed rows."""

import collections
import contextlib
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import measurements, table
from benchmarks.comparison import SUITE
from sparse_lavida_jax import config
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.evals.scorers import mean_and_spread, spread
from sparse_lavida_jax.sampling import costs

SPEED_BATCHES = (1, 2, 4)
PAGE = "log/2026-11-ablations.md"  # in the folder of the plots
BEGIN, END = "<!-- from here on written by benchmarks.ablation -->", "<!-- up to here -->"

Row = dict[str, Any]
Rows = Sequence[Row]


def newest(rows: Rows) -> list[Row]:
    """Returns one row for each way, task and seed, in the order of the file that defines them.

    If there are rows from several devices, the last one is used.
    """
    found = {}
    for row in sorted(rows, key=lambda row: row["created"]):
        found[row["ablation"], row["way"], row["sampled"], row["task"], row["seed"]] = row
    return sorted(found.values(), key=lambda row: row["place"])


def summary(rows: Rows) -> str:
    """Returns the mean share correct for every way and task, with its spread over seeds."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for name, own in _grouped(rows).items():
        told = [name, *(mean_and_spread(_shares(own, task)) for task in tasks)]
        all_steps = [row["train_steps"] for row in own]
        steps = " to ".join(map(str, sorted({min(all_steps), max(all_steps)})))
        steps = f"{own[0]['after']}, then {steps}" if own[0]["after"] else steps
        lines.append((*told, f"{_passes(own):.1f}", steps, len({row["seed"] for row in own})))
    return markdown.table(["way", *tasks, "passes", "training steps", "seeds"], lines)


def _grouped(rows: Rows) -> dict[str, list[Row]]:
    """Groups rows by the way to train and to sample."""
    found = collections.defaultdict(list)
    for row in rows:
        sampled = f": {row['sampled']}" if row["sampled"] else ""
        found[f"{row['group']}{sampled}"].append(row)
    return found


def _shares(rows: Rows, task: str) -> list[float]:
    return [row["share"] for row in rows if row["task"] == task]


def _passes(rows: Rows) -> float:
    return statistics.fmean(sum(row["passes"].values()) for row in rows)


def write_report(folder: pathlib.Path) -> pathlib.Path:
    """Writes `PAGE`, and a plot for each ablation into the folder, from the committed rows.

    In an existing file, everything before and after the two marker comments is kept.

    Raises:
        ConfigError: there are no rows, or the existing file has no such comments.
    """
    by_name = collections.defaultdict(list)
    for row in newest(measurements.read_rows(SUITE)):
        by_name[row["ablation"]].append(row)
    if not by_name:
        raise config.ConfigError(
            f"there is no row in {measurements.RESULTS}/*/{SUITE}: run"
            " --config=configs/ablation_registers.py or another first."
        )
    parts = []
    for name, rows in sorted(by_name.items()):
        plot(rows, folder / f"{name}.png")
        parts += [
            f"## {rows[0]['question']}",
            f"`configs/{name}.py`: the share of {rows[0]['total']} prompts per task answered"
            " correctly, mean and standard deviation over seeds, and the number of forward passes.",
            summary(rows),
            f"![{name}](../{name}.png)",
        ]
    if speed := of_bundled_model(measurements.read_rows("sampling")):
        parts += [
            "## What do cache and truncation bring?",
            "`python -m benchmarks.sampling --batch=1`, and with 2 and 4, with the"
            " bundled model. Times are medians of rows that were timed in turn. "
            + costs.DEFINITION
            + " Here no layout was written, which leaves a drawing a shorter prompt, and texts have"
            " their full length.",
            table.table("sampling", speed),
        ]
    path = folder / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    page = path.read_text() if path.exists() else f"# Ablations\n\n{BEGIN}{END}\n"
    try:
        path.write_text(markdown.with_part(page, BEGIN, END, "\n\n".join(parts)))
    except ValueError as error:
        raise config.ConfigError(f"{path}: {error}") from error
    return path


def of_bundled_model(rows: Rows) -> list[Row]:
    """Returns speed rows that have a dense row in the same run, for small batches."""
    return [
        row
        for row in rows
        if table.row_of(rows, row, "dense")
        and row["batch"] in SPEED_BATCHES
        and not row["random_weights"]
    ]


# ---------------------------------------------------------------------------------------------
# Plots.


@contextlib.contextmanager
def figure(path: pathlib.Path, **options) -> Iterator[Any]:
    """Yields the axes of a figure, and writes it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise config.ConfigError(
            "the report draws with matplotlib: pip install 'sparse-lavida-jax[plots]'."
        ) from error
    drawn, axes = pyplot.subplots(**options)
    yield axes
    drawn.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(drawn)


def plot(rows: Rows, path: pathlib.Path) -> None:
    """Draws the rows of one ablation.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    is_curve = any(row["curve"] for row in rows)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    ways = _grouped(rows)
    width = 1.5 + 0.9 * len(tasks) * max(len(ways) / 4, 1)
    with figure(path, figsize=(5, 3.4) if is_curve else (width, 3.2)) as axes:
        if is_curve:
            _plot_curve(axes, rows)
        else:
            _plot_bars(axes, ways, tasks)
        axes.set_ylabel("share correct")
        axes.set_ylim(0, 1)
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _plot_curve(axes, rows: Rows) -> None:
    """Draws the share correct over passes, a line per kind of sampling, its spread as bars."""
    kinds = collections.defaultdict(list)
    for own in _grouped(rows).values():
        shares = [row["share"] for row in own]
        point = (_passes(own), statistics.mean(shares), spread(shares))
        kinds[own[0]["sampled"].partition("_")[0]].append(point)
    for kind, points in kinds.items():
        passes, shares, spreads = zip(*sorted(points), strict=True)
        axes.errorbar(passes, shares, spreads, marker=".", lw=1, elinewidth=0.8, label=kind)
    axes.set_xlabel("forward passes")


def _plot_bars(axes, ways: dict[str, list[Row]], tasks: Sequence[str]) -> None:
    """Draws a bar for each way and task, with its spread over seeds, and a point for each seed."""
    width = 0.8 / len(ways)
    if len(ways) > 10:  # the default colours would recur
        from matplotlib import colormaps

        tab20 = colormaps["tab20"]
        axes.set_prop_cycle(color=[tab20(i) for i in range(tab20.N)])
    for number, (name, own) in enumerate(ways.items()):
        at = [place + (number - (len(ways) - 1) / 2) * width for place in range(len(tasks))]
        shares = [_shares(own, task) for task in tasks]
        means = [statistics.mean(found) if found else 0 for found in shares]
        spreads = [*map(spread, shares)]
        axes.bar(at, means, width, label=name, yerr=spreads, error_kw={"lw": 0.8})
        for place, found in zip(at, shares, strict=True):
            axes.plot([place] * len(found), found, ".", color="0.2", ms=3)
    axes.set_xticks(range(len(tasks)), tasks)
