# SPDX-License-Identifier: Apache-2.0
"""What several tasks have in common in how their responses are judged.

A judge returns what is wrong with a response, "" if nothing is. Words that mean nothing raise
`GrammarError`, whose message `tasks.score` makes the reason.
"""

from collections import Counter

from sparse_lavida_jax.scenes import rules, world
from sparse_lavida_jax.scenes.grammar import Edit, Plan, SceneRequest, words
from sparse_lavida_jax.scenes.task import Sample
from sparse_lavida_jax.scenes.world import NUM_CELLS, Scene


def requested(sample: Sample) -> SceneRequest:
    """Returns what an image must hold."""
    return SceneRequest.parse(sample.prompt.partition(",")[0])


def drawn(sample: Sample, result: Scene) -> str:
    """Judges an image of a request, some cells of which may have been given."""
    fault = "" if sample.known is None else _known_fault(sample, result)
    return fault or request_fault(requested(sample), result)


def _known_fault(sample: Sample, result: Scene) -> str:
    assert sample.known is not None and sample.target is not None
    for cell in range(NUM_CELLS):
        if sample.known[cell] and result.cells[cell] != sample.target.cells[cell]:
            was, now = sample.target[cell] or "empty", result[cell] or "empty"
            return f"{world.cell_name(cell)} was given as {was}, it is {now}"
    return ""


def request_fault(request: SceneRequest, result: Scene) -> str:
    verdict = rules.verdict(request, result)
    return "" if verdict == rules.CORRECT else verdict


def edit_fault(sample: Sample, result: Scene) -> str:
    assert sample.image is not None
    return rules.edit_fault(Edit.parse(sample.prompt), sample.image, result)


def exact(sample: Sample, output: str) -> str:
    right = (sample.answer or "").strip()
    return "" if output == right else f"the answer is '{right}', not '{output}'"


def cells(sample: Sample, output: str) -> str:
    """Compares what is listed with what is shown, cell by cell."""
    assert sample.image is not None
    listed = world.EMPTY_SCENE.changed(Plan.parse(output).appearances)
    for cell in range(NUM_CELLS):
        shown, said = sample.image[cell] or "empty", listed[cell] or "empty"
        if shown != said:
            return f"{world.cell_name(cell)} is {shown}, not {said}"
    return ""


def described(sample: Sample, output: str) -> str:
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


def given_words(sample: Sample, output: str) -> str:
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
