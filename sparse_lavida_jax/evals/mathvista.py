# SPDX-License-Identifier: Apache-2.0
"""MathVista (arXiv:2310.02255): questions about figures, charts and photographs with numbers.

Files: huggingface.co/datasets/AI4Math/MathVista, whose column `query` is the official prompt;
scorer: github.com/lupantech/MathVista. Where its rules find no answer it asks GPT-4; here such an
answer is wrong, and the table says how many there are.
"""

import functools
import re
from collections.abc import Mapping

from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.evals.benchmark import (
    JUDGED,
    Item,
    QuestionBenchmark,
    are_answered,
    share,
    shares,
)
from sparse_lavida_jax.evals.files import (
    EvaluationError,
    Parquet,
    check_fields,
    matching,
    read_json,
)
from sparse_lavida_jax.evals.metrics import edit_distance

FIELDS = ("pid", "question", "image", "question_type", "answer_type", "query")
OTHERS = ("choices", "unit", "precision", "answer", "metadata")
OUTPUT = "output.json"


class Bench(QuestionBenchmark):
    """1000 questions (testmini)."""

    title = "MathVista"
    source = (
        "Take huggingface.co/datasets/AI4Math/MathVista: the folder holds"
        " data/testmini-00000-of-00001-*.parquet. evaluate.split names the split."
    )
    judge = (
        f"run evaluation/extract_answer.py of github.com/lupantech/MathVista on its {OUTPUT},"
        f" which asks GPT-4 to find the answers, and put the result into {JUDGED}/{OUTPUT}"
        " beside it."
    )

    def read(self, settings):
        """Returns an item a question."""
        paths = matching(self.folder, f"data/{self.settings.split}-*.parquet", self.source)
        table = Parquet(paths, FIELDS, OTHERS, ("decoded_image",))
        items = []
        for index, record in enumerate(table.records):
            load = functools.partial(table.images, index, ("decoded_image",))
            items.append(Item(index, str(record["pid"]), record["query"], record, load))
        return items

    def export(self, rows, folder):
        """Writes the answers as `evaluation/extract_answer.py` reads them."""
        write_json(
            folder / OUTPUT,
            {
                item.key: {
                    "choices": None, "unit": None, "precision": None, **item.record,
                    "response": row.output["text"],
                }
                for item, row in zip(self.items, rows, strict=True)
            },
        )  # fmt: skip

    def scores(self, rows, folder):
        """Returns the share of right answers: found by rules, and by GPT-4 if it was asked."""
        if not are_answered(self.items):
            return []  # the test split is judged elsewhere
        hits, unread = [], []
        for item, row in zip(self.items, rows, strict=True):
            extracted = extract(row.output["text"], item.record)
            unread.append(extracted is None)
            hits.append((_task(item), is_right(extracted, item.record)))
        found = [
            share("accuracy, answers found by rules", [hit for _, hit in hits]),
            share("answers that no rule finds, counted wrong", unread),
            *shares(hits),
        ]
        path = folder / JUDGED / OUTPUT
        if not path.exists():
            return found
        judged = read_json(path, dict)
        hits = []
        for item in self.items:
            said = check_fields(judged.get(item.key), ("extraction",), f"{path}, {item.key},")
            hits.append((_task(item), is_right(str(said["extraction"]), item.record)))
        return [share("accuracy", [hit for _, hit in hits]), *shares(hits), *found[:2]]


def _task(item: Item) -> str:
    return str((item.record.get("metadata") or {}).get("task", "all"))


def extract(said: str, record: Mapping) -> str | None:
    """Returns the answer in a response by the official rules; None where none of them holds.

    An option as it stands, a letter "(B)" or "B" alone (the official script resolves these later),
    a whole response that is a number, or 'The answer is "...".'.
    """
    said = said.strip()
    choices = record.get("choices") or []
    if record["question_type"] == "multi_choice":
        letters = [chr(ord("A") + i) for i in range(len(choices))]
        if said in choices or said in letters or re.fullmatch(r"\(([a-zA-Z])\).*", said):
            return said
    for kind, read in (("integer", int), ("float", float)):
        if record["answer_type"] == kind:
            try:
                return str(read(said))
            except ValueError:
                pass
    match = re.search(r'The answer is "(.*)"\.', said)
    return match[1] if match else None


def is_right(extracted: str | None, record: Mapping) -> bool:
    """Whether an extracted answer, brought into the form of the right one, equals it."""
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
    """Returns the option that is meant: by its letter, else the one of least edit distance."""
    if match := re.search(r"\(([a-zA-Z])\)", said):
        said = match[1].upper()
    place = ord(said) - ord("A") if len(said) == 1 else -1
    if 0 <= place < len(choices):
        return choices[place]
    if not choices:
        raise EvaluationError("a question of options has none.")
    return min(choices, key=lambda choice: edit_distance(said, choice))
