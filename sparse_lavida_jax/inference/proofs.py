# SPDX-License-Identifier: Apache-2.0
"""Whether an image follows from its record: layout, codes and pixels, in one pass per stage.

The record holds the tokens and codes that were drawn. One pass over the whole plan
(`whole_plan.py`) gives the scores of each step, with the noise of the recorded seed. A token
follows if no other one scores higher by more than a tolerance: logits of a pass and of the sampler
agree up to rounding. The first step that does not follow holds a change; later ones may be its
consequences. What follows could have been drawn so; how much that says is its evidence, the bits
that the noise decided: an image that its layout determines has none, and any seed draws it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.inference import whole_plan
from sparse_lavida_jax.inference.requests import Request, grid_of
from sparse_lavida_jax.inference.tasks import TaskRun
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.tags import GIVEN_BLOCK

TOLERANCE = 1e-4  # logits without guidance in float32; measured between pass and sampler: 2e-5
ROUNDING = 1  # levels of 255 by which pixels of another device may differ


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a pass says about the draws of a stage.

    Attributes:
        name: "layout" or "image".
        tokens: tokens of the layout, or codes of the image, that were drawn.
        wrong: how many do not follow.
        step: the first step that does not follow, from 0; None: all follow.
        places: the positions in it that do not follow.
        bits: that the noise decided.
        shortfall: the largest distance of a draw from the largest score, in logits.
        passed: tokens that were passed.
        margins: of each token or cell, see `_margins`.
    """

    name: str
    tokens: int
    wrong: int
    step: int | None
    places: tuple[int, ...]
    bits: float
    shortfall: float
    passed: int
    margins: tuple[float | None, ...]

    @property
    def smallest(self) -> tuple[float, int] | None:
        """The smallest margin and its position; None if there is none."""
        found = [(margin, at) for at, margin in enumerate(self.margins) if margin is not None]
        return min(found, default=None)


