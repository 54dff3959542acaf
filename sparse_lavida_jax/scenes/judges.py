# SPDX-License-Identifier: Apache-2.0
"""Judges of responses that several tasks share.

A judge returns what is wrong with a response, "" if nothing is. Words without a meaning raise
`GrammarError`, whose message becomes the reason in `tasks.score`.
"""

from collections import Counter
from collections.abc import Iterator

from sparse_lavida_jax.scenes import rules
from sparse_lavida_jax.scenes.grammar import Edit, GrammarError, Layout, Phrase, SceneRequest, words
from sparse_lavida_jax.scenes.task import Sample
from sparse_lavida_jax.scenes.world import EMPTY, EMPTY_SCENE, NUM_CELLS, Object, Scene, cell_name


def drawn(sample: Sample, result: Scene) -> str:
    """Judges an image drawn for a request, some cells of which may have been given."""
    if sample.known is not None and sample.target is not None:
        for cell, was, now in _differences(sample.target, result):
            if sample.known[cell]:
                return f"{cell_name(cell)} was given as {was}, it is {now}"
    return request_fault(_requested(sample), result)


def attributes(sample: Sample, cells: tuple[int, ...]) -> tuple[int, int]:
    """Counts objects with a requested shape and colour, and all objects, in a drawn image.

    An unreadable cell counts as an object that was not requested.
    """
    asked = {(phrase.shape, phrase.colour) for phrase in _requested(sample).phrases}
    drawn = [index for index in cells if index != EMPTY]
    return sum(index > 0 and Object.of(index).pair in asked for index in drawn), len(drawn)


def _requested(sample: Sample) -> SceneRequest:
    """Returns what an image must contain."""
    return SceneRequest.parse(sample.prompt.partition(",")[0])


def request_fault(request: SceneRequest, result: Scene) -> str:
    verdict = rules.verdict(request, result)
    return "" if verdict == rules.CORRECT else verdict


def edit_fault(sample: Sample, result: Scene) -> str:
    """Judges the image that results from an instruction.

    Raises:
        GrammarError: the instruction does not make sense for the image.
    """
    source, edit = sample.image, Edit.parse(sample.prompt)
    assert source is not None
    expected = _outcome(edit, source, result)
    if expected is None:
        return f"there is no new {edit.thing} where it should be"
    for cell in range(NUM_CELLS):
        was, now = source[cell] or "empty", result[cell] or "empty"
        if cell not in expected and now != was:
            return f"{cell_name(cell)} was {was} and should have stayed, it is {now}"
        if cell in expected and not _fits(expected[cell], result[cell]):
            wanted = f"a {expected[cell]}" if expected[cell] else "empty"
            return f"{cell_name(cell)} should be {wanted}, it is {now}"
    return ""


def _outcome(edit: Edit, source: Scene, result: Scene) -> dict[int, Phrase | None] | None:
    """Returns what the cells affected by an edit must contain.

    If an object is to be added, that is the cell where the result has it; None if it has none.
    """
    allowed = rules.outcomes(edit, source)
    if not allowed:
        raise GrammarError(f"'{edit}': there is no free cell")
    if edit.kind == "add":
        allowed = [way for way in allowed for cell in way if _fits(edit.thing, result[cell])]
    return allowed[0] if allowed else None


def edit_parts(sample: Sample, cells: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Counts the cells that an edit kept, and whether it made its change; each is (right, all).

    Args:
        cells: appearances; an unreadable cell counts as not kept.
    """
    source, edit = sample.image, Edit.parse(sample.prompt)
    assert source is not None
    result = Scene(tuple(max(index, EMPTY) for index in cells))
    expected = _outcome(edit, source, result)
    concerned = rules.outcomes(edit, source)[0] if expected is None else expected
    kept = [cells[cell] == source.cells[cell] for cell in range(NUM_CELLS) if cell not in concerned]
    changed = expected is not None and all(
        cells[cell] >= EMPTY and _fits(wanted, result[cell]) for cell, wanted in expected.items()
    )
    return {"kept cells": (sum(kept), len(kept)), "changed": (int(changed), 1)}


def _fits(wanted: Phrase | None, thing: Object | None) -> bool:
    """Whether a cell contains what it should; None is nothing."""
    return wanted is thing if wanted is None or thing is None else wanted.matches(thing)


def exact(sample: Sample, output: str) -> str:
    right = (sample.answer or "").strip()
    return "" if output == right else f"the answer is '{right}', not '{output}'"


def cells(sample: Sample, output: str) -> str:
    """Compares the listed contents with the image, cell by cell."""
    assert sample.image is not None
    listed = EMPTY_SCENE.changed(Layout.parse(output).appearances)
    for cell, shown, said in _differences(sample.image, listed):
        return f"{cell_name(cell)} is {shown}, not {said}"
    return ""


def _differences(first: Scene, second: Scene) -> Iterator[tuple[int, str, str]]:
    """Yields the cells in which two scenes differ, and their contents in each."""
    for cell in range(NUM_CELLS):
        if first[cell] != second[cell]:
            yield cell, str(first[cell] or "empty"), str(second[cell] or "empty")


def described(sample: Sample, output: str) -> str:
    """Compares a description with the image, in any order and grouping."""
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


def given_words(sample: Sample, output: str) -> str:
    """Checks that the given words are still in their places."""
    assert sample.answer is not None
    before = [(sample.answer[slice(*span)].strip(), span) for span in words(sample.answer)]
    now = [output[slice(*span)].strip() for span in words(output)]
    if len(now) != len(before):
        return f"the text must have {len(before)} words, it has {len(now)}"
    for (word, (start, end)), new in zip(before, now, strict=True):
        if new != word and any(a <= start and end <= b for a, b in sample.given):
            return f"the given word '{word}' was made '{new}'"
    return ""
