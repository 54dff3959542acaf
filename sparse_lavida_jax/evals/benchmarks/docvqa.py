# SPDX-License-Identifier: Apache-2.0
"""DocVQA (arXiv:2007.00398): questions about scanned documents.

Files: task 1 of rrc.cvc.uab.es, challenge 17. The wording is that of lmms-eval, with which the base
model was evaluated.
"""

from typing import ClassVar

from sparse_lavida_jax.evals.benchmark import Item, QuestionBenchmark
from sparse_lavida_jax.evals.official_files import records
from sparse_lavida_jax.evals.scorers import anls, mean

FIELDS = ("questionId", "question", "image")
ENDING = "\nAnswer the question using a single word or phrase."


class DocVqa(QuestionBenchmark):
    """5349 questions of val (table 5 of the paper), or 5188 of test, with secret answers.

    Room for an answer as in lmms-eval.
    """

    title = "DocVQA"
    source = (
        "Take the annotations and images of task 1 of DocVQA from rrc.cvc.uab.es (challenge 17),"
        " and put them into the folder as val_v1.0.json (or val_v1.0_withQT.json, test_v1.0.json)"
        " and documents/*.png. evaluate.split is val or test."
    )
    solution = "answers"
    configs: ClassVar = {"docvqa": {"split": "val", "max_new_tokens": 32}}

    def read(self):
        """Yields an item for each question."""
        path = self.files(f"{self.settings.split}_v1.0*.json")[0]
        for _, record, where in records(path, FIELDS, inside="data"):
            words, image = record["question"] + ENDING, self.image(record["image"], where)
            yield Item(str(record["questionId"]), words, record, image)

    def export(self, answers):
        """Returns the file to submit to the site."""
        entries = [{"questionId": one.record["questionId"], "answer": one.text} for one in answers]
        return {f"{self.settings.split}_submission.json": entries}

    def scores(self, answers, folder):
        """Returns the mean ANLS."""
        return [mean("ANLS", [anls(one.text, one.record["answers"]) for one in answers])]


BENCHMARK = DocVqa
