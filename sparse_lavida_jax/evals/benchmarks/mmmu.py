# SPDX-License-Identifier: Apache-2.0
"""MMMU (arXiv:2311.16502): questions of college courses, some with several images.

Files: huggingface.co/datasets/MMMU/MMMU; scorer: github.com/MMMU-Benchmark/MMMU, whose rules for
parsing answers are used here. The wording is that of lmms-eval, with which the base model was
evaluated.
"""

import ast
import contextlib
import random
import re
from collections.abc import Mapping
from typing import ClassVar

from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark
from sparse_lavida_jax.evals.official_files import EvaluationError, check_fields, read_parquet
from sparse_lavida_jax.evals.scorers import means

FIELDS = ("id", "question", "options", "question_type")
OTHERS = ("answer", "subfield")
IMAGES = tuple(f"image_{i}" for i in range(1, 8))
CHOICE = "multiple-choice"
CHOOSE = "Answer with the option's letter from the given choices directly."
SAY = "Answer the question using a single word or phrase."
# Words that precede an answer.
KEYS = (
    "could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ",
)  # fmt: skip
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),  # 1,234
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),  # 1.2e3
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


class Mmmu(QuestionBenchmark):
    """900 questions of 30 subjects, validation (table 5 of the paper).

    Room for an answer as in lmms-eval.
    """

    title = "MMMU"
    source = (
        "Take huggingface.co/datasets/MMMU/MMMU as it is: the folder holds one folder a subject,"
        " such as Accounting/validation-00000-of-00001.parquet. evaluate.split names the split."
    )
    configs: ClassVar = {"mmmu": {"split": "validation", "max_new_tokens": 128}}

    def read(self):
        """Yields an item for each question."""
        paths = self.files(f"*/{self.settings.split}-*.parquet")
        for record, images in read_parquet(paths, FIELDS, OTHERS, IMAGES):
            words = words_of(record)
            numbers = sorted({int(number) for number in re.findall(r"<image (\d+)>", words)})
            names = [f"image_{number}" for number in numbers]
            check_fields(images, names, record["id"])
            yield Item(record["id"], words, record, tuple(images[name] for name in names))

    def export(self, answers):
        """Returns the answers as `eval/main_eval_only.py` reads them."""
        said = {}
        for one in answers:
            key, text = one.item.key, one.text
            choice = one.record["question_type"] == CHOICE
            said[key] = letter_of(text, options_of(one.record), key) if choice else text
        return {"total_val_output.json": said}

    def scores(self, answers, folder):
        """Returns the share of correct answers."""
        hits = []
        for one in answers:
            key = one.item.key
            subject = "_".join(key.split("_")[1:-1]) or key
            hits.append((subject, is_right(one.record, one.text, key)))
        return means("accuracy", hits)


def words_of(record: Mapping) -> str:
    """Returns a question with its options."""
    options = options_of(record)
    if record["question_type"] != CHOICE:
        return f"{record['question']}\n\n{SAY}"
    listed = "\n".join(f"{letter}. {text}" for letter, text in options.items())
    return f"{record['question']}\n{listed}\n\n{CHOOSE}"


def options_of(record: Mapping) -> dict[str, str]:
    """Returns the options of a question by letter; the file has them as the text of a list.

    Raises:
        EvaluationError: it is not a list of options.
    """
    try:
        options = ast.literal_eval(record["options"])
    except (ValueError, SyntaxError) as error:
        raise EvaluationError(
            f"{record['id']} has options that are no list: {record['options']!r}."
        ) from error
    return {chr(ord("A") + i): str(option) for i, option in enumerate(options)}


def is_right(record: Mapping, said: str, key: str) -> bool:
    """Whether an answer is correct; a question may have several correct ones."""
    if record["question_type"] == CHOICE:
        return letter_of(said, options_of(record), key) == record["answer"]
    wanted = record["answer"]
    if wanted.startswith("["):
        with contextlib.suppress(ValueError, SyntaxError):  # "[4, 5)" is one answer
            wanted = ast.literal_eval(wanted)
    listed = [wanted] if isinstance(wanted, str) else map(str, wanted)
    rights = [one for text in listed for one in _comparable(text)]
    for given in open_answers(said):
        if isinstance(given, str):
            if any(isinstance(right, str) and right in given for right in rights):
                return True
        elif given in rights:
            return True
    return False


def letter_of(said: str, options: Mapping[str, str], key: str) -> str:
    """Returns which option an answer names; if it names several, the last one.

    It looks for "(A)", then "A ", then "A.", then the words of an option. If none is found, the
    official rule guesses; here the guess depends only on `key`.
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
    """Returns possible meanings of an answer in words: what follows "is" and the like, numbers."""
    said = said.strip().strip(".").lower()
    sentences = re.split(r"\.\s(?=[A-Z])|\n", said)
    found = []
    for number, sentence in enumerate(sentences):
        keys = (*KEYS, "=") if number == len(sentences) - 1 else KEYS
        shortest = ""
        for word in keys:
            if word in sentence:
                tail = sentence.split(word)[-1].strip()
                # As in the official rule, an empty one starts over.
                shortest = tail if not shortest or len(tail) < len(shortest) else shortest
        if shortest and shortest not in tuple(":,.!?;'"):
            found.append(shortest)
    found = found or [said]
    numbers = [number for text in found for pattern in _NUMBERS for number in pattern.findall(text)]
    return {one for text in (*found, *numbers) for one in _comparable(text)}


def _comparable(text: str) -> list[str | float]:
    """Returns a number rounded to two places, or words in lower case."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        low = text.lower()
    return [f" {low}", f"{low} "] if len(low) == 1 else [low]


BENCHMARK = Mmmu
