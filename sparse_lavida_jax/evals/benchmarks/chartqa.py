# SPDX-License-Identifier: Apache-2.0
"""ChartQA (arXiv:2203.10244): questions about charts, written by people and by programs.

Files: `ChartQA Dataset` of github.com/vis-nlp/ChartQA. The wording is that of lmms-eval, with which
the base model was evaluated.
"""

from typing import ClassVar

from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark
from sparse_lavida_jax.evals.official_files import records
from sparse_lavida_jax.evals.scorers import grouped, means, relaxed_match

PARTS = ("human", "augmented")
FIELDS = ("imgname", "query", "label")
ENDING = "\nAnswer the question with a single word."


class ChartQa(QuestionBenchmark):
    """2500 questions, test (table 5 of the paper). Room for an answer as in lmms-eval."""

    title = "ChartQA"
    source = (
        "Take the dataset of github.com/vis-nlp/ChartQA; the folder is `ChartQA Dataset`, which"
        " holds test/test_human.json, test/test_augmented.json and test/png. evaluate.split names"
        " the split."
    )
    solution = "label"
    configs: ClassVar = {"chartqa": {"split": "test", "max_new_tokens": 16}}

    def read(self):
        """Yields an item for each question, first those written by people."""
        split = self.settings.split
        for part in PARTS:
            path = self.file(split, f"{split}_{part}.json")
            for key, record, where in records(path, FIELDS):
                image = self.image(record["imgname"], where, split, "png")
                record |= {"part": part}
                yield Item(f"{part}/{key}", record["query"] + ENDING, record, image)

    def export(self, answers):
        """Returns the official entries, each with a prediction."""
        entries = grouped(
            (
                one.record["part"],
                {name: one.record[name] for name in FIELDS} | {"prediction": one.text},
            )
            for one in answers
        )
        return {f"{self.settings.split}_{part}.json": of for part, of in entries.items()}

    def scores(self, answers, folder):
        """Returns the relaxed accuracy: for all questions, and for each part."""
        hits = [
            (one.record["part"], relaxed_match(one.text, str(one.record["label"])))
            for one in answers
        ]
        return means("relaxed accuracy", hits)


BENCHMARK = ChartQa
