# SPDX-License-Identifier: Apache-2.0
"""Exact judges of every task: images are read from their pixels, answers from their text."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8

from sparse_lavida_jax.scenes import rules, world
from sparse_lavida_jax.scenes.grammar import (
    CONVERSE,
    RELATIONS,
    STRIPS,
    Edit,
    GrammarError,
    Phrase,
    Plan,
    SceneRequest,
    parse_box,
    words,
)
from sparse_lavida_jax.scenes.tasks import Sample, is_image_task
from sparse_lavida_jax.scenes.world import EXTENT, GRID, NUM_CELLS, Object, Scene, Unreadable

LEAST_OVERLAP = 0.5  # intersection over union of a box that points at an object


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The judgement of one response.

    Attributes:
        ok: all is right.
        reason: "" or what is wrong.
        attributes: objects drawn whose shape and colour were asked for, and objects drawn. Their
            quotient over many images is the attribute precision. (0, 0) where nothing is drawn
            to a request.
    """

    ok: bool
    reason: str
    attributes: tuple[int, int] = (0, 0)


def score(sample: Sample, output: UInt8[np.ndarray, "h w 3"] | str) -> Judgement:
    """Judges a response: pixels for an image task, otherwise text.

    A bad response scores 0 with a reason, never an exception.

    Raises:
        ValueError: pixels where the task asks for text or the other way round, or an unknown task.
    """
    if is_image_task(sample.task) == isinstance(output, str):
        wanted = "pixels" if is_image_task(sample.task) else "a string"
        raise ValueError(
            f"a response to '{sample.task}' is {wanted}, got a {type(output).__name__}."
        )
    if not isinstance(output, str):
        return _score_image(sample, world.read(output))
    if sample.task not in _TEXT_FAULTS:
        raise ValueError(f"there is no task '{sample.task}'. Text: {', '.join(_TEXT_FAULTS)}.")
    try:
        fault = _TEXT_FAULTS[sample.task](sample, output.strip())
    except GrammarError as error:
        fault = str(error)
    return Judgement(not fault, fault)


def _score_image(sample: Sample, result: Scene | Unreadable) -> Judgement:
    request = None if sample.task == "edit" else SceneRequest.parse(sample.prompt.partition(",")[0])
    attributes = (0, 0) if request is None else _attributes(request, result.cells)
    if isinstance(result, Unreadable):
        return Judgement(False, result.reason, attributes)
    fault = ""
    if sample.known is not None:
        fault = _known_fault(sample, result)
    if request is not None:
        fault = fault or _request_fault(request, result)
    else:
        fault = _edit_fault(sample, result)
    return Judgement(not fault, fault, attributes)


def _attributes(request: SceneRequest, cells: tuple[int, ...]) -> tuple[int, int]:
    """Counts; a cell that cannot be read holds something that was not asked for."""
    asked = {(phrase.shape, phrase.colour) for phrase in request.phrases}
    drawn = [index for index in cells if index != world.EMPTY]
    right = sum(index > 0 and Object.of(index).pair in asked for index in drawn)
    return right, len(drawn)


def _known_fault(sample: Sample, result: Scene) -> str:
    assert sample.known is not None and sample.target is not None
    for cell in range(NUM_CELLS):
        if sample.known[cell] and result.cells[cell] != sample.target.cells[cell]:
            was, now = sample.target[cell] or "empty", result[cell] or "empty"
            return f"{world.cell_name(cell)} was given as {was}, it is {now}"
    return ""


def _request_fault(request: SceneRequest, result: Scene) -> str:
    verdict = rules.verdict(request, result)
    return "" if verdict == rules.CORRECT else verdict


def _edit_fault(sample: Sample, result: Scene) -> str:
    assert sample.image is not None
    return rules.edit_fault(Edit.parse(sample.prompt), sample.image, result) or ""


def _plan_fault(sample: Sample, output: str) -> str:
    plan = Plan.parse(output)
    if any(thing is None for _, thing in plan.entries):
        return "the plan gives a cell to nothing"
    layout = world.EMPTY_SCENE.changed(plan.appearances)
    return _request_fault(SceneRequest.parse(sample.prompt), layout)


def _edit_plan_fault(sample: Sample, output: str) -> str:
    assert sample.image is not None
    return _edit_fault(sample, sample.image.changed(Plan.parse(output).appearances))


def _answer_fault(sample: Sample, output: str) -> str:
    right = (sample.answer or "").strip()
    return "" if output == right else f"the answer is '{right}', not '{output}'"


def _arithmetic_fault(sample: Sample, output: str) -> str:
    right = (sample.answer or "").strip()
    if output == right:
        return ""
    if output.split(" ")[-1] == right.split(" ")[-1]:
        return f"the number is right, the steps are '{right}', not '{output}'"
    return _answer_fault(sample, output)


