# SPDX-License-Identifier: Apache-2.0
"""MathVerse (arXiv:2403.14624): the same problem with more in words or more in the figure.

Files: huggingface.co/datasets/AI4Math/MathVerse, whose `query_cot` is the official prompt; scorer:
github.com/ZrrSkywalker/MathVerse. The judge is GPT-4, which finds the answer in a response and
compares it; the only rule of the official script, equal text, is given as a lower bound.
"""

import functools

from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.evals.benchmark import JUDGED, Item, QuestionBenchmark, share, shares
from sparse_lavida_jax.evals.files import (
    EvaluationError,
    check_fields,
    existing,
    image_name,
    read_images,
    read_json,
)

FIELDS = ("sample_index", "problem_version", "question", "image", "answer", "query_cot")
OUTPUT = "output_testmini.json"
SCORES = "scores_testmini.json"


class Bench(QuestionBenchmark):
    """3940 questions: 788 problems in five versions (testmini)."""

    title = "MathVerse"
    source = (
        "Take testmini.json and images.zip of huggingface.co/datasets/AI4Math/MathVerse, unpack"
        " images.zip, and put them into the folder as testmini.json and images_version_1-4 and so"
        " on, or these inside images."
    )
    judge = (
        "run evaluation/extract_answer_s1.py and then evaluation/score_answer_s2.py of"
        f" github.com/ZrrSkywalker/MathVerse on its {OUTPUT}, and put what the second writes into"
        f" {JUDGED}/{SCORES} beside it."
    )

    def read(self, settings):
        """Returns an item a version of a problem."""
        path = existing(self.folder / "testmini.json", self.source)
        images, items = self.folder / "images", []
        for index, record in enumerate(read_json(path, list)):
            where = f"{path}, entry {index},"
            record = check_fields(record, FIELDS, where)
            name = image_name(record["image"], where)
            file = next(
                (f for f in (images / name, self.folder / name) if f.exists()), images / name
            )
            load = functools.partial(read_images, existing(file, self.source))
            items.append(
                Item(index, str(record["sample_index"]), record["query_cot"], record, load)
            )
        return items

    def export(self, rows, folder):
        """Writes the answers as `evaluation/extract_answer_s1.py` reads them."""
        write_json(
            folder / OUTPUT,
            [
                {**item.record, "model_answer": row.output["text"]}
                for item, row in zip(self.items, rows, strict=True)
            ],
        )

    def scores(self, rows, folder):
        """Returns the share that GPT-4 judged right if it did, and that of equal texts."""
        equal = [
            row.output["text"].strip() == str(item.record["answer"]).strip()
            for item, row in zip(self.items, rows, strict=True)
        ]
        bound = share("equal text, a lower bound", equal)
        path = folder / JUDGED / SCORES
        if not path.exists():
            return [bound]
        judged = {}
        for number, record in enumerate(read_json(path, list)):
            where = f"{path}, entry {number},"
            record = check_fields(record, ("sample_index", "judgement"), where)
            judged[str(record["sample_index"])] = record["judgement"]
        if missing := [item.key for item in self.items if judged.get(item.key) not in (0, 1)]:
            raise EvaluationError(
                f"{path} has no judgement of {len(missing)} answers, {missing[0]} among them:"
                " judge them again."
            )
        hits = [(item.record["problem_version"], judged[item.key] == 1) for item in self.items]
        return [share("accuracy", [hit for _, hit in hits]), *shares(hits), bound]
