# SPDX-License-Identifier: Apache-2.0
"""An example: one sequence with its response, before masking."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from sparse_lavida_jax.sequence import Modality, Part, Views


@dataclasses.dataclass(frozen=True)
class Example:
    """One sequence with its response.

    Attributes:
        parts: the sequence; `sequence.prompt_row` lays it out.
        response: clean ids (g = 1) or codes; in a request, placeholders except where given.
        given: response tokens that are known beforehand.
        modality: of the response.
        pixels: the image that the `VisionTokens` part stands for.
        reach: how many tokens of a text response a sampler may decode: whole text blocks up to the
            first end-of-text.
        views: in place of `pixels`, the views of each input image (`data/images.py`).
        grid: rows and columns of cells of an image response; None: the model's largest.
        code_weight: loss weight of each code of an image response; None: all equal.
        learned: cells of an image response that a training row may hold; the others are left out,
            as if a sampler decoded them later; None: all.
        first: cells of an image response that its layout suggests to decode first: one of each
            thing, and one of the background.
        ends: whether a text may end before its last token; boxes, for example, do not.
    """

    parts: tuple[Part, ...]
    response: Int[np.ndarray, "l g"]
    given: Bool[np.ndarray, " l"]
    modality: Modality
    pixels: UInt8[np.ndarray, "h w 3"] | None
    reach: int
    views: tuple[Views, ...] = ()
    grid: tuple[int, int] | None = None
    code_weight: Float[np.ndarray, "l g"] | None = None
    learned: Bool[np.ndarray, " l"] | None = None
    first: tuple[int, ...] = ()
    ends: bool = True

    @property
    def shown(self) -> tuple[Views, ...]:
        """The views of all its images; a single one for `pixels`."""
        return self.views or (() if self.pixels is None else (self.pixels[None],))
