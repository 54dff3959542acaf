# SPDX-License-Identifier: Apache-2.0
"""MathVerse (arXiv:2403.14624): the same problems, with more given in words or in the figure.

Files: huggingface.co/datasets/AI4Math/MathVerse, whose `query_cot` is the official prompt; scorer:
github.com/ZrrSkywalker/MathVerse. The judge is GPT-4, which extracts the answer from a response and
compares it; the official script's only rule, equal text, gives a lower bound.
"""

from typing import ClassVar

from sparse_lavida_jax.evals.benchmark import JUDGED, Item, QuestionBenchmark
from sparse_lavida_jax.evals.official_files import EvaluationError, image_name, records
from sparse_lavida_jax.evals.scorers import mean, means

FIELDS = ("sample_index", "problem_version", "question", "image", "answer", "query_cot")
OUTPUT = "output_testmini.json"
SCORES = "scores_testmini.json"


class MathVerse(QuestionBenchmark):
    """3940 questions, testmini (table 5 of the paper): 788 problems in five versions.

    Room for an answer is as in MathVista: our choice, as the paper does not say.
    """

    title = "MathVerse"
    source = (
        "Take testmini.json and images.zip of huggingface.co/datasets/AI4Math/MathVerse, unpack"
        " images.zip, and put them into the folder as testmini.json and images_version_1-4 and so"
        " on, or these inside images."
    )
    judge = (
        "run evaluation/extract_answer_s1.py and then evaluation/score_answer_s2.py of"
        f" github.com/ZrrSkywalker/MathVerse on its {OUTPUT}, and put what the second writes into"
        f" {JUDGED}/{SCORES} next to it."
    )
    verdicts = SCORES
    configs: ClassVar = {"mathverse": {"max_new_tokens": 1024}}

    def read(self):
        """Yields an item for each version of a problem."""
        path = self.file("testmini.json")
        for _, record, where in records(path, FIELDS):
            outside = (self.folder / image_name(record["image"], where)).exists()
            image = self.image(record["image"], where, *(() if outside else ("images",)))
            yield Item(str(record["sample_index"]), record["query_cot"], record, image)

    def export(self, answers):
        """Returns the answers as `evaluation/extract_answer_s1.py` reads them."""
        return {OUTPUT: [{**one.record, "model_answer": one.text} for one in answers]}

    def scores(self, answers, folder):
        """Returns the share of equal texts."""
        equal = [one.text.strip() == str(one.record["answer"]).strip() for one in answers]
        return [mean("equal text, a lower bound", equal)]

    def judged(self, answers, path):
        """Returns the share that GPT-4 judged correct."""
        judged = {
            str(record["sample_index"]): record["judgement"]
            for _, record, _ in records(path, ("sample_index", "judgement"))
        }
        if missing := [item.key for item in self.items if judged.get(item.key) not in (0, 1)]:
            raise EvaluationError(
                f"{path} has no judgement of {len(missing)} answers, {missing[0]} among them:"
                " judge them again."
            )
        hits = [(item.record["problem_version"], judged[item.key] == 1) for item in self.items]
        return means("accuracy", hits)


BENCHMARK = MathVerse
