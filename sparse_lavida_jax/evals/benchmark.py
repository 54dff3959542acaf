# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: numbered items, how a model is asked, and what is done with answers.

A benchmark is one file of `evals/benchmarks` with its class as `BENCHMARK`, found by its name.
`evals/run.py` runs it: it keeps every answer, and computes the metrics when all are there.
"""

import abc
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files, leftovers
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.evals.official_files import EvaluationError, Record, image_name
from sparse_lavida_jax.evals.scorers import Metric
from sparse_lavida_jax.inference.checks import SEEDS
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sampling.options import changed

EXPORT, JUDGED = "export", "judged"  # folders: the input of scorers, and their output
# One token per step at temperature 0, as in the evaluation of the base model (spec Sec. 6).
TOKEN_BY_TOKEN = {"text": {"temperature": 0.0, "step_ratio": 1.0}}


@dataclasses.dataclass(frozen=True)
class Item:
    """One question or prompt.

    Attributes:
        key: its official name.
        words: the prompt.
        record: its entry in the official file.
        shown: its images: files, contents of files, or functions that return these.
        index: its number in the benchmark.
    """

    key: str
    words: str
    record: Record
    shown: tuple[pathlib.Path | bytes | Callable[[], bytes], ...] = ()
    index: int = 0

    def load(self) -> list[Pixels]:
        """Returns the images, with transparent pixels handled as in lmms-eval.

        Raises:
            ImageError: one cannot be read.
            EvaluationError: one is missing.
        """
        found = (one() if callable(one) else one for one in self.shown)
        return [
            image_files.read_bytes(one, f"an image of {self.key}", backdrop=False)
            if isinstance(one, bytes)
            else image_files.read(one, backdrop=False)
            for one in found
        ]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of a model to an item.

    Attributes:
        item: the item.
        seed: of its first row.
        output: for `json`: text, box, or the names of image files.
        seconds: its share of the time of its batch.
    """

    item: Item
    seed: int
    output: dict[str, Any]
    seconds: float

    @property
    def record(self) -> Record:
        """The official entry."""
        return self.item.record

    @property
    def text(self) -> str:
        """The answer to a question."""
        return self.output["text"]


def written_texts(
    pipe: SparseLaViDa, examples: Sequence[Any], sampling: config.Sampling, seeds: Sequence[int]
) -> list[str]:
    """Returns the text that answers each example; all use one compiled program.

    As in the released evaluation, exclamation marks before an answer are dropped (spec Sec. 6).
    """
    said = pipe.sample(examples, sampling=sampling, seed=seeds, shared=True)
    return [text.strip().lstrip("!").strip() for text in pipe.texts(said)]


def write_images(folder: pathlib.Path, images: Mapping[str, Pixels]) -> dict[str, Any]:
    """Writes images of an answer, named by their paths in the export, and returns its output."""
    for name, image in images.items():
        image_files.write(folder / EXPORT / name, image)
    return {"files": list(images)}


