# SPDX-License-Identifier: Apache-2.0
"""MMBench (arXiv:2307.06281): each question asked once for every order of its options.

Files: the TSV of github.com/open-compass/MMBench. The wording is that of lmms-eval, with which the
base model was evaluated. If the official scorer's rule finds no letter, it asks GPT; here such an
answer counts as wrong.
"""

import base64
import binascii
import csv
import io
from typing import ClassVar

from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark
from sparse_lavida_jax.evals.official_files import EvaluationError, records
from sparse_lavida_jax.evals.scorers import mean, means

FIELDS = ("index", "question", "A", "B", "category", "image")
LETTERS = "ABCDE"
ROUND = 1_000_000  # added to the index of a question for each further order of its options
REFERENCE = 64  # characters: shorter "images" are the number of the row that contains the image
ENDING = "\nAnswer with the option's letter from the given choices directly."


class MmBench(QuestionBenchmark):
    """1164 questions in up to four orders of their options, dev, English (table 5 of the paper).

    Room for an answer is ours; lmms-eval allows 1024 tokens for a single letter.
    """

    title = "MMBench"
    source = (
        "Take the TSV of a split from github.com/open-compass/MMBench, such as MMBench_DEV_EN.tsv"
        " or mmbench_dev_20230712.tsv, and put it into the folder. evaluate.split names it without"
        " .tsv."
    )
    configs: ClassVar = {"mmbench": {"split": "MMBench_DEV_EN", "max_new_tokens": 32}}

    def read(self):
        """Yields an item for each row."""
        path = self.file(f"{self.settings.split}.tsv")
        rows = [(row, where) for _, row, where in records(path, FIELDS)]
        encoded = {row["index"]: row.pop("image") for row, _ in rows}
        for row, where in rows:
            key = row["index"]
            if not key.isdecimal():
                raise EvaluationError(f"{where} has no number: {key!r}.")
            contents = encoded[key]
            if len(contents) <= REFERENCE:
                contents = encoded.get(contents.strip(), contents)
            try:
                image = base64.b64decode(contents, validate=True)
            except binascii.Error as error:
                raise EvaluationError(
                    f"{where} has a damaged image ({error}). Get the file again."
                ) from error
            yield Item(key, words_of(row), row, (image,))

    def first(self, items):
        """Returns the rows of as many questions as the settings ask for, in all orders."""
        items = list(items)
        numbers = {*[*dict.fromkeys(map(_question, items))][: self.settings.limit or None]}
        return [item for item in items if _question(item) in numbers]

    def export(self, answers):
        """Returns the table with a column of predictions, to be judged or submitted."""
        names, text = list(self.items[0].record), io.StringIO()
        table = csv.writer(text, delimiter="\t")
        table.writerow([*names, "prediction"])
        table.writerows([*(one.record[name] for name in names), one.text] for one in answers)
        return {f"{self.settings.split}.tsv": text.getvalue()}

    def scores(self, answers, folder):
        """Returns the share of questions answered correctly in every order, and in the first."""
        by_question: dict[int, list[bool]] = {}
        first, categories, unread = [], {}, []
        for one in answers:
            letter = letter_of(one.text, options_of(one.record))
            unread.append(letter is None)
            hit = letter == one.record["answer"].strip()
            number = _question(one.item)
            by_question.setdefault(number, []).append(hit)
            categories[number] = one.record["category"]
            if int(one.item.key) == number:
                first.append(hit)
        every = [(categories[number], all(hits)) for number, hits in by_question.items()]
        whole, *parts = means("accuracy, right in every order", every)
        return [
            whole,
            mean("accuracy, first order", first),
            mean("answers without a letter, counted wrong", unread),
            *parts,
        ]


def _question(item: Item) -> int:
    """Returns the number that a question has in all orders of its options."""
    return int(item.key) % ROUND


def options_of(row: dict[str, str]) -> dict[str, str]:
    """Returns the options of a question by letter, without empty ones."""
    listed = {letter: row.get(letter, "").strip() for letter in LETTERS}
    return {letter: text for letter, text in listed.items() if text and text != "nan"}


def words_of(row: dict[str, str]) -> str:
    """Returns a question with its hint and options."""
    hint = row.get("hint", "").strip()
    hint = f"{hint} " if hint and hint != "nan" else ""
    listed = "\n".join(f"{letter}. {text}" for letter, text in options_of(row).items())
    return f"{hint}{row['question']} There are several options:\n{listed}\n{ENDING}"


def letter_of(said: str, options: dict[str, str]) -> str | None:
    """Returns the option that an answer names by the official rule; None if not exactly one.

    That is a letter that stands alone, or between marks such as "(A)." or "A:"; otherwise the words
    of exactly one option. "A" among more than three words may be an article, and does not count.
    """
    found = said.split()
    for before, after in (("", ""), *_MARKS):
        named = [one for one in LETTERS if f"{before}{one}{after}" in found]
        if len(named) == 1:
            if not before and not after and "A" in found and len(found) > 3:
                continue
            return named[0]
    low = said.lower()
    named = [letter for letter, text in options.items() if text.lower() in low]
    return named[0] if len(named) == 1 else None


_MARKS = (
    ("", "."), ("", ","), ("", ":"), ("", ")"), ("", ")."), ("(", ")"), ("(", ")."), (":", ""),
    (":", ","), (":", "."), (":", ")"), (":", ")."),
)  # fmt: skip


BENCHMARK = MmBench
