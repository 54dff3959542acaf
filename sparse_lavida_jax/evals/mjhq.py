# SPDX-License-Identifier: Apache-2.0
"""MJHQ-30K (arXiv:2402.17245): how close are images to those that people liked?

Files: huggingface.co/datasets/playgroundai/MJHQ-30K. FID, PickScore and HPS v2 are formulas of
features that other projects' encoders compute; HPS v3 is a score of another model.
"""

import json
import pathlib
import zipfile
from typing import ClassVar

import numpy as np

from sparse_lavida_jax.evals.benchmark import JUDGED, ImageBenchmark
from sparse_lavida_jax.evals.files import (
    EvaluationError,
    Record,
    check_fields,
    image_name,
    read_json,
    records,
)
from sparse_lavida_jax.evals.scorers import Metric, cosine_scores, frechet_distance, means

PAIRS = "prompts.jsonl"
FID = "fid"


class Bench(ImageBenchmark):
    """30,000 prompts in ten categories (table 2 of the paper)."""

    title = "MJHQ-30K"
    source = (
        "Take meta_data.json of huggingface.co/datasets/playgroundai/MJHQ-30K, and put it into the"
        " folder; judges also need its mjhq30k_imgs.zip."
    )
    judge = (
        f"its {PAIRS} says which image goes with which prompt. Put features into"
        f" {JUDGED}/fid.npz (drawn, real: Inception-v3, one row per image) and"
        f" {JUDGED}/pickscore.npz, hps_v2.npz (names; images, texts, scale), or scores into"
        f" {JUDGED}/hps_v3.npz (names, scores), next to it; docs/evaluation.md shows how."
    )
    configs: ClassVar = {"mjhq": {"num_images": 1}}

    def read(self):
        """Yields an item for each prompt."""
        path = self.file("meta_data.json")
        fields = ("category", "prompt")
        for key, record, where in records(read_json(path, dict), fields, path):
            image_name(_file(record, key), where)
            yield key, record["prompt"], record, list

    def keep(self, item, drawn):
        """Returns one image in the folder of its category, as the real ones lie."""
        if len(drawn) > 1:
            raise EvaluationError("MJHQ-30K takes one image per prompt: evaluate.num_images=1.")
        return {_file(item.record, item.key): drawn[0]}

    def export(self, answers, folder):
        """Writes which image goes with which prompt."""
        lines = [
            {"name": one.item.key, "file": one.output["files"][0], **one.record} for one in answers
        ]
        (folder / PAIRS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def scores(self, answers, folder):
        """Returns FID, and the mean of every other file in the folder of judges."""
        found = []
        for path in sorted((folder / JUDGED).glob("*.npz")):
            given = _arrays(path)
            if path.stem == FID:
                check_fields(given, ("drawn", "real"), str(path))
                if len(given["drawn"]) != len(answers):
                    raise EvaluationError(
                        f"{path} holds features of {len(given['drawn'])} drawn images, and"
                        f" {len(answers)} were drawn."
                    )
                value = _formula(path, frechet_distance, given["drawn"], given["real"])
                found.append(Metric("FID", value, len(answers)))
            else:
                found += self._judged(path, given)
        return found

    def _judged(self, path: pathlib.Path, given: dict[str, np.ndarray]) -> list[Metric]:
        """Returns the mean of a judge's scores, over all images and over each category."""
        names = [str(name) for name in check_fields(given, ("names",), str(path))["names"]]
        if sorted(names) != sorted(item.key for item in self.items):
            raise EvaluationError(
                f"{path} names {len(names)} images, and not the {len(self.items)} that were"
                f" drawn: take the names from {PAIRS}."
            )
        if "scores" in given:
            values = given["scores"]
        else:
            check_fields(given, ("images", "texts"), str(path))
            images, texts, scale = given["images"], given["texts"], given.get("scale", np.ones(()))
            if scale.size != 1:
                raise EvaluationError(f"{path}: scale must be a number, and is {scale.shape}.")
            values = _formula(path, cosine_scores, images, texts, float(scale.item()))
        if np.shape(values) != (len(names),) or not np.isfinite(values).all():
            raise EvaluationError(
                f"{path} must give each of its {len(names)} names one finite number; it gives"
                f" {np.shape(values)}."
            )
        by_name = dict(zip(names, np.asarray(values, np.float64).tolist(), strict=True))
        pairs = [(item.record["category"], by_name[item.key]) for item in self.items]
        return means(path.stem, pairs)


def _arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            # "pictures" is an older name of "images".
            return {name.replace("pictures", "images"): file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise EvaluationError(f"{path} is no .npz of plain arrays: {error}.") from error


def _formula(path: pathlib.Path, formula, *given):
    try:
        if not all(np.isfinite(one).all() for one in given):
            raise ValueError("features are not all finite: take them again.")
        return formula(*given)
    except (ValueError, IndexError, TypeError) as error:
        raise EvaluationError(f"{path}: {error}") from error


def _file(record: Record, key: str) -> str:
    """Returns the file of an image, which lies in the folder of its category like the real one."""
    return f"{record['category']}/{key}.png"
