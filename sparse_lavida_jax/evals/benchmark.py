# SPDX-License-Identifier: Apache-2.0
"""What every benchmark is: items by index, how they are put to a model, what becomes of answers.

A benchmark is one file of this folder with a class `Bench`, found by its name. `evals/run.py` runs
it: it keeps one row an item and asks for scores when all are there.
"""

import abc
import dataclasses
import importlib
import pathlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from sparse_lavida_jax import config, evals
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals import metrics
from sparse_lavida_jax.evals.files import EvaluationError, Pixels, Record
from sparse_lavida_jax.inference.batching import LARGEST_SEED
from sparse_lavida_jax.pipeline import SparseLaViDa

MACHINERY = ("benchmark", "circumstances", "files", "lmms", "metrics", "report", "run")
EXPORT, JUDGED = "export", "judged"  # folders: what scorers read, and what they leave


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing that is asked.

    Attributes:
        index: its number in the benchmark.
        key: its official name.
        words: the prompt.
        record: what the official file says of it.
        load: returns the images it is about.
    """

    index: int
    key: str
    words: str
    record: Record
    load: Callable[[], list[Pixels]] = list


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of an item.

    Attributes:
        index, key: of the item.
        seed: of its first row.
        output: of the model, for `json`: text, box, or the names of image files.
        seconds: its share of what its batch took.
    """

    index: int
    key: str
    seed: int
    output: dict[str, Any]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Score:
    """A line of the table.

    Attributes:
        name: what was measured.
        value: in the unit of the benchmark: a share, points, a distance.
        count: items it is of.
        correct: how many of them are right; None where it is no share of right items.
    """

    name: str
    value: float
    count: int
    correct: int | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the share lies with 95 % confidence; None where it is none."""
        return None if self.correct is None else metrics.wilson_interval(self.correct, self.count)

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "interval_95": self.interval}


def share(name: str, hits: Sequence[bool]) -> Score:
    """Returns the share of hits."""
    return Score(name, sum(hits) / max(len(hits), 1), len(hits), sum(hits))


def shares(groups: Sequence[tuple[str, bool]]) -> list[Score]:
    """Returns the share of hits in each group, groups in order of their first member."""
    hits: dict[str, list[bool]] = {}
    for group, hit in groups:
        hits.setdefault(group, []).append(hit)
    return [share(f"- {group}", members) for group, members in hits.items()]


def mean(name: str, values: Sequence[float]) -> Score:
    """Returns the mean of values."""
    return Score(name, sum(values) / max(len(values), 1), len(values))


def are_answered(items: Sequence[Item]) -> bool:
    """Whether the official file says what is right, and not the site of the benchmark alone."""
    return any(item.record.get("answer") not in (None, "", "?") for item in items)


class Benchmark(abc.ABC):
    """A benchmark.

    Args:
        settings: of the evaluation, those of the checkpoint among them.

    Attributes:
        title: its name for people.
        source: where its files come from and how they must lie, in sentences.
        judge: what a person does with the export to get the scores that other people's models
            give, and where to put what they say; "" where there is none.
        items: all of them.

    Raises:
        EvaluationError: files are missing or wrong.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    judge: ClassVar[str] = ""

    def __init__(self, settings: config.Config):
        self.settings = settings.evaluate
        self.sampling = settings.sampling
        self.seed = settings.seed
        self.items = self.first(self.read(settings))
        if not self.items:
            raise EvaluationError(
                f"{self.title} has no item in {self.settings.data}. {self.source}"
            )

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the official files.

        Raises:
            EvaluationError: none was named, or it is not there.
        """
        if not self.settings.data:
            raise EvaluationError(
                f"{self.title} needs --config.evaluate.data=FOLDER, its files. {self.source}"
            )
        folder = pathlib.Path(self.settings.data)
        if not folder.is_dir():
            raise EvaluationError(f"there is no folder {folder}. {self.source}")
        return folder

    @abc.abstractmethod
    def read(self, settings: config.Config) -> list[Item]:
        """Returns all items of the official files."""

    def first(self, items: list[Item]) -> list[Item]:
        """Returns as many items as the settings ask for."""
        return items[: self.settings.limit] if self.settings.limit else items

    @abc.abstractmethod
    def answer(
        self, pipe: SparseLaViDa, items: Sequence[Item], folder: pathlib.Path
    ) -> list[dict[str, Any]]:
        """Returns the output of each item; images are written below `folder`, whole or not."""

    @abc.abstractmethod
    def scores(self, rows: Sequence[Row], folder: pathlib.Path) -> list[Score]:
        """Returns the scores of all rows, and of what judges left in `folder / JUDGED`."""

    def export(self, rows: Sequence[Row], folder: pathlib.Path) -> None:  # noqa: B027
        """Writes below `folder` what the official scorer reads besides images."""

    def batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Yields items that are decoded together."""
        size = max(1, self.settings.batch_size // self.settings.num_images)
        for start in range(0, len(items), size):
            yield list(items[start : start + size])

    def seed_of(self, item: Item) -> int:
        """Returns the seed of an item's first row: the same whatever else is evaluated."""
        return (self.seed + item.index * self.settings.num_images) % (LARGEST_SEED - 2**16)


class ImageBenchmark(Benchmark):
    """Prompts that images are drawn of."""

    def answer(self, pipe, items, folder):
        """Returns the names of the files that were drawn."""
        count = self.settings.num_images
        words = [f"{self.settings.prefix}{item.words}" for item in items]
        seeds = [self.seed_of(item) + i for item in items for i in range(count)]
        result = pipe.generate(words, num_images=count, seed=seeds, sampling=self.sampling)
        drawn = iter(result.pixels)
        outputs = []
        for item in items:
            files = self.keep(item, [next(drawn) for _ in range(count)])
            for name, image in files.items():
                image_files.write(folder / EXPORT / name, image)
            outputs.append({"files": list(files)})
        return outputs

    @abc.abstractmethod
    def keep(self, item: Item, drawn: Sequence[Pixels]) -> dict[str, Pixels]:
        """Returns the images to write, by their names in the official layout."""


class QuestionBenchmark(Benchmark):
    """Questions about images, answered in text."""

    def answer(self, pipe, items, folder):
        """Returns the text of each answer."""
        pipe.prompts.check_task("ask")
        tokens = self.settings.max_new_tokens
        examples = [pipe.prompts.ask(item.words, item.load(), tokens) for item in items]
        seeds = [self.seed_of(item) for item in items]
        bucket = pipe.shared_bucket(examples, self.sampling)
        said = pipe.run(examples, sampling=self.sampling, seed=seeds, bucket=bucket)
        # The released evaluation drops exclamation marks in front of an answer (spec Sec. 6).
        return [{"text": text.strip().lstrip("!").strip()} for text in pipe.texts(said)]


def load(settings: config.Config) -> Benchmark:
    """Returns the benchmark that a config names, its official files read.

    Raises:
        EvaluationError: there is no such benchmark, or its files are missing or wrong.
    """
    name = settings.evaluate.benchmark
    if name not in names():
        raise EvaluationError(f"there is no benchmark {name!r}. There are: {', '.join(names())}.")
    return importlib.import_module(f"{evals.__name__}.{name}").Bench(settings)


def names() -> list[str]:
    """Returns the names of all benchmarks: the files of this folder but for the machinery."""
    return [one.name for one in pkgutil.iter_modules(evals.__path__) if one.name not in MACHINERY]
