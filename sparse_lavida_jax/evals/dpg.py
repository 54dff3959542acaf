# SPDX-License-Identifier: Apache-2.0
"""DPG-Bench (arXiv:2403.05135): does an image follow a long prompt?

Files and layout: `dpg_bench` of github.com/TencentQQGYLab/ELLA. The judge is mPLUG, which answers
questions about each image; from its answers on, the score is a formula.
"""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sparse_lavida_jax.evals.benchmark import JUDGED, ImageBenchmark, Item
from sparse_lavida_jax.evals.files import EvaluationError, read_text, records
from sparse_lavida_jax.evals.scorers import grouped, mean

MOST_IMAGES = 4  # on one sheet
FIELDS = ("item_id", "proposition_id", "dependency", "question_natural_language")
# What the official script writes: image, the part of the sheet, question, answer.
_LINE = re.compile(
    r"^(?P<path>.*), \((?P<part>\d+, \d+, \d+, \d+)\), (?P<question>.*), (?P<answer>.*)$"
)


@dataclasses.dataclass(frozen=True)
class Question:
    """What the judge is asked about an image.

    Attributes:
        number: of the question among those of its prompt.
        words: of it.
        parents: numbers of those that it depends on; 0: none.
    """

    number: int
    words: str
    parents: tuple[int, ...]


class Bench(ImageBenchmark):
    """1065 long prompts, four images each on a sheet of two by two (table 2 of the paper)."""

    title = "DPG-Bench"
    source = (
        "Take dpg_bench/prompts and dpg_bench/dpg_bench.csv of github.com/TencentQQGYLab/ELLA, and"
        " put them into the folder as prompts/*.txt and dpg_bench.csv."
    )
    judge = (
        "run dpg_bench/compute_dpg_bench.py of github.com/TencentQQGYLab/ELLA with"
        " --image-root-path set to that folder, --resolution to the side of an image, --pic-num to"
        f" evaluate.num_images, --res-path to {JUDGED}/dpg.txt next to it."
    )
    verdicts = "dpg_detail.txt"
    configs: ClassVar = {"dpg": {"num_images": 4}}

    def read(self):
        """Yields an item for each text file."""
        if self.settings.num_images > MOST_IMAGES:
            raise EvaluationError(
                f"Evaluate.num_images={self.settings.num_images} is more than fit on the sheet of"
                f" DPG-Bench: 1 to {MOST_IMAGES}."
            )
        questions = self._questions()
        for path in self.files("prompts/*.txt"):
            if path.stem not in questions:
                raise EvaluationError(f"dpg_bench.csv asks nothing of {path}. {self.source}")
            yield Item(path.stem, read_text(path).strip(), {})

    def _questions(self) -> dict[str, list[Question]]:
        """Returns the questions of each prompt, in the order of the file."""
        found = []
        for _, row, where in records(self.file("dpg_bench.csv"), FIELDS):
            try:
                parents = tuple(int(float(word)) for word in row["dependency"].split(","))
                proposition = int(float(row["proposition_id"]))
            except ValueError as error:
                raise EvaluationError(f"{where} holds no number: {error}.") from error
            words = row["question_natural_language"].strip()
            found.append((row["item_id"], Question(proposition, words, parents)))
        return grouped(found)

    def keep(self, item, drawn):
        """Returns the sheet."""
        if len(drawn) == 1:
            return {f"{item.key}.png": drawn[0]}
        height, width = drawn[0].shape[:2]
        page = np.zeros((2 * height, 2 * width, 3), np.uint8)
        for i, one in enumerate(drawn):
            top, left = i // 2 * height, i % 2 * width
            page[top : top + height, left : left + width] = one
        return {f"{item.key}.png": page}

    def judged(self, answers, path):
        """Returns the mean over all prompts of the shares that mPLUG's answers give."""
        questions, judged = self._questions(), _judged(path)
        keys = [one.item.key for one in answers]
        if missing := [key for key in keys if key not in judged]:
            raise EvaluationError(
                f"{path} says nothing of {len(missing)} images, {missing[0]}.png among them:"
                " judge them again."
            )
        values = []
        for key in keys:
            parts = judged[key]
            if len(parts) != self.settings.num_images:
                raise EvaluationError(
                    f"{path} judges {len(parts)} images of {key}.png, and"
                    f" {self.settings.num_images} were drawn: judge it again."
                )
            shares = [
                score(questions[key], said, f"{path}, {key}.png, part ({part}),")
                for part, said in parts.items()
            ]
            values.append(100 * sum(shares) / len(shares))
        return [mean("DPG-Bench score", values)]


def score(questions: Sequence[Question], said: Sequence[tuple[str, str]], where: str) -> float:
    """Returns the share of questions that count: answered "yes", and so those they depend on.

    A question counts 0 where one that it depends on counts 0, in the order of the file: of a later
    one its answer counts. The official script leaves out the first question of
    all; what depends on it has one dependency fewer.

    Args:
        questions: of one prompt.
        said: words and answers, in the order in which they were written; of an image that was
            judged several times the last ones count.
        where: for the message.

    Raises:
        EvaluationError: other questions were answered, or not all.
    """
    for asked in (questions, questions[1:]):
        last = said[max(len(said) - len(asked), 0) :]
        if asked and [words for words, _ in last] == [question.words for question in asked]:
            break
    else:
        raise EvaluationError(
            f"{where} has {len(said)} answers, and not one for each of the {len(questions)}"
            " questions of dpg_bench.csv, in their order: judge it again."
        )
    answers = [float(answer == "yes") for _, answer in last]
    counts = dict(zip([one.number for one in asked], answers, strict=True))
    for question in asked:
        if not all(counts.get(parent, 1.0) for parent in question.parents):
            counts[question.number] = 0.0
    return sum(counts.values()) / len(counts)


def _judged(path: pathlib.Path) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Returns questions and answers, as they come, by prompt and part of the sheet."""
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for line in read_text(path).splitlines():
        match = _LINE.match(line)
        if match is None:
            raise EvaluationError(f"{path} has a line that is none of the official: {line!r}.")
        name = re.split(r"[\\/]", match["path"])[-1].split(".")[0]
        part = found.setdefault(name, {}).setdefault(match["part"], [])
        part.append((match["question"].strip(), match["answer"].strip()))
    return found
