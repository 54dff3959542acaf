# SPDX-License-Identifier: Apache-2.0
"""DocVQA (arXiv:2007.00398): questions about scanned documents.

Files: task 1 of rrc.cvc.uab.es, challenge 17. The wording is that of lmms-eval, with which the base
model was evaluated.
"""

import functools

from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark, mean
from sparse_lavida_jax.evals.files import (
    check_fields,
    existing,
    image_name,
    matching,
    read_images,
    read_json,
)
from sparse_lavida_jax.evals.metrics import anls

ENDING = "\nAnswer the question using a single word or phrase."


class Bench(QuestionBenchmark):
    """5349 questions (val), or 5188 whose answers the site keeps (test)."""

    title = "DocVQA"
    source = (
        "Take the annotations and images of task 1 of DocVQA from rrc.cvc.uab.es (challenge 17),"
        " and put them into the folder as val_v1.0.json (or val_v1.0_withQT.json, test_v1.0.json)"
        " and documents/*.png. evaluate.split is val or test."
    )

    def read(self, settings):
        """Returns an item a question."""
        path = matching(self.folder, f"{self.settings.split}_v1.0*.json", self.source)[0]
        entries = check_fields(read_json(path), ("data",), str(path))["data"]
        items = []
        for index, record in enumerate(entries):
            where = f"{path}, entry {index},"
            record = check_fields(record, ("questionId", "question", "image"), where)
            file = existing(self.folder / image_name(record["image"], where), self.source)
            load = functools.partial(read_images, file)
            words = record["question"] + ENDING
            items.append(Item(index, str(record["questionId"]), words, record, load))
        return items

    def export(self, rows, folder):
        """Writes what the site takes."""
        write_json(
            folder / f"{self.settings.split}_submission.json",
            [
                {"questionId": item.record["questionId"], "answer": row.output["text"]}
                for item, row in zip(self.items, rows, strict=True)
            ],
        )

    def scores(self, rows, folder):
        """Returns the mean ANLS; none for questions without answers."""
        if "answers" not in self.items[0].record:
            return []
        values = [
            anls(row.output["text"], item.record["answers"])
            for item, row in zip(self.items, rows, strict=True)
        ]
        return [mean("ANLS", values)]