@dataclasses.dataclass(frozen=True)
class Proof:
    """Whether an image follows from its record.

    Attributes:
        layout: None: the image has none, or it was given and not drawn.
        image: its codes.
        text: whether the recorded layout is what its recorded tokens say.
        given: given cells whose codes are not those of the image that was changed.
        pixels: cells whose pixels are not those of the recorded codes.
        tolerance: in logits.
    """

    layout: Stage | None
    image: Stage
    text: bool
    given: tuple[int, ...]
    pixels: tuple[int, ...]
    tolerance: float

    @property
    def stages(self) -> list[Stage]:
        return [stage for stage in (self.layout, self.image) if stage is not None]

    @property
    def bits(self) -> float:
        """The evidence: bits that the noise decided."""
        return sum(stage.bits for stage in self.stages)

    @property
    def tokens_passed(self) -> int:
        return sum(stage.passed for stage in self.stages)

    @property
    def follows(self) -> bool:
        drawn = all(stage.step is None for stage in self.stages)
        return drawn and self.text and not self.given and not self.pixels

    @property
    def lines(self) -> list[str]:
        """What a person is told."""
        told = [] if self.layout else ["the layout: none was drawn, or it was given"]
        for one in self.stages:
            said = f"the {one.name}: {one.tokens - one.wrong} of {one.tokens} draws follow"
            if one.step is not None:
                places = ", ".join(map(str, one.places))
                said += f"; step {one.step} is the first that does not, at positions {places}"
                said += "; later ones may be consequences" * (one.wrong > len(one.places))
            if one.smallest is not None:
                said += "; the smallest margin is {:.2g} logits, at position {}".format(
                    *one.smallest
                )
            told.append(said)
        told += ["the layout in words is not that of the recorded tokens"] * (not self.text)
        for name, cells in (("given cells", self.given), ("pixels", self.pixels)):
            if cells:
                told.append(
                    f"{name} are not the recorded ones in cells {', '.join(map(str, cells))}"
                )
        answer = f"it could have been drawn so, with {self.bits:.1f} bits of evidence"
        return [*told, answer if self.follows else "it was not drawn so"]

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints; what is infinite is None."""
        return _finite({"follows": self.follows, "bits": self.bits} | dataclasses.asdict(self))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@jax_settings.defaults()
def prove(
    run: TaskRun,
    requests: Sequence[Request],
    records: Sequence[dict[str, Any]],
    pixels: Sequence[Pixels],
    tolerance: float | None = None,
) -> list[Proof]:
    """Returns whether images of one task, with the same settings, follow from their records.

    Args:
        requests: of the records, which were checked (`provenance.check`).
        pixels: the images.
        tolerance: in logits; None: `TOLERANCE`, times what guidance multiplies errors by.

    Raises:
        RequestError: a record holds no codes, or its draws do not follow from one pass.
    """
    for request, record in zip(requests, records, strict=True):
        check_plan(run, request, record, tolerance)
    if tolerance is None:
        most = max(max(one.guidance, one.guidance_edit, 0.0) for one in requests)
        more = max(one.guidance_image for one in requests)
        tolerance = TOLERANCE * (1 + 2 * most) * (1 + 2 * more)
    examples = [run.image_example(request) for request in requests]
    codes = [
        recorded_codes(run, record, one) for record, one in zip(records, examples, strict=True)
    ]
    run.tell("proof", 0, 2)
    layouts, texts = _layouts(run, requests, tolerance)
    run.tell("proof", 1, 2)
    images = _stages(run, "image", examples, requests, run.sampling, codes, None, tolerance)
    proofs = []
    for i, (request, one, own) in enumerate(zip(requests, examples, codes, strict=True)):
        given = np.flatnonzero(one.given & (own != one.response).any(axis=1))
        wrong = _other_pixels(run, request, own, pixels[i])
        parts = tuple(given.tolist()), wrong, tolerance
        proofs.append(Proof(layouts.get(i), images[i], texts.get(i, True), *parts))
    return proofs


def check_plan(
    run: TaskRun, request: Request, record: dict[str, Any], tolerance: float | None
) -> None:
    """Refuses what does not follow from one pass over a plan, with the reason."""
    how, model = request.sampling, run.settings.model
    image, text = (
        presets.preset(name or presets.default_preset(model))
        for name in (how.preset, how.text.preset or how.preset)
    )
    drawn = bool(record.get("decoded_at"))
    reasons = {
        "its record was written before records held codes: draw it again": not record.get("codes"),
        "reflect records only the last of its images": request.task == "reflect",
        "its order of cells follows from confidences, which the record does not hold":
            how.order == "confidence",
        f"its cells were drawn again afterwards, {how.revisions} times: draw it with revisions=0":
            how.revisions > 0,
        "the steps of its sampler see all masks, so no pass holds them all":
            not image.truncate or image.full_attention
            or (drawn and (not text.truncate or text.full_attention)),
        "the steps of its layout stop early, by what was drawn":
            drawn and how.text.commit in ("threshold", "factor", "entropy"),
        "it was drawn in 8 bits, whose rounding depends on what is passed together":
            how.quantize != "",
        "its model multiplies in less than float32: name a tolerance in logits":
            model.compute_dtype != "float32" and tolerance is None,
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise RequestError(f"the image cannot be proved: {reason}.")


def recorded_codes(
    run: TaskRun, record: dict[str, Any], example: Example
) -> Int[np.ndarray, "l g"]:
    """Returns the codes of a record.

    Raises:
        RequestError: they are none of such an image.
    """
    most = run.settings.model.codebook_size
    return _array(record["codes"], example.response.shape, most, "codes")


def _array(values: Any, shape: tuple[int, ...], most: int, name: str) -> np.ndarray:
    """Returns recorded numbers below `most` as an array of this shape."""
    found = np.array(values, np.int64)
    if found.shape != shape or found.max(initial=0) >= most:
        raise RequestError(
            f"the record is damaged: its {name} are not {list(shape)} numbers below {most}."
        )
    return found.astype(np.int32)


def _layouts(
    run: TaskRun, requests: Sequence[Request], tolerance: float
) -> tuple[dict[int, Stage], dict[int, bool]]:
    """Returns the stage of each layout that was drawn, and whether its words are its tokens'."""
    rows, found = [], {}
    for i, request in enumerate(requests):
        if request.drawn_layout and request.drawn_layout[1]:
            example, row, how = run.layout_example(request)
            most = run.settings.model.vocab_size, len(example.response) * how.text.steps + 2**8
            ids, order = (
                _array(x, example.given.shape, n, "layout tokens")
                for x, n in zip(request.drawn_layout, most, strict=True)
            )
            rows.append((i, example, row, how, ids[:, None], order))
    if not rows:
        return {}, {}
    numbers, examples, own, (how, *_), ids, orders = zip(*rows, strict=True)
    stages = _stages(run, "layout", examples, own, how, ids, orders, tolerance)
    for i, one, tokens, order in zip(numbers, examples, ids, orders, strict=True):
        end, told = run.settings.model.end_of_text_id, order != whole_plan.UNTOLD
        ended = np.cumsum((tokens[:, 0] == end) & told) > 0
        said = run.layout_text(requests[i], np.where(ended[:, None], end, tokens))
        held = one.given
        whole = (told | ended).all() and (held == (order == GIVEN_BLOCK)).all()
        whole = whole and (tokens == one.response)[held].all()
        found[i] = said == requests[i].layout and bool(whole)
    return dict(zip(numbers, stages, strict=True)), found


