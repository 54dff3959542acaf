# SPDX-License-Identifier: Apache-2.0
"""ImgEdit (arXiv:2505.20275), basic edits: is the image changed as instructed, and nothing else?

Files and layout: github.com/PKU-YuanGroup/ImgEdit, Benchmark/Basic. The judge is GPT-4o.
"""

from typing import ClassVar

from sparse_lavida_jax.data import files
from sparse_lavida_jax.data.images import centre_crop
from sparse_lavida_jax.evals.benchmark import JUDGED, Benchmark, Item, write_images
from sparse_lavida_jax.evals.official_files import (
    EvaluationError,
    check_fields,
    image_name,
    read,
    records,
)
from sparse_lavida_jax.evals.scorers import mean, means

ORIGINALS = "singleturn"


class ImgEdit(Benchmark):
    """737 edits of nine types (table 3 of the paper)."""

    title = "ImgEdit"
    source = (
        "Take Benchmark/Basic/basic_edit.json of github.com/PKU-YuanGroup/ImgEdit and the images"
        " of Benchmark.tar (huggingface.co/datasets/sysuyy/ImgEdit), and put them into the folder"
        f" as basic_edit.json and {ORIGINALS}/animal/... and so on."
    )
    judge = (
        "run Benchmark/Basic/basic_bench.py of github.com/PKU-YuanGroup/ImgEdit with"
        " --result_img_folder set to that folder, --edit_json to basic_edit.json,"
        f" --origin_img_root to {ORIGINALS} and --prompts_json to its prompts.json, and put"
        f" the result.json that it writes into {JUDGED} next to it."
    )
    verdicts = "result.json"
    configs: ClassVar = {"imgedit": {}}

    def read(self):
        """Yields an item for each edit."""
        path = self.file("basic_edit.json")
        fields = ("id", "prompt", "edit_type")
        for key, record, where in records(path, fields):
            image_name(f"{key}.png", where)
            yield Item(key, record["prompt"], record, self.image(record["id"], where, ORIGINALS))

    def answer(self, pipe, items, folder):
        """Returns the names of the changed images."""
        pipe.prompts.check_task("edit")
        side = pipe.settings.vq.image_size
        shown = [centre_crop(item.load()[0], side) for item in items]
        seeds = [self.seed_of(item) for item in items]
        words = [item.words for item in items]
        result = pipe.edit(shown, words, seed=seeds, sampling=self.sampling)
        pairs = zip(items, result.pixels, strict=True)
        return [write_images(folder, {f"{item.key}.png": image}) for item, image in pairs]

    def judged(self, answers, path):
        """Returns the judge's mean points, 1 to 5, for each type."""
        judged, points = check_fields(read(path), (), str(path)), []
        for item in self.items:
            said = judged.get(item.key)
            if not isinstance(said, str):
                raise EvaluationError(
                    f"{path} holds no answer for {item.key}, but {said!r}: judge it again."
                )
            points.append((item.record["edit_type"], judged_points(said)))
        values = [(kind, value) for kind, value in points if value is not None]
        if not values:
            raise EvaluationError(f"{path} gives no edit any points: judge them again.")
        whole, *types = means("mean of the edits", values)
        refused = [value is None for _, value in points]
        return [
            mean("overall, mean of the types", [one.value for one in types]),
            *types,
            whole,
            mean("answers without points, left out as the official script does", refused),
        ]


def judged_points(said: str) -> float | None:
    """Returns the mean of the points in a judge's answer, one per line; None if there are none.

    Points follow the only ": " of their line, and the mean is rounded to two places, as in the
    official script.
    """
    lines = [line.strip().split(": ") for line in files.lines(said)]
    points = [int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()]
    return round(sum(points) / len(points), 2) if points else None


BENCHMARK = ImgEdit
