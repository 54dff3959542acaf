# SPDX-License-Identifier: Apache-2.0
"""DocVQA (arXiv:2007.00398): questions about scanned documents.

Files: task 1 of rrc.cvc.uab.es, challenge 17. The wording is that of lmms-eval, with which the base
model was evaluated.
"""

from typing import ClassVar

from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.evals.benchmark import QuestionBenchmark
from sparse_lavida_jax.evals.files import check_fields, of_kind, read_json, records
from sparse_lavida_jax.evals.scorers import anls, mean

FIELDS = ("questionId", "question", "image")
ENDING = "\nAnswer the question using a single word or phrase."


class Bench(QuestionBenchmark):
    """5349 questions, val (table 5 of the paper), or 5188 whose answers the site keeps (test).

    Room for an answer as in lmms-eval.
    """

    title = "DocVQA"
    source = (
        "Take the annotations and images of task 1 of DocVQA from rrc.cvc.uab.es (challenge 17),"
        " and put them into the folder as val_v1.0.json (or val_v1.0_withQT.json, test_v1.0.json)"
        " and documents/*.png. evaluate.split is val or test."
    )
    configs: ClassVar = {"docvqa": {"split": "val", "max_new_tokens": 32}}

    def read(self):
        """Yields an item for each question."""
        path = self.files(f"{self.settings.split}_v1.0*.json")[0]
        entries = check_fields(read_json(path), ("data",), str(path))["data"]
        for _, record, where in records(of_kind(entries, list, f"{path}, data,"), FIELDS, path):
            words, load = record["question"] + ENDING, self.image(record["image"], where)
            yield str(record["questionId"]), words, record, load

    def export(self, answers, folder):
        """Writes the file that the site takes."""
        entries = [{"questionId": one.record["questionId"], "answer": one.text} for one in answers]
        write_json(folder / f"{self.settings.split}_submission.json", entries)

    def scores(self, answers, folder):
        """Returns the mean ANLS; nothing for questions without answers."""
        if "answers" not in answers[0].record:
            return []
        return [mean("ANLS", [anls(one.text, one.record["answers"]) for one in answers])]
