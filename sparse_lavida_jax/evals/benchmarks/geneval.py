# SPDX-License-Identifier: Apache-2.0
"""GenEval (arXiv:2310.11513): are the objects of a prompt in the image?

Files and layout: github.com/djghosh13/geneval. The judge is its mask2former detector.
"""

import json
import pathlib
from typing import ClassVar

from sparse_lavida_jax.evals.benchmark import JUDGED, ImageBenchmark, Item
from sparse_lavida_jax.evals.official_files import EvaluationError, records
from sparse_lavida_jax.evals.scorers import mean, means


class GenEval(ImageBenchmark):
    """553 prompts in six groups, four images each (table 1 of the paper).

    The prompts' prefix is that of the released evaluation (spec Sec. 7.5).
    """

    title = "GenEval"
    source = (
        "Take prompts/evaluation_metadata.jsonl of github.com/djghosh13/geneval, and put it into"
        " the folder as evaluation_metadata.jsonl."
    )
    judge = (
        "run evaluation/evaluate_images.py of github.com/djghosh13/geneval on that folder, with"
        f" --outfile set to {JUDGED}/results.jsonl next to it."
    )
    verdicts = "results.jsonl"
    configs: ClassVar = {"geneval": {"num_images": 4, "prefix": "a realistic image, 4k. "}}

    def read(self):
        """Yields an item for each line."""
        path = self.file("evaluation_metadata.jsonl")
        for key, record, _ in records(path, ("tag", "prompt")):
            yield Item(key.zfill(5), record["prompt"], record)

    def keep(self, item, drawn):
        """Returns 00000.png and so on, in the folder of the prompt."""
        return {f"{item.key}/samples/{i:05}.png": one for i, one in enumerate(drawn)}

    def export(self, answers):
        """Returns the prompts' records, to be stored with the images of each prompt."""
        return {f"{one.key}/metadata.jsonl": json.dumps(one.record) + "\n" for one in self.items}

    def judged(self, answers, path):
        """Returns the detector's findings: the official score is the mean of the groups."""
        judged = {}
        for _, record, _ in records(path, ("filename", "tag", "correct")):
            file = pathlib.PurePath(str(record["filename"]))
            judged["/".join(file.parts[-3:])] = record
        expected = {name for one in answers for name in one.output["files"]}
        if judged.keys() != expected:
            raise EvaluationError(
                f"{path} judges {len(judged)} images, and {len(expected)} were drawn,"
                f" {len(judged.keys() & expected)} of them the same: judge them again."
            )
        hits = [(record["tag"], bool(record["correct"])) for record in judged.values()]
        whole, *groups = means("right images", hits)
        overall = mean("overall, mean of the groups", [group.value for group in groups])
        return [overall, *groups, whole]


BENCHMARK = GenEval