def _point_fault(sample: Sample, output: str) -> str:
    assert sample.image is not None
    box = np.array(parse_box(output)) / STRIPS  # in cells
    phrase = Phrase.parse(sample.prompt.removeprefix("where is the ").removesuffix("?"))
    cell, thing = rules.find(sample.image, phrase)
    row, column = divmod(cell, GRID)
    half = EXTENT[thing.size] / 32
    true = np.array([column, row, column, row]) + 0.5 + half * np.array([-1, -1, 1, 1])
    overlap = _overlap(box, true)
    return "" if overlap >= LEAST_OVERLAP else f"the box overlaps {phrase} by {overlap:.2f} only"


def _overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the intersection over the union of two boxes x1, y1, x2, y2."""
    sides = np.minimum(first[2:], second[2:]) - np.maximum(first[:2], second[:2])
    both = np.prod(np.maximum(sides, 0))
    return float(both / (np.prod(first[2:] - first[:2]) + np.prod(second[2:] - second[:2]) - both))


def _detect_fault(sample: Sample, output: str) -> str:
    """Compares what is listed with what is shown, cell by cell."""
    assert sample.image is not None
    listed = world.EMPTY_SCENE.changed(Plan.parse(output).appearances)
    for cell in range(NUM_CELLS):
        shown, said = sample.image[cell] or "empty", listed[cell] or "empty"
        if shown != said:
            return f"{world.cell_name(cell)} is {shown}, not {said}"
    return ""


def _caption_fault(sample: Sample, output: str) -> str:
    """Compares what is described with what is shown, in any order and grouping."""
    assert sample.image is not None
    described = Counter(SceneRequest.parse(output).phrases)
    shown = Counter(rules.describe(sample.image).phrases)
    if described == shown:
        return ""
    both = (described & shown).total()
    faults = [f"{phrase} is not described" for phrase in shown - described]
    faults += [f"there is no such {phrase}" for phrase in described - shown]
    f1 = 2 * both / (described.total() + shown.total())
    return f"F1 {f1:.2f}: {', '.join(faults)}"


def _given_fault(sample: Sample, output: str) -> str:
    """Says whether the given words stand where they stood."""
    assert sample.answer is not None
    before = [(sample.answer[slice(*span)].strip(), span) for span in words(sample.answer)]
    now = [output[slice(*span)].strip() for span in words(output)]
    if len(now) != len(before):
        return f"the text must have {len(before)} words, it has {len(now)}"
    for (word, (start, end)), new in zip(before, now, strict=True):
        if new != word and any(a <= start and end <= b for a, b in sample.given):
            return f"the given word '{word}' was made '{new}'"
    return ""


def _constrained_caption_fault(sample: Sample, output: str) -> str:
    return _given_fault(sample, output) or _caption_fault(sample, output)


def _infill_fault(sample: Sample, output: str) -> str:
    if fault := _given_fault(sample, output):
        return fault
    if sample.image is not None:
        return _caption_fault(sample, output)
    return _sentence_fault(output)


def _sentence_fault(text: str) -> str:
    """Judges a sum, "2 plus 1 is 3", or a relation and its converse."""
    if found := re.fullmatch(r"(\d+) (plus|minus) (\d+) is (\d+)", text):
        first, sign, second, total = found.groups()
        right = int(first) + int(second) * (1 if sign == "plus" else -1)
        return "" if int(total) == right else f"{first} {sign} {second} is {right}, not {total}"
    relation = "|".join(RELATIONS)
    found = re.fullmatch(rf"a (.+) is ({relation}) a (.+) so a (.+) is ({relation}) a (.+)", text)
    if found is None:
        return f"'{text}' is neither a sum nor a relation and its converse"
    first, there, second, second_again, back, first_again = found.groups()
    for phrase in (first, second):
        Phrase.parse(phrase)
    if (first, second, CONVERSE[there]) != (first_again, second_again, back):
        return f"the converse is 'a {second} is {CONVERSE[there]} a {first}'"
    return ""


_TEXT_FAULTS: dict[str, Callable[[Sample, str], str]] = {
    "plan": _plan_fault,
    "edit_plan": _edit_plan_fault,
    "answer": _answer_fault,
    "arithmetic": _arithmetic_fault,
    "point": _point_fault,
    "detect": _detect_fault,
    "locate": _detect_fault,
    "name": _detect_fault,
    "quiz": _answer_fault,
    "caption": _caption_fault,
    "constrained_caption": _constrained_caption_fault,
    "infill": _infill_fault,
    "reflect": _answer_fault,
}
