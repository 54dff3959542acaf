# SPDX-License-Identifier: Apache-2.0
"""How surprising an image is to the model: the bits of its codes under the sampler's own plans.

A whole plan gives the probability of each code when its step draws it, so their bits add up to the
sampler's negative log likelihood of the image, in one pass (paper Sec. 3.3, `whole_plan.py`).
It depends on the plan; the mean of a few is taken.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from sparse_lavida_jax import config
from sparse_lavida_jax.data.image_files import Pixels, enlarged
from sparse_lavida_jax.inference import checks
from sparse_lavida_jax.inference.requests import Request, Shown, shown_images
from sparse_lavida_jax.inference.tasks import TaskRun
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.presets import RowRequest

PLANS = 4  # whose bits are averaged
MOST = 64  # captions, or plans
FIRST_SEED = 42  # of the plans' orders
BRIGHTEST = 8.0  # bits of a cell that is white in a map


@dataclasses.dataclass(frozen=True)
class Surprise:
    """The bits of an image's cells given each caption.

    Attributes:
        captions: as the model was given them.
        bits: of each cell, at temperature 1, without guidance or filters, the mean over plans.
        grid: rows and columns of cells.
        error: of encoding and decoding the image: the mean squared difference of its values, 0 to
            255 squared. The codes of an image that the codec cannot keep are not the image's.
        tokens_passed: for all captions.
    """

    captions: tuple[str, ...]
    bits: Float[np.ndarray, "n l"] = dataclasses.field(repr=False)
    grid: tuple[int, int]
    error: float
    tokens_passed: int

    @property
    def tokens(self) -> int:
        """Tokens that were passed for each caption."""
        return self.tokens_passed // len(self.captions)

    @property
    def ranked(self) -> list[int]:
        """The captions by their bits, the one that fits best first."""
        return np.argsort(self.bits.sum(axis=1), kind="stable").tolist()

    def cell(self, caption: int = 0) -> tuple[int, int]:
        """Returns row and column of the most surprising cell."""
        row, column = divmod(int(self.bits[caption].argmax()), self.grid[1])
        return row, column

    def map(self, caption: int = 0, side: int = 16) -> Pixels:
        """Returns an image of the bits, a square a cell: black is 0, white `BRIGHTEST` or more."""
        level = np.clip(self.bits[caption] / BRIGHTEST, 0, 1).reshape(self.grid)
        grey = np.repeat(np.round(level * 255).astype(np.uint8)[..., None], 3, axis=-1)
        return enlarged(grey, side)

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints: captions from the best on, with bits and worst cells."""
        captions = [
            {
                "caption": self.captions[i],
                "bits": round(float(self.bits[i].sum()), 3),
                "cell": list(self.cell(i)),
                "cell_bits": round(float(self.bits[i].max()), 3),
                "map": np.round(self.bits[i].reshape(self.grid), 3).tolist(),
            }
            for i in self.ranked
        ]
        return {"captions": captions, "error": round(self.error, 3), "tokens": self.tokens}


def sampling_of(given: config.Sampling, model: config.Model) -> config.Sampling:
    """Returns the settings of the plans, without guidance, filters and style codes.

    Raises:
        RequestError: there is no plan before the draws, or a step sees more than its own masks.
    """
    preset = presets.preset(given.preset or presets.default_preset(model))
    if given.order == "confidence" or preset.full_attention or not preset.truncate:
        raise RequestError(
            "this model draws in an order that follows from its draws, or its steps see all masks:"
            " only a plan made beforehand gives the bits of an image in one pass."
        )
    return dataclasses.replace(
        given, order_seed=-1, top_k=0, top_p=1.0, temperature=1.0, guidance=0.0, guidance_edit=-1.0,
        guidance_image=0.0, style_code=False,
        released=dataclasses.replace(given.released, temperature_schedule="constant"),
    )  # fmt: skip


@jax_settings.defaults()
def surprise(
    run: TaskRun, requests: Sequence[Request], shown: Shown, num_plans: checks.Number
) -> Surprise:
    """Returns how surprising an image is given captions; see `SparseLaViDa.surprise`.

    Args:
        run: with the settings of `sampling_of`.
        requests: of "generate", one for each caption.
    """
    count = checks.number("num_plans", num_plans, whole=True)
    checks.check_ceilings({"num_plans": count}, {"num_plans": MOST})
    checks.check_ceilings({"captions": len(requests)}, {"captions": MOST})
    images = shown_images(shown)
    if len(images) != 1:
        raise RequestError(f"one image is scored, and {len(images)} were given.")
    image = run.prompts.codec_image(images[0].pixels, run.codec.image_size)
    with run.programs(("codec", image.shape)):
        (codes,) = run.codec.encode(image[None])
        (back,) = run.codec.to_pixels(codes[None])
    error = float(np.square(image.astype(float) - back).mean())
    examples = [run.image_example(request) for request in requests]
    rows = [(one, FIRST_SEED + i) for one in examples for i in range(count)]
    found: list[Float[np.ndarray, " l"]] = []
    tokens = 0
    starts = range(0, len(rows), run.engine.batch_size)
    for number, start in enumerate(starts):
        run.tell("surprise", number, len(starts))
        own, seeds = zip(*rows[start : start + run.engine.batch_size], strict=True)
        seeded = [RowRequest(seed=seed, temperature=1.0) for seed in seeds]
        same = [codes] * len(own)
        how = {"stage": "image", "programs": run.programs}
        for _, scores in run.engine.scores(own, seeded, run.sampling, same, **how):
            bits = np.zeros(len(codes))
            np.add.at(bits, scores.at, (scores.bits * scores.decided).sum(axis=1))
            found.append(bits)
            tokens += scores.tokens
    of_captions = np.stack(found).reshape(len(requests), count, -1).mean(axis=1)
    words = tuple(one.words for one in requests)
    side = int(run.settings.model.grid_size)
    return Surprise(words, of_captions, (side, side), error, tokens)
