# SPDX-License-Identifier: Apache-2.0
"""MMBench (arXiv:2307.06281): each question asked once for every order of its options.

Files: the TSV of github.com/open-compass/MMBench. The wording is that of lmms-eval, with which the
base model was evaluated. The official scorer asks GPT where its rule finds no letter; here such an
answer is wrong.
"""

import base64
import binascii
import csv
import functools
import string

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark, share, shares
from sparse_lavida_jax.evals.files import EvaluationError, check_fields, existing, read_separated

FIELDS = ("index", "question", "A", "B", "category", "image")
LETTERS = "ABCDE"
ROUND = 1_000_000  # rows of a question with its options in another order count on from here
REFERENCE = 64  # characters: shorter "images" are the number of the row that holds it
ENDING = "\nAnswer with the option's letter from the given choices directly."


class Bench(QuestionBenchmark):
    """1164 questions in up to four orders of their options (dev, English)."""

    title = "MMBench"
    source = (
        "Take the TSV of a split from github.com/open-compass/MMBench, such as MMBench_DEV_EN.tsv"
        " or mmbench_dev_20230712.tsv, and put it into the folder. evaluate.split names it without"
        " .tsv."
    )

    def read(self, settings):
        """Returns an item a row."""
        path = existing(self.folder / f"{self.settings.split}.tsv", self.source)
        rows = [
            check_fields(row, FIELDS, f"{path}, line {number},")
            for number, row in enumerate(read_separated(path, "\t"), 2)
        ]
        encoded = {row["index"]: row.pop("image") for row in rows}
        items = []
        for index, row in enumerate(rows):
            key = row["index"]
            if not key.isdecimal():
                raise EvaluationError(f"{path}, line {index + 2}, has no number: {key!r}.")
            load = functools.partial(_images, encoded, key, str(path))
            items.append(Item(index, key, words_of(row), row, load))
        return items

    def first(self, items):
        """Returns the rows of as many questions as the settings ask for, all their orders."""
        if not self.settings.limit:
            return items
        numbers = {*[*dict.fromkeys(map(_question, items))][: self.settings.limit]}
        return [item for item in items if _question(item) in numbers]

    def export(self, rows, folder):
        """Writes the table with a column of predictions, to be judged or handed in."""
        names = list(self.items[0].record)
        with (folder / f"{self.settings.split}.tsv").open("w", newline="") as file:
            table = csv.writer(file, delimiter="\t")
            table.writerow([*names, "prediction"])
            for item, row in zip(self.items, rows, strict=True):
                table.writerow([*(item.record[name] for name in names), row.output["text"]])

    def scores(self, rows, folder):
        """Returns how many questions are right in every order, and in the first.

        None for the test split, whose answers the site keeps.
        """
        if not self.items[0].record.get("answer", ""):
            return []
        by_question: dict[int, list[bool]] = {}
        first, categories, unread = [], {}, []
        for item, row in zip(self.items, rows, strict=True):
            letter = letter_of(row.output["text"], options_of(item.record))
            unread.append(letter is None)
            hit = letter == item.record["answer"].strip()
            number = _question(item)
            by_question.setdefault(number, []).append(hit)
            categories[number] = item.record["category"]
            if int(item.key) == number:
                first.append(hit)
        every = [(categories[number], all(hits)) for number, hits in by_question.items()]
        return [
            share("accuracy, right in every order", [hit for _, hit in every]),
            share("accuracy, first order", first),
            share("answers without a letter, counted wrong", unread),
            *shares(every),
        ]


def _question(item: Item) -> int:
    """Returns the number that a question has in every order of its options."""
    return int(item.key) % ROUND


def options_of(row: dict[str, str]) -> dict[str, str]:
    """Returns the options of a question by their letters; empty ones are none."""
    listed = {letter: row.get(letter, "").strip() for letter in LETTERS}
    return {letter: text for letter, text in listed.items() if text and text != "nan"}


def words_of(row: dict[str, str]) -> str:
    """Returns a question with its hint and options."""
    hint = row.get("hint", "").strip()
    hint = f"{hint} " if hint and hint != "nan" else ""
    listed = "\n".join(f"{letter}. {text}" for letter, text in options_of(row).items())
    return f"{hint}{row['question']} There are several options:\n{listed}\n{ENDING}"


def letter_of(said: str, options: dict[str, str]) -> str | None:
    """Returns which option an answer names by the official rule; None where it names not one.

    A letter that stands alone, or between marks such as "(A)." or "A:"; else the words of exactly
    one option. "A" in more than three words may be an article, and is not taken.
    """
    found = said.split()
    for before, after in (("", ""), *_MARKS):
        named = [one for one in string.ascii_uppercase[:5] if f"{before}{one}{after}" in found]
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


def _images(encoded: dict[str, str], key: str, where: str) -> list[image_files.Pixels]:
    contents = encoded[key]
    if len(contents) <= REFERENCE:
        contents = encoded.get(contents.strip(), contents)
    try:
        data = base64.b64decode(contents, validate=True)
    except binascii.Error as error:
        raise EvaluationError(f"{where}, {key}: its image is damaged ({error}).") from error
    return [image_files.read_bytes(data, f"{where}, {key}", backdrop=False)]
