# SPDX-License-Identifier: Apache-2.0
"""DPG-Bench (arXiv:2403.05135): does an image follow a long prompt?

Files and layout: `dpg_bench` of github.com/TencentQQGYLab/ELLA. The judge is mPLUG, which answers
questions about each image; the official script turns its answers into scores.
"""

import re
from typing import ClassVar

import numpy as np

from sparse_lavida_jax.data import files
from sparse_lavida_jax.evals.benchmark import JUDGED, ImageBenchmark, Item
from sparse_lavida_jax.evals.official_files import EvaluationError, read_text
from sparse_lavida_jax.evals.scorers import mean

MOST_IMAGES = 4  # on one sheet
MOST_FAILED = 1  # prompts that the official script may skip, as it does the first
# The output of the official script: image, the score of each part of the sheet, their mean.
_LINE = re.compile(
    r"(?:.*[\\/])?(?P<key>[^\\/.]+)\.png(?P<parts>(?:, [\d.e-]+)+), (?P<mean>[\d.e-]+)"
)


class DpgBench(ImageBenchmark):
    """1065 long prompts, four images each on a sheet of two by two (table 2 of the paper)."""

    title = "DPG-Bench"
    source = (
        "Take dpg_bench/prompts of github.com/TencentQQGYLab/ELLA, and put them into the folder as"
        " prompts/*.txt."
    )
    judge = (
        "run dpg_bench/compute_dpg_bench.py of github.com/TencentQQGYLab/ELLA with"
        " --image-root-path set to that folder, --resolution to the side of an image, --pic-num to"
        f" evaluate.num_images, --res-path to {JUDGED}/dpg.txt next to it."
    )
    verdicts = "dpg.txt"
    configs: ClassVar = {"dpg": {"num_images": 4}}

    def read(self):
        """Yields an item for each text file."""
        if self.settings.num_images > MOST_IMAGES:
            raise EvaluationError(
                f"Evaluate.num_images={self.settings.num_images} is more than fit on the sheet of"
                f" DPG-Bench: 1 to {MOST_IMAGES}."
            )
        for path in self.files("prompts/*.txt"):
            yield Item(path.stem, read_text(path).strip(), {})

    def keep(self, item, drawn):
        """Returns the sheet."""
        if len(drawn) == 1:
            return {f"{item.key}.png": drawn[0]}
        height, width = drawn[0].shape[:2]
        page = np.zeros((2 * height, 2 * width, 3), np.uint8)
        for i, one in enumerate(drawn):
            top, left = i // 2 * height, i % 2 * width
            page[top : top + height, left : left + width] = one
        return {f"{item.key}.png": page}

    def judged(self, answers, path):
        """Returns the mean score of all sheets; if one was judged twice, the last score counts."""
        found = {}
        for match in filter(None, map(_LINE.fullmatch, files.lines(read_text(path)))):
            key, parts = match["key"], match["parts"].count(",")
            if parts != self.settings.num_images:
                raise EvaluationError(
                    f"{path} judges {parts} images of {key}.png, and"
                    f" {self.settings.num_images} were drawn: judge it again."
                )
            found[key] = 100 * float(match["mean"])
        keys = [one.item.key for one in answers]
        missing = [key for key in keys if key not in found]
        if len(missing) > MOST_FAILED:
            raise EvaluationError(
                f"{path} says nothing of {len(missing)} images, {missing[0]}.png among them:"
                " judge them again."
            )
        return [mean("DPG-Bench score", [found[key] for key in keys if key in found])]


BENCHMARK = DpgBench
