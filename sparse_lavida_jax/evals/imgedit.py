# SPDX-License-Identifier: Apache-2.0
"""ImgEdit (arXiv:2505.20275), the basic edits: is a picture changed as told, and nothing else?

Files and layout: github.com/PKU-YuanGroup/ImgEdit, Benchmark/Basic. The judge is GPT-4o.
"""

import functools
import re

from sparse_lavida_jax import pictures
from sparse_lavida_jax.data.images import centre_crop
from sparse_lavida_jax.evals.benchmark import EXPORT, JUDGED, Benchmark, Item, mean
from sparse_lavida_jax.evals.files import (
    EvaluationError,
    check_fields,
    existing,
    picture_name,
    read_json,
    read_pictures,
)

RESULT = "result.json"
ORIGINALS = "singleturn"
_POINTS = re.compile(r"^[^:]*: (\d+)$")


class Bench(Benchmark):
    """737 edits of nine types."""

    title = "ImgEdit"
    source = (
        "Take Benchmark/Basic/basic_edit.json of github.com/PKU-YuanGroup/ImgEdit and the pictures"
        " of Benchmark.tar (huggingface.co/datasets/sysuyy/ImgEdit), and put them into the folder"
        f" as basic_edit.json and {ORIGINALS}/animal/... and so on."
    )
    judge = (
        "run Benchmark/Basic/basic_bench.py of github.com/PKU-YuanGroup/ImgEdit with"
        " --result_img_folder set to that folder, and put the result.json that it writes into"
        f" {JUDGED} beside it."
    )

    def read(self, settings):
        """Returns an item an edit."""
        path = existing(self.folder / "basic_edit.json", self.source)
        items = []
        for index, (key, record) in enumerate(read_json(path).items()):
            where = f"{path}, {key},"
            record = check_fields(record, ("id", "prompt", "edit_type"), where)
            file = self.folder / ORIGINALS / picture_name(record["id"], where)
            load = functools.partial(read_pictures, existing(file, self.source))
            items.append(Item(index, key, record["prompt"], record, load))
        return items

    def answer(self, pipe, items, folder):
        """Returns the names of the changed pictures."""
        pipe.prompts.check_task("edit")
        side = pipe.settings.vq.image_size
        shown = [centre_crop(item.load()[0], side) for item in items]
        seeds = [self.seed_of(item) for item in items]
        words = [item.words for item in items]
        result = pipe.edit(shown, words, seed=seeds, sampling=self.sampling)
        for item, picture in zip(items, result.pixels, strict=True):
            pictures.write(folder / EXPORT / f"{item.key}.png", picture)
        return [{"files": [f"{item.key}.png"]} for item in items]

    def scores(self, rows, folder):
        """Returns the mean of the judge's points, 1 to 5, of each type."""
        path = folder / JUDGED / RESULT
        if not path.exists():
            return []
        said, values = read_json(path), {}
        for item in self.items:
            points = judged_points(said.get(item.key))
            if points is None:
                raise EvaluationError(
                    f"{path} gives no points for {item.key}, but {said.get(item.key)!r}: judge it"
                    " again."
                )
            values.setdefault(item.record["edit_type"], []).append(points)
        types = [mean(f"- {name}", points) for name, points in values.items()]
        every = [one for points in values.values() for one in points]
        return [
            mean("overall, mean of the types", [one.value for one in types]),
            *types,
            mean("mean of the edits", every),
        ]


def judged_points(said: object) -> float | None:
    """Returns the mean of the points in what a judge said, one a line; None if there are none.

    Rounded to two places, as the official script does.
    """
    if not isinstance(said, str):
        return None
    found = [_POINTS.match(line.strip()) for line in said.splitlines()]
    points = [int(match[1]) for match in found if match]
    return round(sum(points) / len(points), 2) if points else None
