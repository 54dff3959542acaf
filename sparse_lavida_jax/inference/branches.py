# SPDX-License-Identifier: Apache-2.0
"""Branches of a recorded image: its noise up to a step, and noise of their own from there on.

A cache of steps 1 to k depends on nothing after k, so what all branches have in common is passed
once (`Engine.sample`). The record of a branch names its turns, so branches have branches too.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparse_lavida_jax.inference import checks, provenance
from sparse_lavida_jax.inference.batch_shapes import Bucket
from sparse_lavida_jax.inference.requests import BRANCHES, Request
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling.presets import STAGES, Turn

SHARES = {"layout": 0.2, "image": 0.5}  # of tokens or cells: where branches begin by default


def requests_of(
    parent: Request,
    at: Any,
    num_images: checks.Number,
    seed: checks.Numbers,
    step_counts: Callable[[Request, str], list[int]],
) -> list[Request]:
    """Returns the requests of branches of an image.

    Args:
        parent: with its layout as text, or `layout=False` if it has none.
        at: stage and place, as "layout:8" for a step or "image:0.5" for a share of the tokens or
            cells, rounded to the end of a step; or the stage alone. None: the layout, if any.
        num_images: how many; None: `BRANCHES`.
        seed: of the first branch, from which the others count up, or one each; None: the seed that
            drew the image, plus 1.
        step_counts: returns how many tokens each step of a stage decodes.

    Raises:
        RequestError: there is no such place, or the image cannot be branched.
    """
    if parent.task == "reflect":
        raise RequestError(
            "an image of reflect follows from verdicts on earlier ones: branch one that was drawn,"
            " edited, inpainted or outpainted."
        )
    count = BRANCHES if num_images is None else checks.number("num_images", num_images, whole=True)
    checks.check_ceilings({"num_images": count}, {"num_images": checks.MOST_IMAGES})
    has_layout = isinstance(parent.layout, str)
    stage, place = _parsed(at, "layout" if has_layout else "image")
    if stage == "layout" and not has_layout:
        raise RequestError("the image was drawn without a layout: branch it at the image.")
    step = _step(place, step_counts(parent, stage), stage)
    kept = [one for one in parent.turns if _order(one.stage, one.step) < _order(stage, step)]
    if len(kept) == provenance.MOST_TURNS:
        raise RequestError(
            f"the image is a branch of a branch, {len(kept)} deep, the most: branch an earlier one."
        )
    last = parent.turns[-1].seed if parent.turns else parent.seed
    seeds = checks.row_seeds((last + 1) % checks.SEEDS if seed is None else seed, count)
    layout = True if stage == "layout" else parent.layout
    parent = dataclasses.replace(parent, layout=layout)
    return [dataclasses.replace(parent, turns=(*kept, Turn(stage, step, one))) for one in seeds]


def bucket_of(requests: Sequence[Request], parent: Bucket | None, batch_size: int) -> Bucket | None:
    """Returns the shapes that branches are padded to: those of their parent, with rows for all.

    None where they write a layout of their own, whose length is not known.

    Args:
        parent: the shapes that the parent was padded to, if they are recorded.
    """
    if parent is None or requests[0].turns[-1].stage == "layout":
        return None
    rows = min(batch_size, 1 << (len(requests) - 1).bit_length())
    return dataclasses.replace(parent, rows=rows)


def _order(stage: str, step: int) -> tuple[int, int]:
    return STAGES.index(stage), step


def _parsed(at: Any, stage: str) -> tuple[str, int | float]:
    """Returns a stage and a step, or a share with a decimal point."""
    named, colon, place = (stage if at is None else str(at)).partition(":")
    if named in STAGES and not colon:
        return named, SHARES[named]
    if named in STAGES and place.isdecimal() and place.isascii():
        return named, int(place[:9])
    try:
        share = float(place)
    except ValueError:
        share = math.nan
    if named not in STAGES or not 0 <= share < 1:
        allowed = "a stage and a step or a share below 1, as layout:8 or image:0.5"
        raise checks.refusal("at", str(at)[:40], allowed)
    return named, share


def _step(place: int | float, counts: list[int], stage: str) -> int:
    """Returns the step at a place: of a share, the one after the step that ends nearest to it."""
    if not counts:
        raise RequestError("nothing of the image was drawn: all its cells are given.")
    if isinstance(place, float):
        ends = np.cumsum([0, *counts[:-1]]) / np.sum(counts)
        return int(np.abs(ends - place).argmin())
    if place >= len(counts):
        raise checks.refusal("at", f"{stage}:{place}", f"{stage}:0 to {stage}:{len(counts) - 1}")
    return place
