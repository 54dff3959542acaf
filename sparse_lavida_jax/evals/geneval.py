# SPDX-License-Identifier: Apache-2.0
"""GenEval (arXiv:2310.11513): do the objects of a prompt stand in the image?

Files and layout: github.com/djghosh13/geneval. The judge is its mask2former detector.
"""

import json
import pathlib

from sparse_lavida_jax.evals.benchmark import JUDGED, ImageBenchmark, Item, mean, share, shares
from sparse_lavida_jax.evals.files import (
    EvaluationError,
    check_fields,
    existing,
    of_kind,
    read_lines,
)

RESULTS = "results.jsonl"


class Bench(ImageBenchmark):
    """553 prompts in six groups, four images each."""

    title = "GenEval"
    source = (
        "Take prompts/evaluation_metadata.jsonl of github.com/djghosh13/geneval, and put it into"
        " the folder as evaluation_metadata.jsonl."
    )
    judge = (
        "run evaluation/evaluate_images.py of github.com/djghosh13/geneval on that folder, with"
        f" --outfile set to {JUDGED}/{RESULTS} beside it."
    )

    def read(self, settings):
        """Returns an item a line."""
        path = existing(self.folder / "evaluation_metadata.jsonl", self.source)
        items = []
        for index, record in enumerate(read_lines(path)):
            record = check_fields(record, ("tag", "prompt"), f"{path}, prompt {index},")
            items.append(Item(index, f"{index:05}", record["prompt"], record))
        return items

    def keep(self, item, drawn):
        """Returns 00000.png and on, in the folder of the prompt."""
        return {f"{item.key}/samples/{i:05}.png": one for i, one in enumerate(drawn)}

    def export(self, rows, folder):
        """Writes beside the images of each prompt what was asked."""
        for item in self.items:
            path = folder / item.key / "metadata.jsonl"
            path.write_text(json.dumps(item.record) + "\n")

    def scores(self, rows, folder):
        """Returns what the detector found: the official score is the mean of the groups."""
        path = folder / JUDGED / RESULTS
        if not path.exists():
            return []
        judged = _judged(path)
        expected = {name for row in rows for name in row.output["files"]}
        if judged.keys() != expected:
            raise EvaluationError(
                f"{path} judges {len(judged)} images, and {len(expected)} were drawn,"
                f" {len(judged.keys() & expected)} of them the same: judge them again."
            )
        groups = shares([(record["tag"], bool(record["correct"])) for record in judged.values()])
        overall = mean("overall, mean of the groups", [group.value for group in groups])
        whole = share("right images", [bool(record["correct"]) for record in judged.values()])
        return [overall, *groups, whole]


def _judged(path: pathlib.Path) -> dict[str, dict]:
    """Returns what was said of each image, by its name in the export."""
    found = {}
    for record in read_lines(path):
        record = check_fields(record, ("filename", "tag", "correct"), str(path))
        file = of_kind(record["filename"], str, f"{path}, filename,")
        found["/".join(pathlib.PurePath(file).parts[-3:])] = record
    return found
