# SPDX-License-Identifier: Apache-2.0
"""DPG-Bench (arXiv:2403.05135): does a picture follow a long prompt?

Files and layout: `dpg_bench` of github.com/TencentQQGYLab/ELLA. The judge is mPLUG, which answers
questions about each picture; from its answers on, the score is a formula.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from sparse_lavida_jax.evals.benchmark import JUDGED, Item, PictureBenchmark, mean
from sparse_lavida_jax.evals.files import (
    EvaluationError,
    check_fields,
    existing,
    matching,
    read_separated,
)

MOST_PICTURES = 4  # on one sheet
DETAIL = "dpg_detail.txt"
FIELDS = ("item_id", "proposition_id", "dependency", "question_natural_language")
# What the official script writes: picture, the part of the sheet, question, answer.
_LINE = re.compile(
    r"^(?P<path>.*), \((?P<part>\d+, \d+, \d+, \d+)\), (?P<question>.*), (?P<answer>.*)$"
)


class Bench(PictureBenchmark):
    """1065 prompts, four pictures each on a sheet of two by two."""

    title = "DPG-Bench"
    source = (
        "Take dpg_bench/prompts and dpg_bench/dpg_bench.csv of github.com/TencentQQGYLab/ELLA, and"
        " put them into the folder as prompts/*.txt and dpg_bench.csv."
    )
    judge = (
        "run dpg_bench/compute_dpg_bench.py of github.com/TencentQQGYLab/ELLA with"
        " --image-root-path set to that folder, --resolution to the side of a picture, --pic-num to"
        f" evaluate.num_images, --res-path to {JUDGED}/dpg.txt beside it."
    )

    def read(self, settings):
        """Returns an item a text file."""
        if self.settings.num_images > MOST_PICTURES:
            raise EvaluationError(
                f"Evaluate.num_images={self.settings.num_images} is more than fit on the sheet of"
                f" DPG-Bench: 1 to {MOST_PICTURES}."
            )
        questions = self._questions()
        items = []
        for index, path in enumerate(matching(self.folder / "prompts", "*.txt", self.source)):
            if path.stem not in questions:
                raise EvaluationError(f"dpg_bench.csv asks nothing of {path}. {self.source}")
            items.append(Item(index, path.stem, path.read_text(encoding="utf-8").strip(), {}))
        return items

    def _questions(self) -> dict[str, dict[str, tuple[int, tuple[int, ...]]]]:
        """Returns the questions of each prompt, with their number and those they depend on."""
        path = existing(self.folder / "dpg_bench.csv", self.source)
        found: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {}
        for number, row in enumerate(read_separated(path, ","), 2):
            where = f"{path}, line {number},"
            check_fields(row, FIELDS, where)
            try:
                parents = tuple(int(float(word)) for word in row["dependency"].split(","))
                proposition = int(float(row["proposition_id"]))
            except ValueError as error:
                raise EvaluationError(f"{where} holds no number: {error}.") from error
            asked = found.setdefault(row["item_id"], {})
            asked[row["question_natural_language"].strip()] = proposition, parents
        return found

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

    def scores(self, rows, folder):
        """Returns the mean over all prompts, of what mPLUG answered."""
        path = folder / JUDGED / DETAIL
        if not path.exists():
            return []
        questions, answers = self._questions(), _answers(path.read_text().splitlines())
        missing = [row.key for row in rows if row.key not in answers]
        if missing:
            raise EvaluationError(
                f"{path} says nothing of {len(missing)} pictures, {missing[0]}.png among them:"
                " judge them again."
            )
        values = []
        for row in rows:
            parts = [score(questions[row.key], given) for given in answers[row.key].values()]
            values.append(100 * sum(parts) / len(parts))
        return [mean("DPG-Bench score", values)]


def score(questions: Mapping[str, tuple[int, Sequence[int]]], answers: Mapping[str, str]) -> float:
    """Returns the share of questions that are answered "yes", theirs to be asked at all.

    A question counts 0 where one that it depends on counts 0, in the order of the numbers.
    Questions without an answer are left out, as the official script leaves out the first of all.

    Args:
        questions: number, and numbers of those it depends on (0: none), by the words.
        answers: by the words.
    """
    numbered = sorted((questions[words], words) for words in answers if words in questions)
    if not numbered:
        raise EvaluationError("the judge answered questions that dpg_bench.csv does not ask.")
    counts: dict[int, float] = {}
    for (number, parents), words in numbered:
        right = float(answers[words] == "yes")
        counts[number] = right if all(counts.get(one, 1.0) for one in parents) else 0.0
    return sum(counts.values()) / len(counts)


def _answers(lines: Sequence[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Returns answers by prompt, part of the sheet, and question."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            raise EvaluationError(f"{DETAIL} has a line that is none of the official: {line!r}.")
        name = re.split(r"[\\/]", match["path"])[-1].split(".")[0]
        part = found.setdefault(name, {}).setdefault(match["part"], {})
        part[match["question"].strip()] = match["answer"].strip()
    return found
