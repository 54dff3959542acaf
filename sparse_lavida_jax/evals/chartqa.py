# SPDX-License-Identifier: Apache-2.0
"""ChartQA (arXiv:2203.10244): questions about charts, written by people and by programs.

Files: `ChartQA Dataset` of github.com/vis-nlp/ChartQA. The wording is that of lmms-eval, with which
the base model was evaluated.
"""

import functools

from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark, share, shares
from sparse_lavida_jax.evals.files import (
    check_fields,
    existing,
    image_name,
    read_images,
    read_json,
)
from sparse_lavida_jax.evals.metrics import relaxed_match

PARTS = ("human", "augmented")
ENDING = "\nAnswer the question with a single word."


class Bench(QuestionBenchmark):
    """2500 questions (test)."""

    title = "ChartQA"
    source = (
        "Take the dataset of github.com/vis-nlp/ChartQA; the folder is `ChartQA Dataset`, which"
        " holds test/test_human.json, test/test_augmented.json and test/png. evaluate.split names"
        " the split."
    )

    def read(self, settings):
        """Returns an item a question, those of people first."""
        split, items = self.settings.split, []
        for part in PARTS:
            path = existing(self.folder / split / f"{split}_{part}.json", self.source)
            for number, record in enumerate(read_json(path, list)):
                where = f"{path}, entry {number},"
                record = check_fields(record, ("imgname", "query", "label"), where)
                name = image_name(record["imgname"], where)
                file = existing(self.folder / split / "png" / name, self.source)
                load = functools.partial(read_images, file)
                words, record = record["query"] + ENDING, {**record, "part": part}
                items.append(Item(len(items), f"{part}/{number}", words, record, load))
        return items

    def export(self, rows, folder):
        """Writes the official entries with a prediction each."""
        for part in PARTS:
            entries = [
                {name: item.record[name] for name in ("imgname", "query", "label")}
                | {"prediction": row.output["text"]}
                for item, row in zip(self.items, rows, strict=True)
                if item.record["part"] == part
            ]
            write_json(folder / f"{self.settings.split}_{part}.json", entries)

    def scores(self, rows, folder):
        """Returns the relaxed accuracy: over all questions, and of each part."""
        hits = [
            (item.record["part"], relaxed_match(row.output["text"], str(item.record["label"])))
            for item, row in zip(self.items, rows, strict=True)
        ]
        return [share("relaxed accuracy", [hit for _, hit in hits]), *shares(hits)]
