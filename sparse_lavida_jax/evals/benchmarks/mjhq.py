# SPDX-License-Identifier: Apache-2.0
"""MJHQ-30K (arXiv:2402.17245): how close are images to those that people liked?

Files: huggingface.co/datasets/playgroundai/MJHQ-30K. FID is computed from features of another
project's encoder; PickScore, HPS v2 and HPS v3 are scores from other models.
"""

import json
import zipfile
from typing import ClassVar

import numpy as np

from sparse_lavida_jax.evals.benchmark import JUDGED, ImageBenchmark, Item
from sparse_lavida_jax.evals.official_files import (
    EvaluationError,
    Record,
    check_fields,
    image_name,
    records,
)
from sparse_lavida_jax.evals.scorers import Metric, frechet_distance, means

PAIRS = "prompts.jsonl"


class Mjhq(ImageBenchmark):
    """30,000 prompts in ten categories (table 2 of the paper)."""

    title = "MJHQ-30K"
    source = (
        "Take meta_data.json of huggingface.co/datasets/playgroundai/MJHQ-30K, and put it into the"
        " folder; judges also need its mjhq30k_imgs.zip."
    )
    judge = (
        f"its {PAIRS} says which image goes with which prompt. Put features into"
        f" {JUDGED}/fid.npz (drawn, real: Inception-v3, one row per image), and the scores of a"
        f" judge (names, scores) into {JUDGED}/hps_v3.npz and so on, next to it;"
        " docs/api/benchmarks.md shows how."
    )
    verdicts = "*.npz"
    configs: ClassVar = {"mjhq": {"num_images": 1}}

    def read(self):
        """Yields an item for each prompt."""
        path = self.file("meta_data.json")
        fields = ("category", "prompt")
        for key, record, where in records(path, fields):
            image_name(_file(record, key), where)
            yield Item(key, record["prompt"], record)

    def keep(self, item, drawn):
        """Returns one image in the folder of its category, arranged like the real ones."""
        if len(drawn) > 1:
            raise EvaluationError("MJHQ-30K takes one image per prompt: evaluate.num_images=1.")
        return {_file(item.record, item.key): drawn[0]}

    def export(self, answers):
        """Returns which image belongs to which prompt."""
        lines = [
            {"name": one.item.key, "file": one.output["files"][0], **one.record} for one in answers
        ]
        return {PAIRS: "".join(f"{json.dumps(line)}\n" for line in lines)}

    def judged(self, answers, path):
        """Returns FID, or the mean of a judge's scores, over all images and over each category."""
        try:
            with np.load(path, allow_pickle=False) as file:
                given = dict(file)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise EvaluationError(f"{path} is no .npz of plain arrays: {error}.") from error
        if path.stem == "fid":
            check_fields(given, ("drawn", "real"), str(path))
            drawn, real = given["drawn"], given["real"]
            if len(drawn) != len(answers) or not all(
                np.isfinite(one).all() for one in (drawn, real)
            ):
                raise EvaluationError(
                    f"{path} must hold finite features of the {len(answers)} drawn images; it has"
                    f" {len(drawn)} rows."
                )
            try:
                return [Metric("FID", frechet_distance(drawn, real), len(answers))]
            except (ValueError, IndexError) as error:
                raise EvaluationError(f"{path}: {error}") from error
        check_fields(given, ("names", "scores"), str(path))
        names, values = [str(name) for name in given["names"]], given["scores"]
        if sorted(names) != sorted(item.key for item in self.items):
            raise EvaluationError(
                f"{path} names {len(names)} images, and not the {len(self.items)} that were"
                f" drawn: take the names from {PAIRS}."
            )
        if np.shape(values) != (len(names),) or not np.isfinite(values).all():
            raise EvaluationError(
                f"{path} must give each of its {len(names)} names one finite number; it gives"
                f" {np.shape(values)}."
            )
        by_name = dict(zip(names, np.asarray(values, np.float64).tolist(), strict=True))
        pairs = [(item.record["category"], by_name[item.key]) for item in self.items]
        return means(path.stem, pairs, ending=f", {path.stem}")


def _file(record: Record, key: str) -> str:
    """Returns the path of an image, in the folder of its category like the real one."""
    return f"{record['category']}/{key}.png"


BENCHMARK = Mjhq