def _stages(
    run: TaskRun,
    name: str,
    examples: Sequence[Example],
    requests: Sequence[presets.RowRequest],
    sampling: config.Sampling,
    responses: Sequence[Int[np.ndarray, "_l g"]],
    orders: Sequence[Int[np.ndarray, " _l"]] | None,
    tolerance: float,
) -> list[Stage]:
    """Returns what one pass says about the draws of a stage."""
    given = examples, requests, sampling, responses, orders
    how = {"stage": name, "tolerance": tolerance, "programs": run.programs}
    scored = run.engine.scores(*given, **how)
    return [
        _stage(name, steps, scores, response, None if orders is None else orders[i], tolerance)
        for i, ((steps, scores), response) in enumerate(zip(scored, responses, strict=True))
    ]


def _stage(
    name: str,
    steps: Sequence[whole_plan.Step],
    scores: whole_plan.Scores,
    response: Int[np.ndarray, "l g"],
    order: Int[np.ndarray, " l"] | None,
    tolerance: float,
) -> Stage:
    """Returns which draws of a row do not follow.

    Args:
        order: the block of each token of a text, whose steps commit their surest draws.
    """
    taken = scores.decided.copy()
    far = np.maximum(scores.deficit, 0)
    if order is not None:
        block = np.array([step.block for step in steps])[scores.step]
        taken &= (order[scores.at] == block)[:, None]
    left = np.zeros(len(taken), bool) if order is None else ~taken.any(axis=1)
    margins = _margins(scores, taken, np.asarray(left), len(response), tolerance)
    if order is not None:
        for number, step in enumerate(steps):
            own = scores.step == number
            now, left = own & taken[:, 0], own & ~taken[:, 0]
            surest = scores.drawn_sure[left].max(initial=-np.inf)
            far[now, 0] = np.maximum(far[now, 0], (surest - scores.sure[now]) / 2)
            if now.sum() != step.count:  # the order is not that of the plan
                far[own], taken[own] = np.inf, True
        blocks = whole_plan.UNTOLD, GIVEN_BLOCK, *(step.block for step in steps)
        if not np.isin(order, blocks).all():
            far[:], taken[:] = np.inf, True
    wrong = taken & ~(far <= tolerance)
    first = int(scores.step[wrong.any(axis=1)].min()) if wrong.any() else None
    places = scores.at[wrong.any(axis=1) & (scores.step == first)]
    bits, shortfall = max(float(scores.bits[taken].sum()), 0.0), float(far[taken].max(initial=0))
    counts = int(taken.sum()), int(wrong.sum())
    where = first, tuple(places.tolist())
    return Stage(name, *counts, *where, bits, shortfall, scores.tokens, margins)


def _margins(
    scores: whole_plan.Scores,
    taken: Bool[np.ndarray, "n g"],
    left: Bool[np.ndarray, " n"],
    length: int,
    tolerance: float,
) -> tuple[float | None, ...]:
    """Returns the margin of each token of a row, in logits; None where nothing else was possible.

    That is the score (logit / temperature + noise, after guidance and filters) above the next one,
    times the temperature. Of a token whose step left others masked, it is the smaller of this and
    of half its confidence above theirs, or above what a change of a draw could make of theirs:
    either one changes the row, and log-odds move by up to twice as much as logits.

    Args:
        taken: the codes that their steps committed.
        left: the tokens that they left masked.
        tolerance: of the scores.
    """
    least = np.where(taken, scores.margin, np.inf).min(axis=1)
    unsure = scores.lead <= tolerance  # the sampler may have drawn something else
    drawn_sure = np.where(unsure, scores.mode_sure, scores.drawn_sure)
    for i in np.flatnonzero(~left):
        rival = left & (scores.step == scores.step[i])
        apart = [(scores.sure[i] - own[rival]) / 2 for own in (drawn_sure, scores.mode_sure)]
        nearest = np.minimum(apart[0], np.maximum(scores.lead[rival], apart[1]))
        least[i] = min(least[i], nearest.min(initial=np.inf))
    found = np.full(length, np.inf)
    np.minimum.at(found, scores.at, least)
    return tuple(float(one) if np.isfinite(one) else None for one in found)


def _other_pixels(
    run: TaskRun, request: Request, codes: Int[np.ndarray, "l g"], pixels: Pixels
) -> tuple[int, ...]:
    """Returns the cells whose pixels are not those of the codes, up to rounding."""
    rows, columns = grid_of(request.size, run.codec.image_size, run.settings.model)
    dtype = run.sampling.vq_dtype
    with run.programs(("pixels", rows, columns, dtype)):
        (drawn,) = run.codec.to_pixels(codes[None], rows, dtype)
    if pixels.shape != drawn.shape:
        return tuple(range(rows * columns))
    apart = np.abs(drawn.astype(int) - pixels).max(axis=-1) > ROUNDING
    cells = apart.reshape(rows, apart.shape[0] // rows, columns, -1).any(axis=(1, 3))
    return tuple(np.flatnonzero(cells).tolist())
