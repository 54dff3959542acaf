# SPDX-License-Identifier: Apache-2.0
"""The bundled model draws, edits and answers today what it did on 26 November 2026.

`tests/data/witnesses` has the results of commit cd99a17: images as PNG, token ids and codes as
SHA-256. A change of any of them needs a new `results.SAMPLER_VERSION`, a line in CHANGELOG.md, and
new files: `python tests/inference/test_witnesses.py`. Pixels may differ by one level, since
compilers round differently. Only `passed` is newer: what counts as a token changed, not what is
drawn.
"""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference import results
from sparse_lavida_jax.page import example_prompts
from sparse_lavida_jax.pipeline import SparseLaViDa

FOLDER = pathlib.Path(__file__).parents[1] / "data/witnesses"
PROMPT = "a red circle above a blue square"

# By name: the task, its words, whether it is shown an image, and its options.
CASES = {
    "layout": ("generate", PROMPT, False, {"layout": True, "seed": 1}),
    "no_layout": ("generate", PROMPT, False, {"layout": False, "seed": 2}),
    "guidance": ("generate", "three green triangles", False, {"guidance": 3.5, "seed": 3}),
    "temperature": (
        "generate", PROMPT, False, {"temperature": 1.0, "layout_temperature": 1.0, "seed": 4},
    ),
    "top_k_top_p": (
        "generate", PROMPT, False,
        {
            "sampling": {"top_k": 8, "top_p": 0.9, "text": {"top_p": 0.8}},
            "temperature": 1.0,
            "seed": 5,
        },
    ),
    "edit": ("edit", "make the red circle green", True, {"seed": 6}),
    "inpaint": ("inpaint", PROMPT, True, {"box": (48, 48, 96, 96), "seed": 7}),
    "outpaint": ("outpaint", PROMPT, True, {"seed": 8}),
    "reflect": ("reflect", "two blue squares", False, {"rounds": 2, "seed": 9}),
    "batch": (
        "generate", [PROMPT, "four cyan crosses", "a small yellow square"], False, {"seed": 10},
    ),
    "ask": ("ask", "what colour is the circle?", True, {"seed": 11}),
    "infill": ("infill", "a ___ red circle and a ___ blue square", True, {"seed": 12}),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe():
    return SparseLaViDa.from_pretrained("scenes")


def result_of(pipe, name):
    """Returns the result of a case."""
    task, words, is_shown, options = CASES[name]
    if "sampling" in options:
        sampling = config.changed(pipe.settings.sampling, options["sampling"])
        options = options | {"sampling": sampling}
    shown = example_prompts.of_world("scenes").start(task) if is_shown else None
    return pipe.run(pipe.requests(task, words, shown, **options))


def digests(result):
    """Returns what identifies a result, for JSON."""
    whole = hashlib.sha256()
    for ids in result.tokens:
        whole.update(f"{ids.shape}".encode() + np.asarray(ids, np.int32).tobytes())
    return {
        "sampler_version": results.SAMPLER_VERSION,
        "tokens": whole.hexdigest(),
        "texts": list(result.texts),
        "layouts": list(result.layouts),
        "passed": list(result.passed),
    }


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_26_november(pipe, name):
    result, recorded = result_of(pipe, name), json.loads((FOLDER / "digests.json").read_text())
    for row, pixels in enumerate(result.pixels):
        wanted = image_files.read(FOLDER / f"{name}_{row}.png").astype(int)
        np.testing.assert_allclose(pixels.astype(int), wanted, rtol=0, atol=1)
    assert digests(result) == recorded[name]


def record() -> None:
    """Writes the witnesses."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    pipe, recorded = SparseLaViDa.from_pretrained("scenes"), {}
    for name in CASES:
        result = result_of(pipe, name)
        recorded[name] = digests(result)
        for row, pixels in enumerate(result.pixels):
            image_files.write(FOLDER / f"{name}_{row}.png", pixels)
    (FOLDER / "digests.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record()
