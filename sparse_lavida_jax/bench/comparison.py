# SPDX-License-Identifier: Apache-2.0
"""Ways to train small models, what they score, and the report of it (`bench/ablation.py`)."""

import collections
import dataclasses
import hashlib
import json
import pathlib
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from sparse_lavida_jax import config, sample, schema, train
from sparse_lavida_jax.bench import table as speed_tables
from sparse_lavida_jax.bench.record import RESULTS, Bench, differing, path_of, read_rows
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.training import runs

AFTER = 1000  # added to the seed of what starts from another way, which so sees other batches
SUITE = "comparison"  # "ablation" is a suite of speeds
SAMPLED_FROM = ("order", "schedule", "shift")  # settings that training reads too (`data/rows.py`)
DEFAULTS = 1  # to be raised when a default changes that a training depends on: `digest`
SPEED_BATCHES = (1, 2, 4)  # of the report
BEGIN, END = "<!-- from here on written by bench.ablation -->", "<!-- up to here -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train, and the ways to sample from what it gives.

    Attributes:
        changes: of the shared settings, section by section.
        after: the way whose model this one starts from; "": from random parameters.
        sampled: changes of the sampling settings, by the name of the way to sample.
        tasks: that are scored; of none those of the ablation.
        group: of ways that each learn tasks of their own, the row of the table that they share.
    """

    changes: dict[str, dict] = dataclasses.field(default_factory=dict)
    after: str = ""
    sampled: dict[str, dict] = dataclasses.field(default_factory=lambda: {"": {}})
    tasks: tuple[str, ...] = ()
    group: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is compared.

    Attributes:
        question: a sentence, the heading of the table.
        tasks: that are scored; "draw/held_out" for combinations that training never shows.
        prompts: of each task.
        batch_size: prompts that are decoded together.
        curve: whether the plot is of the share right over forward passes, a line a kind of
            sampling: the ways to sample up to their first "_". Passes are those of a batch, which
            goes on until its last row has ended: of a response where the batch is one.
    """

    question: str
    tasks: tuple[str, ...]
    ways: dict[str, Way]
    prompts: int = 500
    batch_size: int = 32
    curve: bool = False

    def __post_init__(self):
        for name in (*self.ways, *(s for way in self.ways.values() for s in way.sampled)):
            if not re.fullmatch("[a-z0-9_]*", name):
                raise config.ConfigError(
                    f"the way {name!r} is part of file names: use small letters, digits and _."
                )
        for name, way in self.ways.items():
            if way.after and way.after not in self.ways:
                raise config.ConfigError(
                    f"way {name!r} starts after {way.after!r}, which is none of"
                    f" {', '.join(self.ways)}."
                )


def read(path: pathlib.Path) -> tuple[config.Config, Ablation]:
    """Returns the shared settings of a file, and what it compares.

    Raises:
        ConfigError: as `config.read`.
    """
    return config.read(path), config.build(Ablation, schema.run(path, "get_ablation"))


def settings_of(
    shared: config.Config, ablation: Ablation, way: str, seed: int, folder: pathlib.Path
) -> config.Config:
    """Returns the settings of one run; `folder` holds the runs.

    Its name is that of its folder. It says what is trained and not who asks for it: ways of
    several files that train alike share a run.
    """
    made = config.changed(shared, ablation.ways[way].changes)
    after = ablation.ways[way].after
    base = settings_of(shared, ablation, after, seed, folder).name if after else ""
    made = dataclasses.replace(
        made,
        seed=seed + AFTER * bool(after),
        train=dataclasses.replace(made.train, init_from=str(folder / base) if after else ""),
    )
    return dataclasses.replace(made, name=f"ablation_{digest(made, base)}_s{seed}")