class Benchmark(abc.ABC):
    """A benchmark.

    Args:
        settings: of the evaluation, including those of the checkpoint.

    Attributes:
        title: its name for readers.
        source: in sentences, where its files come from and how they must be arranged.
        judge: how to get the scores given by other models; "": there are none.
        verdicts: a pattern for names of files with the output of judges; "": there are none.
        configs: its settings (`config.Evaluate`), by the names in `configs/evaluate.py`.
        sampled_with: sampling settings (`config.Sampling`) shared by all of these.
        has_tasks: whether some of its tasks can be named (`evaluate.tasks`).
        items: all items.

    Raises:
        EvaluationError: files are missing or wrong, or tasks are named that it does not have.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    judge: ClassVar[str] = ""
    verdicts: ClassVar[str] = ""
    configs: ClassVar[Mapping[str, Mapping[str, Any]]]
    sampled_with: ClassVar[Mapping[str, Any]] = {}
    has_tasks: ClassVar[bool] = False

    def __init__(self, settings: config.Config):
        self.config, self.settings = settings, settings.evaluate
        if self.settings.tasks and not self.has_tasks:
            raise EvaluationError(
                f"evaluate.tasks names {', '.join(self.settings.tasks)}, but {self.title} has no"
                " tasks to choose from: leave it out."
            )
        self.sampling = changed(
            settings.sampling, draws=False, sampler=settings.evaluate.sampler or None
        )
        chosen = enumerate(self.first(self.read()))
        self.items = [dataclasses.replace(item, index=index) for index, item in chosen]
        if not self.items:
            raise EvaluationError(
                f"{self.title} has no item in {self.settings.data}. {self.source}"
            )

    @abc.abstractmethod
    def read(self) -> Iterable[Item]:
        """Returns all items from the official files, without numbers."""

    @abc.abstractmethod
    def answer(
        self, pipe: SparseLaViDa, items: Sequence[Item], folder: pathlib.Path
    ) -> list[dict[str, Any]]:
        """Returns the output for each item; image files in `folder` are complete or not there."""

    def export(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the input of the official scorer, except for images: texts and JSON by file."""
        return {}

    def scores(self, answers: Sequence[Answer], folder: pathlib.Path) -> list[Metric]:
        """Returns the metrics computed from the answers, whose images are in `folder`."""
        return []

    def judged(self, answers: Sequence[Answer], path: pathlib.Path) -> list[Metric]:
        """Returns the metrics from a file matching `verdicts`."""
        return []

    def metrics(self, answers: Sequence[Answer], folder: pathlib.Path) -> list[Metric]:
        """Returns the judges' metrics, from `folder / JUDGED`, then the others; no name twice."""
        paths = sorted((folder / JUDGED).glob(self.verdicts)) if self.verdicts else []
        judged = [metric for path in paths for metric in self.judged(answers, path)]
        return [*judged, *self.scores(answers, folder)]

    def first(self, items: Iterable[Item]) -> Iterable[Item]:
        """Returns only as many items as the settings ask for."""
        return itertools.islice(items, self.settings.limit or None)

    def batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Yields groups of items that are decoded together."""
        size = max(1, self.settings.batch_size // self.settings.num_images)
        for start in range(0, len(items), size):
            yield list(items[start : start + size])

    def seed_of(self, item: Item) -> int:
        """Returns the seed of an item's first row, independent of what else is evaluated."""
        first = item.index * self.settings.num_images
        return (self.config.seed + first) % (SEEDS - 1 - 2**16)

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the official files.

        Raises:
            EvaluationError: none was given, or it does not exist.
        """
        if not self.settings.data:
            raise EvaluationError(
                f"{self.title} needs --config.evaluate.data=FOLDER, its files. {self.source}"
            )
        folder = pathlib.Path(self.settings.data)
        if not folder.is_dir():
            raise EvaluationError(f"there is no folder {folder}. {self.source}")
        return folder

    def file(self, *parts: str) -> pathlib.Path:
        """Returns a path inside the folder of official files.

        Raises:
            EvaluationError: it does not exist.
        """
        path = self.folder.joinpath(*parts)
        if not path.exists():
            raise EvaluationError(f"there is no {path}. {self.source}")
        return path

    def files(self, pattern: str) -> list[pathlib.Path]:
        """Returns the official files that match a pattern, sorted.

        Raises:
            EvaluationError: there is none.
        """
        found = sorted(leftovers.without(self.folder.glob(pattern), self.folder))
        if not found:
            raise EvaluationError(f"there is no {pattern} in {self.folder}. {self.source}")
        return found

    def image(self, name: Any, where: str, *folders: str) -> tuple[pathlib.Path]:
        """Returns the only image of an item.

        Args:
            name: of the file, as in the record at `where`.
            folders: the folders to it.

        Raises:
            EvaluationError: it does not exist, or the name leads out of the folder.
        """
        return (self.file(*folders, image_name(name, where)),)


class ImageBenchmark(Benchmark):
    """Prompts for which images are drawn."""

    def answer(self, pipe, items, folder):
        """Returns the names of the image files."""
        count = self.settings.num_images
        words = [f"{self.settings.prefix}{item.words}" for item in items]
        seeds = [self.seed_of(item) + i for item in items for i in range(count)]
        result = pipe.generate(words, num_images=count, seed=seeds, sampling=self.sampling)
        drawn = iter(result.pixels)
        kept = [self.keep(item, [next(drawn) for _ in range(count)]) for item in items]
        return [write_images(folder, files) for files in kept]

    @abc.abstractmethod
    def keep(self, item: Item, drawn: Sequence[Pixels]) -> dict[str, Pixels]:
        """Returns the images to write, by their names in the official layout."""


class QuestionBenchmark(Benchmark):
    """Questions about images, answered in text.

    Attributes:
        solution: the field with the correct answer; those of test splits are secret.
    """

    sampled_with = TOKEN_BY_TOKEN
    solution: ClassVar[str] = "answer"

    def answer(self, pipe, items, folder):
        """Returns the text of each answer."""
        pipe.prompts.check_task("ask")
        tokens = self.settings.max_new_tokens
        examples = [pipe.prompts.ask(item.words, item.load(), tokens) for item in items]
        seeds = [self.seed_of(item) for item in items]
        return [{"text": said} for said in written_texts(pipe, examples, self.sampling, seeds)]

    def metrics(self, answers, folder):
        """Returns no metrics for a split without correct answers: the official site judges it."""
        if all(one.record.get(self.solution) in (None, "", "?") for one in answers):
            return []
        return super().metrics(answers, folder)
