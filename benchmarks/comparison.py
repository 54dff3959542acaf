# SPDX-License-Identifier: Apache-2.0
"""Ways to train small models, and their scores (`benchmarks/ablation.py`)."""

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.measurements import Bench, differing, path_of, read_row
from sparse_lavida_jax import config, old_names, schema, train
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sampling.progress import Progress
from sparse_lavida_jax.training import runs

AFTER = 1000  # added to the seed of runs that start from another way, to give them other batches
SUITE = "comparison"  # "ablation" is a suite of speeds
SAMPLED_FROM = ("order", "schedule", "shift")  # settings that training reads too (`data/batch.py`)
DEFAULTS = 1  # increase when a default changes that training depends on: `digest`

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train, and the ways to sample from its model.

    Attributes:
        changes: to the shared settings, section by section.
        after: the way whose model this one starts from; "": from random parameters.
        sampled: changes to the sampling settings, by the name of the way to sample.
        tasks: tasks to score; empty: those of the ablation.
        group: the table row shared by ways that each learn different tasks.
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
        tasks: tasks to score; "draw/held_out" for combinations that training never shows.
        prompts: per task.
        batch_size: prompts decoded together.
        curve: whether to plot the share correct over forward passes, with a line per kind of
            sampling: the names of ways to sample up to their first "_". Passes are those of a
            batch, which ends with its last row, so those of a response if the batch size is 1.
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


@dataclasses.dataclass(frozen=True)
class Study:
    """An ablation, its shared settings, and the folder of its runs."""

    shared: config.Config
    ablation: Ablation
    folder: pathlib.Path = pathlib.Path("runs")

    @classmethod
    def read(cls, path: pathlib.Path, folder: pathlib.Path = folder) -> "Study":
        """Reads the ablation that a file defines.

        Raises:
            ConfigError: as `config.read`.
        """
        ablation = config.build(Ablation, schema.run(path, "get_ablation"))
        return cls(config.read(path), ablation, folder)

    def settings(self, name: str, seed: int) -> config.Config:
        """Returns the settings of one run of a way.

        The run's name is also that of its folder. It identifies what is trained, not the ablation,
        so ways of several files that train alike share a run.
        """
        way = self.ablation.ways[name]
        made = config.changed(self.shared, way.changes)
        base = self.settings(way.after, seed).name if way.after else ""
        train = dataclasses.replace(made.train, init_from=str(self.folder / base) if base else "")
        made = dataclasses.replace(made, seed=seed + AFTER * bool(way.after), train=train)
        return dataclasses.replace(made, name=f"ablation_{digest(made, base)}_s{seed}")

    def trained(self, name: str, seed: int) -> str:
        """Returns the folder of a trained model; trains it, and the one it starts from, if needed.

        Raises:
            RunError: the folder belongs to other settings, or another process writes to it.
        """
        if after := self.ablation.ways[name].after:
            self.trained(after, seed)
        settings = self.settings(name, seed)
        own = self.folder / settings.name
        with runs.Run(own, settings) as run:
            if not run.model_folder.exists():
                train.train(settings, run)
        return str(own)

    def measure(self, bench: Bench, name: str, seed: int) -> Iterator[Row]:
        """Trains a way unless that is done, and scores tasks that have no row yet.

        A row with other training, sampling or number of prompts is measured again.

        Yields:
            The rows, as they are written.
        """
        settings, way, pipe = self.settings(name, seed), self.ablation.ways[name], None
        tasks = way.tasks or self.ablation.tasks
        for sampled, task in itertools.product(way.sampled, tasks):
            changes = {"sampling": way.sampled[sampled]}
            sampling = config.changed(settings, changes).sampling
            row_id = f"{self.shared.name}/{name}/{sampled}/{task}/s{seed}"
            # A row with other values is measured again.
            row = {
                "training": settings.name,
                "sampling": dataclasses.asdict(sampling),
                "total": self.ablation.prompts,
            }
            if _is_there(row_id, row):
                continue
            pipe = pipe or SparseLaViDa.from_pretrained(
                self.trained(name, seed), self.ablation.batch_size
            )
            passes, (skill, _, split) = Passes(), task.partition("/")
            how = {"split": split or "test", "sampling": sampling, "callback": passes}
            result = exact.evaluate(pipe, skill, self.ablation.prompts, **how)
            row |= {
                "ablation": self.shared.name,
                "question": self.ablation.question,
                "way": name,
                "group": way.group or name,
                "sampled": sampled,
                "place": [[*self.ablation.ways].index(name), [*way.sampled].index(sampled)],
                "seed": seed,
                "train_steps": settings.train.train_steps,
                "after": way.after,
                "curve": self.ablation.curve,
                "passes": passes.of_a_batch,
                **exact.as_json(result),
                "note": "exact scorers on pixels and text; says nothing about speed",
            }
            bench.write(row_id, row)
            yield row


def _is_there(row_id: str, wanted: Row) -> bool:
    """Whether a row has these values; settings newer than the row count as their defaults."""
    path = path_of(SUITE, row_id)
    if not path.exists():
        return False
    row = read_row(path)
    sampling = config.to_dict(config.changed(config.Sampling(), row["sampling"]))
    return not differing(
        *(json.loads(json.dumps(x)) for x in (row | {"sampling": sampling}, wanted))
    )


def digest(settings: config.Config, base: str = "") -> str:
    """Returns an identifier of a training run: a digest of all that it depends on except its seed.

    It covers settings that are not the defaults, and `DEFAULTS`, so adding a setting changes no
    digest.

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
    text = json.dumps([DEFAULTS, old_names.before(told)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class Passes:
    """Counts forward passes, as a callback of `SparseLaViDa.run`."""

    def __init__(self) -> None:
        self._batches: collections.Counter[str] = collections.Counter()
        self._steps: collections.Counter[str] = collections.Counter()
        self._before = 0

    def __call__(self, now: Progress) -> None:
        self._batches[now.stage] += not now.steps
        self._steps[now.stage] += max(now.steps - self._before, 0)
        self._before = now.steps

    @property
    def of_a_batch(self) -> dict[str, float]:
        """The mean number of passes for each stage: layout, image, text."""
        return {stage: self._steps[stage] / n for stage, n in self._batches.items()}
