# SPDX-License-Identifier: Apache-2.0
"""MMMU (arXiv:2311.16502): questions of college courses, some with several images.

Files: huggingface.co/datasets/MMMU/MMMU; scorer: github.com/MMMU-Benchmark/MMMU, whose rules of
reading an answer are followed here. The wording is that of lmms-eval, with which the base model was
evaluated.
"""

import ast
import contextlib
import functools
import random
import re
from collections.abc import Mapping, Sequence

from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark, are_answered, share, shares
from sparse_lavida_jax.evals.files import EvaluationError, Parquet, matching

FIELDS = ("id", "question", "options", "question_type")
OTHERS = ("answer", "subfield")
IMAGES = tuple(f"image_{i}" for i in range(1, 8))
CHOOSE = "Answer with the option's letter from the given choices directly."
SAY = "Answer the question using a single word or phrase."
# Words that an answer stands behind.
KEYS = (
    "could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ",
)  # fmt: skip
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),  # 1,234
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),  # 1.2e3
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


class Bench(QuestionBenchmark):
    """900 questions of 30 subjects (validation)."""

    title = "MMMU"
    source = (
        "Take huggingface.co/datasets/MMMU/MMMU as it is: the folder holds one folder a subject,"
        " such as Accounting/validation-00000-of-00001.parquet. evaluate.split names the split."
    )

    def read(self, settings):
        """Returns an item a question."""
        paths = matching(self.folder, f"*/{self.settings.split}-*.parquet", self.source)
        table = Parquet(paths, FIELDS, OTHERS, IMAGES)
        return [self._item(table, row, record) for row, record in enumerate(table.records)]

    def _item(self, table: Parquet, row: int, record: dict) -> Item:
        options = options_of(record)
        words = record["question"]
        if record["question_type"] == "multiple-choice":
            listed = (f"{letter}. {text}" for letter, text in options.items())
            words = f"{words}\n{chr(10).join(listed)}\n\n{CHOOSE}"
        else:
            words = f"{words}\n\n{SAY}"
        shown = sorted({int(number) for number in re.findall(r"<image (\d+)>", words)})
        load = functools.partial(table.images, row, [f"image_{number}" for number in shown])
        return Item(row, record["id"], words, record, load)

    def export(self, rows, folder):
        """Writes the answers as `eval/main_eval_only.py` reads them."""
        answers = {}
        for item, row in zip(self.items, rows, strict=True):
            options = options_of(item.record)
            said = row.output["text"]
            choice = item.record["question_type"] == "multiple-choice"
            answers[item.key] = letter_of(said, options, item.key) if choice else said
        write_json(folder / "total_val_output.json", answers)

    def scores(self, rows, folder):
        """Returns the share of right answers; none for the test split, which the site judges."""
        if not are_answered(self.items):
            return []
        hits = []
        for item, row in zip(self.items, rows, strict=True):
            subject = "_".join(item.key.split("_")[1:-1]) or item.key
            hits.append((subject, is_right(item.record, row.output["text"], item.key)))
        return [share("accuracy", [hit for _, hit in hits]), *shares(hits)]


def options_of(record: Mapping) -> dict[str, str]:
    """Returns the options of a question by their letters; the file has them as a list in words.

    Raises:
        EvaluationError: they are none.
    """
    try:
        options = ast.literal_eval(record["options"])
    except (ValueError, SyntaxError) as error:
        raise EvaluationError(
            f"{record['id']} has options that are no list: {record['options']!r}."
        ) from error
    return {chr(ord("A") + i): str(option) for i, option in enumerate(options)}


def is_right(record: Mapping, said: str, key: str) -> bool:
    """Whether an answer is right; a question may have several right ones."""
    if record["question_type"] == "multiple-choice":
        return letter_of(said, options_of(record), key) == record["answer"]
    wanted = record["answer"]
    if wanted.startswith("["):
        with contextlib.suppress(ValueError, SyntaxError):  # "[4, 5)" is one answer
            wanted = ast.literal_eval(wanted)
    rights = [one for text in _listed(wanted) for one in _comparable(text)]
    for given in open_answers(said):
        if isinstance(given, str):
            if any(isinstance(right, str) and right in given for right in rights):
                return True
        elif given in rights:
            return True
    return False


def letter_of(said: str, options: Mapping[str, str], key: str) -> str:
    """Returns which option an answer names, the last one where it names several.

    Looked for are "(A)", then "A ", then "A.", then the words of an option. Where there is nothing
    of these the official rule guesses; here the guess hangs on `key` alone.
    """
    for mark in ",.!?;:'":
        said = said.strip(mark)
    said = f" {said} "
    for form, where in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        if named := [letter for letter in options if form.format(letter) in said]:
            return max(named, key=lambda letter: said.rfind(where.format(letter)))
    low = said.lower()
    if len(said.split()) > 5 and (
        named := [letter for letter, text in options.items() if text.lower() in low]
    ):
        return max(named, key=lambda letter: low.rfind(options[letter].lower()))
    return random.Random(key).choice(list(options))


def open_answers(said: str) -> set[str | float]:
    """Returns what an answer in words may mean: what stands behind "is" and the like, numbers."""
    said = said.strip().strip(".").lower()
    sentences = re.split(r"\.\s(?=[A-Z])|\n", said)
    found = []
    for number, sentence in enumerate(sentences):
        keys = (*KEYS, "=") if number == len(sentences) - 1 else KEYS
        shortest = ""
        for word in keys:
            if word in sentence:
                tail = sentence.split(word)[-1].strip()
                # The official rule: one of nothing makes it begin anew.
                shortest = tail if not shortest or len(tail) < len(shortest) else shortest
        if shortest and shortest not in tuple(":,.!?;'"):
            found.append(shortest)
    found = found or [said]
    numbers = [number for text in found for pattern in _NUMBERS for number in pattern.findall(text)]
    return {one for text in (*found, *numbers) for one in _comparable(text)}


def _listed(wanted: str | Sequence[str]) -> list[str]:
    return [wanted] if isinstance(wanted, str) else [str(one) for one in wanted]


def _comparable(text: str) -> list[str | float]:
    """Returns a number to two places, or words in small letters."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        low = text.lower()
    return [f" {low}", f"{low} "] if len(low) == 1 else [low]