def digest(settings: config.Config, base: str = "") -> str:
    """Returns what names a training: a digest of everything that it depends on but its seed.

    Of what is not the default and of `DEFAULTS`, so that a setting that is added renames nothing.

    Args:
        base: the name of the run that it starts from.
    """
    sampling = config.to_dict(settings.sampling)
    told = config.changes(
        dataclasses.replace(
            settings,
            name="",
            seed=0,
            train=dataclasses.replace(settings.train, init_from=base),
            sampling=config.Sampling(**{name: sampling[name] for name in SAMPLED_FROM}),
        )
    )
    text = json.dumps([DEFAULTS, schema.with_old_names(told)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def measure(
    bench: Bench,
    shared: config.Config,
    ablation: Ablation,
    way: str,
    seed: int,
    folder: pathlib.Path,
) -> Iterator[dict[str, Any]]:
    """Trains a way unless that is done, and scores what has no row yet.

    A row of another training, way to sample or number of prompts is measured again.

    Args:
        folder: where the runs lie.

    Yields:
        The rows, as they are written.
    """
    settings = settings_of(shared, ablation, way, seed, folder)
    place, wanted = [*ablation.ways].index(way), []
    for nth, (sampled, changes) in enumerate(ablation.ways[way].sampled.items()):
        sampling = config.changed(settings, {"sampling": changes}).sampling
        for task in ablation.ways[way].tasks or ablation.tasks:
            row_id = f"{shared.name}/{way}/{sampled}/{task}/s{seed}"
            expected = {
                "training": settings.name,
                "sampling": dataclasses.asdict(sampling),
                "total": ablation.prompts,
            }
            path = path_of(SUITE, row_id)
            if not path.exists() or differing(_completed(path), as_read(expected)):
                wanted.append((nth, sampled, sampling, task, row_id, expected))
    if not wanted:
        return
    pipe = SparseLaViDa.from_pretrained(
        trained(shared, ablation, way, seed, folder), ablation.batch_size
    )
    for nth, sampled, sampling, task, row_id, expected in wanted:
        passes = Passes()
        name, _, split = task.partition("/")
        result = exact.evaluate(
            pipe, name, ablation.prompts, split=split or "test", sampling=sampling, callback=passes
        )
        row = {
            **expected,
            "ablation": shared.name,
            "question": ablation.question,
            "way": way,
            "group": ablation.ways[way].group or way,
            "sampled": sampled,
            "place": [place, nth],
            "seed": seed,
            "train_steps": settings.train.train_steps,
            "changes": ablation.ways[way].changes,
            "after": ablation.ways[way].after,
            "sampling_changes": ablation.ways[way].sampled[sampled],
            "passes": passes.of_a_batch,
            "curve": ablation.curve,
            "method": sampling.preset or presets.default_preset(pipe.settings.model),
            **exact.as_json(result),
            "note": "exact scorers on pixels and text; says nothing about speed",
        }
        bench.write(row_id, row)
        yield row


def _completed(path: pathlib.Path) -> dict[str, Any]:
    """Returns a row; of settings that are younger than it, the default was what it sampled with."""
    row = json.loads(path.read_text())
    return row | {"sampling": as_read(config.to_dict(config.Sampling())) | row["sampling"]}


def as_read(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values as they come back from a file of JSON."""
    return json.loads(json.dumps(values))


class Passes:
    """Counts forward passes, as a callback of `SparseLaViDa.run`."""

    def __init__(self) -> None:
        self._batches: collections.Counter[str] = collections.Counter()
        self._steps: collections.Counter[str] = collections.Counter()
        self._before = 0

    def __call__(self, now: sample.Progress) -> None:
        self._batches[now.making] += not now.steps
        self._steps[now.making] += max(now.steps - self._before, 0)
        self._before = now.steps

    @property
    def of_a_batch(self) -> dict[str, float]:
        """The mean number of passes for each thing that is made: layout, image, text."""
        return {making: self._steps[making] / n for making, n in self._batches.items()}


def trained(
    shared: config.Config, ablation: Ablation, way: str, seed: int, folder: pathlib.Path
) -> str:
    """Returns the folder of a trained model; trains it, and what it begins with, if need be.

    Raises:
        RunError: the folder is of other settings, or another process writes to it.
    """
    if after := ablation.ways[way].after:
        trained(shared, ablation, after, seed, folder)
    settings = settings_of(shared, ablation, way, seed, folder)
    own = folder / settings.name
    with runs.Run(own, settings) as run:
        if not run.model_folder.exists():
            train.train(settings, run)
    return str(own)


# ---------------------------------------------------------------------------------------------
# What is told.

Rows = Sequence[dict[str, Any]]


def table(rows: Rows) -> str:
    """Returns the mean share right of every way and task, and its spread over seeds."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for (way, sampled), own in _grouped(rows).items():
        told = [_named(way, sampled)]
        for task in tasks:
            shares = [row["share"] for row in own if row["task"] == task]
            told.append(_told(shares) if shares else "")
        passes = statistics.mean(map(_passes, own))
        all_steps = [row["train_steps"] for row in own]
        steps = " to ".join(map(str, sorted({min(all_steps), max(all_steps)})))
        steps = f"{own[0]['after']}, then {steps}" if own[0]["after"] else steps
        lines.append((*told, f"{passes:.1f}", steps, len({row["seed"] for row in own})))
    return markdown.table(["way", *tasks, "passes", "steps of training", "seeds"], lines)


def _passes(row: dict[str, Any]) -> float:
    return float(sum(row["passes"].values()))


def newest(rows: Rows) -> list[dict[str, Any]]:
    """Returns one row of each way, task and seed, in the order of the file that asks for them.

    Of those of several devices it is the last.
    """
    found = {}
    for row in sorted(rows, key=lambda row: row["created"]):
        found[row["ablation"], row["way"], row["sampled"], row["task"], row["seed"]] = row
    return sorted(found.values(), key=lambda row: row["place"])


def _grouped(rows: Rows) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found = collections.defaultdict(list)
    for row in rows:
        found[row["group"], row["sampled"]].append(row)
    return dict(found)


def _named(way: str, sampled: str) -> str:
    return f"{way}: {sampled}" if sampled else way


def _told(shares: Sequence[float]) -> str:
    spread = f" ± {_spread(shares):.3f}" if len(shares) > 1 else ""
    return f"{statistics.mean(shares):.3f}{spread}"


def _spread(shares: Sequence[float]) -> float:
    return statistics.stdev(shares) if len(shares) > 1 else 0.0


def write_report(folder: pathlib.Path) -> pathlib.Path:
    """Writes `ablations.md` and an image an ablation, from the committed rows.

    What stands before and behind the two comments of an older file stays.

    Raises:
        ConfigError: there is no row, or the older file has no such comments.
    """
    by_name = collections.defaultdict(list)
    for row in newest(read_rows(SUITE)):
        by_name[row["ablation"]].append(row)
    if not by_name:
        raise config.ConfigError(
            f"there is no row in {RESULTS}/*/{SUITE}: run --config=configs/ablation_registers.py"
            " or another first."
        )
    parts = []
    for name, rows in sorted(by_name.items()):
        image = f"{name}.png"
        plot(rows, folder / image)
        parts += [
            f"## {rows[0]['question']}",
            f"`configs/{name}.py`, {rows[0]['total']} prompts a task: mean and standard deviation"
            " over seeds of the share right; forward passes of what is decoded together.",
            table(rows),
            f"![{name}]({image})",
        ]
    if speed := of_bundled_model(read_rows("sampling")):
        plot_speed(speed, folder / "ablation_speed.png")
        parts += [
            "## What do cache and truncation bring?",
            "`python -m sparse_lavida_jax.bench.sampling --batch=1`, 2 and 4: the bundled model,"
            " medians of rows timed in turn; tokens are those of one response, padding left out.",
            speed_tables.table("sampling", speed),
            "![how many times faster than dense](ablation_speed.png)",
        ]
    path = folder / "ablations.md"
    page = path.read_text() if path.exists() else f"# Ablations\n\n{BEGIN}{END}\n"
    try:
        path.write_text(markdown.with_part(page, BEGIN, END, "\n\n".join(parts)))
    except ValueError as error:
        raise config.ConfigError(f"{path}: {error}") from error
    return path


def plot(rows: Rows, path: pathlib.Path) -> None:
    """Draws the rows of one ablation.

    Raises:
        ConfigError: matplotlib is not there.
    """
    pyplot = _pyplot()
    if any(row["curve"] for row in rows):
        figure, axes = pyplot.subplots(figsize=(5, 3.4))
        _plot_curve(axes, rows)
    else:
        figure, axes = _plot_bars(pyplot, rows)
    axes.set_ylabel("share right")
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def of_bundled_model(rows: Rows) -> list[dict[str, Any]]:
    """Returns the rows of speed that stand beside a dense one of their run and few of a batch."""
    of_dense = {(row["run"], row["task"]) for row in rows if row["method"] == "dense"}
    return [
        row
        for row in rows
        if (row["run"], row["task"]) in of_dense
        and row["batch"] in SPEED_BATCHES
        and not row["random_weights"]
    ]


def plot_speed(rows: Rows, path: pathlib.Path) -> None:
    """Draws how many times faster than dense every preset is, over how many times fewer tokens.

    Raises:
        ConfigError: matplotlib is not there.
    """
    pyplot = _pyplot()
    tasks = sorted({row["task"] for row in rows})
    figure, all_axes = pyplot.subplots(
        1, len(tasks), figsize=(4.5 * len(tasks), 3.6), squeeze=False
    )
    for axes, task in zip(all_axes[0], tasks, strict=True):
        most = 1.0
        for batch in sorted({row["batch"] for row in rows}):
            own = [row for row in rows if (row["task"], row["batch"]) == (task, batch)]
            dense = {row["run"]: row for row in own if row["method"] == "dense"}
            points = {
                row["method"]: (
                    dense[row["run"]]["tokens"]["useful"] / row["tokens"]["useful"],
                    dense[row["run"]]["median_s"] / row["median_s"],
                )
                for row in own
            }
            if not points:
                continue
            axes.plot(*zip(*points.values(), strict=True), ".", label=f"batch {batch}")
            most = max(most, *(x for x, _ in points.values()))
            if batch == max(row["batch"] for row in rows if row["task"] == task):
                for number, (name, point) in enumerate(sorted(points.items(), key=lambda p: p[1])):
                    place = (3, 3) if number % 2 else (3, -8)  # neighbours above and below
                    axes.annotate(name, point, fontsize=6, xytext=place, textcoords="offset points")
        axes.plot((0, most), (0, most), color="0.7", lw=0.8)
        axes.set_xlim(0.5, 1.3 * most)
        axes.set_title(task, fontsize=9)
        axes.set_xlabel("times fewer tokens than dense")
        axes.set_ylabel("times faster than dense")
        axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _pyplot():
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise config.ConfigError(
            "the report draws with matplotlib: pip install 'sparse-lavida-jax[plots]'."
        ) from error
    return pyplot


def _plot_curve(axes, rows: Rows) -> None:
    """Draws the share right over passes, a line a kind of sampling, its spread as bars."""
    kinds = collections.defaultdict(list)
    for (_, sampled), own in _grouped(rows).items():
        shares = [row["share"] for row in own]
        point = (statistics.mean(map(_passes, own)), statistics.mean(shares), _spread(shares))
        kinds[sampled.partition("_")[0]].append(point)
    for kind, points in kinds.items():
        passes, shares, spreads = zip(*sorted(points), strict=True)
        axes.errorbar(passes, shares, spreads, marker=".", lw=1, elinewidth=0.8, label=kind)
    axes.set_xlabel("forward passes")


def _plot_bars(pyplot, rows: Rows):
    """Draws a bar a way and task with its spread over seeds, and every seed as a point."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    ways = _grouped(rows)
    figure, axes = pyplot.subplots(figsize=(1.5 + 0.9 * len(tasks) * max(len(ways) / 4, 1), 3.2))
    width = 0.8 / len(ways)
    for number, ((way, sampled), own) in enumerate(ways.items()):
        at = [place + (number - (len(ways) - 1) / 2) * width for place in range(len(tasks))]
        of_task = [[row for row in own if row["task"] == task] for task in tasks]
        means = [statistics.mean(r["share"] for r in found) if found else 0 for found in of_task]
        spreads = [_spread([r["share"] for r in found]) for found in of_task]
        axes.bar(at, means, width, label=_named(way, sampled), yerr=spreads, error_kw={"lw": 0.8})
        for place, found in zip(at, of_task, strict=True):
            axes.plot([place] * len(found), [r["share"] for r in found], ".", color="0.2", ms=3)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylim(0, 1)
    return figure, axes
