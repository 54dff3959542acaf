# SPDX-License-Identifier: Apache-2.0
"""MathVista (arXiv:2310.02255): questions about figures, charts and photographs with numbers.

Files: huggingface.co/datasets/AI4Math/MathVista, whose column `query` is the official prompt;
scorer: github.com/lupantech/MathVista. If its rules find no answer it asks GPT-4; here such an
answer counts as wrong, and the table says how many there are.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from sparse_lavida_jax.evals.benchmark import JUDGED, Item, QuestionBenchmark
from sparse_lavida_jax.evals.official_files import (
    EvaluationError,
    check_fields,
    read_parquet,
    records,
)
from sparse_lavida_jax.evals.scorers import Metric, edit_distance, mean, means

FIELDS = ("pid", "question", "image", "question_type", "answer_type", "query")
OTHERS = ("choices", "unit", "precision", "answer", "metadata")
OUTPUT = "output.json"


class MathVista(QuestionBenchmark):
    """1000 questions, testmini (table 4 of the paper).

    Room for 1024 tokens in blocks of 32, as in the paper; the paper does not say how many
    tokens it decodes per step.
    """

    title = "MathVista"
    source = (
        "Take huggingface.co/datasets/AI4Math/MathVista: the folder holds"
        " data/testmini-00000-of-00001-*.parquet. evaluate.split names the split."
    )
    judge = (
        f"run evaluation/extract_answer.py of github.com/lupantech/MathVista on its {OUTPUT},"
        f" which asks GPT-4 to find the answers, and put the result into {JUDGED}/{OUTPUT}"
        " next to it."
    )
    verdicts = OUTPUT
    configs: ClassVar = {"mathvista": {"split": "testmini", "max_new_tokens": 1024}}

    def read(self):
        """Yields an item for each question."""
        paths = self.files(f"data/{self.settings.split}-*.parquet")
        for record, images in read_parquet(paths, FIELDS, OTHERS, ("decoded_image",)):
            key = str(record["pid"])
            check_fields(images, ("decoded_image",), f"{self.title}, {key},")
            yield Item(key, record["query"], record, tuple(images.values()))

    def export(self, answers):
        """Returns the answers as `evaluation/extract_answer.py` reads them."""
        absent = {"choices": None, "unit": None, "precision": None}
        said = {one.item.key: {**absent, **one.record, "response": one.text} for one in answers}
        return {OUTPUT: said}

    def scores(self, answers, folder):
        """Returns the share of answers found correct by rules."""
        extracted = [extract(one.text, one.record) for one in answers]
        name = "accuracy, answers found by rules"
        whole, *parts = self._accuracy(name, extracted, ending=", by rules")
        unread = [one is None for one in extracted]
        return [whole, mean("answers that no rule finds, counted wrong", unread), *parts]

    def judged(self, answers, path):
        """Returns the share of answers that GPT-4 found correct."""
        found = {key: str(one["extraction"]) for key, one, _ in records(path, ("extraction",))}
        check_fields(found, [item.key for item in self.items], str(path))
        return self._accuracy("accuracy", [found[item.key] for item in self.items])

    def _accuracy(
        self, name: str, extracted: Sequence[str | None], ending: str = ""
    ) -> list[Metric]:
        """Returns the share of correct answers, overall and for each task."""
        hits = []
        for item, said in zip(self.items, extracted, strict=True):
            task = (item.record.get("metadata") or {}).get("task", "all")
            hits.append((str(task), is_right(said, item.record)))
        return means(name, hits, ending=ending)


def extract(said: str, record: Mapping) -> str | None:
    """Returns the answer in a response by the official rules; None if none applies.

    It is an option as written, a letter "(B)" or "B" alone (the official script resolves these
    later), a whole response that is a number, or 'The answer is "...".'.
    """
    said = said.strip()
    choices = record.get("choices") or []
    if record["question_type"] == "multi_choice":
        letters = [chr(ord("A") + i) for i in range(len(choices))]
        if said in choices or said in letters or re.fullmatch(r"\(([a-zA-Z])\).*", said):
            return said
    if read := {"integer": int, "float": float}.get(record["answer_type"]):
        with contextlib.suppress(ValueError):
            return str(read(said))
    match = re.search(r'The answer is "(.*)"\.', said)
    return match[1] if match else None


def is_right(extracted: str | None, record: Mapping) -> bool:
    """Whether an extracted answer, converted to the form of the correct one, equals it."""
    if extracted is None:
        return False
    wanted, choices = str(record["answer"]).strip(), record.get("choices") or []
    if record["question_type"] == "multi_choice":
        return bool(choices) and _choice(extracted.strip(), choices) == wanted
    if record["answer_type"] in ("integer", "float"):
        try:
            value = float(extracted)
            whole = record["answer_type"] == "integer"
            said = str(int(value)) if whole else str(round(value, int(record["precision"])))
        except (ValueError, OverflowError, KeyError, TypeError):
            return False
        return said == wanted
    return extracted.strip() == wanted


def _choice(said: str, choices: list[str]) -> str:
    """Returns the option that is meant: by its letter, or by the smallest edit distance."""
    if match := re.search(r"\(([a-zA-Z])\)", said):
        said = match[1].upper()
    place = ord(said) - ord("A") if len(said) == 1 else -1
    if 0 <= place < len(choices):
        return choices[place]
    if not choices:
        raise EvaluationError("a question of options has none.")
    return min(choices, key=lambda choice: edit_distance(said, choice))


BENCHMARK = MathVista
