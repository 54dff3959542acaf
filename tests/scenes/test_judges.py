# SPDX-License-Identifier: Apache-2.0
"""The judges accept every correct response and refuse every wrong one with a reason."""

import functools
import itertools

import numpy as np
import pytest

from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.scenes.task import Judgement, Sample
from sparse_lavida_jax.scenes.world import Object, Scene

RED, BLUE = Object("circle", "red", "small"), Object("square", "blue", "large")


@functools.cache
def examples(task, count=60, split="train"):
    return [tasks.sample(task, 3, index, split) for index in range(count)]


def judge(sample, result):
    return tasks.score(sample, world.render(result) if isinstance(result, Scene) else result)


def of_prompt(task, prompt, image=None, **fields):
    return Sample(prompt, image, task=task, **fields)


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("split", tasks.SPLITS)
def test_the_true_response_is_right(task, split):
    for sample in examples(task, 100, split):
        judged = judge(sample, sample.answer or sample.target)
        assert judged == Judgement(True, "", judged.attributes, judged.parts), sample
        if task == "edit":
            kept, changed = judged.parts["kept cells"], judged.parts["changed"]
            assert changed == (1, 1)
            assert kept[0] == kept[1] in (34, 35)
        if sample.column and sample.target:
            assert judged.attributes == (len(sample.target), len(sample.target))


@pytest.mark.parametrize("task", [name for name in tasks.TASKS if tasks.TABLE[name].is_image])
def test_noise_and_emptiness_are_wrong(task):
    rng = np.random.default_rng(0)
    for sample in examples(task):
        noise = rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)
        assert judge(sample, noise).reason.startswith("unreadable: the cell in row")
        if len(sample.target):
            assert not judge(sample, world.EMPTY_SCENE).ok


@pytest.mark.parametrize("task", [name for name in tasks.TASKS if tasks.TABLE[name].is_image])
def test_one_object_more_or_less_or_other_is_wrong(task):
    for sample in examples(task):
        whole = sample.target
        free = next(cell for cell in range(36) if whole[cell] is None)
        for cell, thing in [(free, None), *whole.objects()]:
            others = [0] if thing else []
            others += [new.index for new in world.OBJECTS if not thing or new.pair != thing.pair]
            for index in others[::15]:
                judged = judge(sample, whole.changed({cell: index}))
                assert not judged.ok, (sample, cell, index)
                assert judged.reason


def test_attributes_in_exchange_are_wrong():
    seen = 0
    for sample in examples("draw", 300):
        if sample.column != "binding":
            continue
        (one, first), (other, second) = sample.target.objects()
        swapped = Scene.of(
            {
                one: Object(first.shape, second.colour, first.size),
                other: Object(second.shape, first.colour, second.size),
            }
        )
        judged = judge(sample, swapped)
        assert not judged.ok and judged.reason.count("should be a") == 2
        assert judged.attributes == (0, 2)
        seen += 1
    assert seen > 20


def test_reasons_of_a_drawing_tell_what_is_wrong():
    sample = of_prompt("draw", "a red circle and a large blue square")
    cases = [
        ({3: RED, 9: BLUE}, "", (2, 2)),
        ({3: RED}, "a large blue square is missing", (1, 1)),
        ({3: RED, 9: BLUE, 10: RED}, "a red circle is too many", (3, 3)),
        (
            {3: RED, 9: Object("square", "blue", "small")},
            "a small blue square should be a large blue square",
            (2, 2),
        ),
        (
            {3: Object("circle", "green", "small"), 9: BLUE},
            "a green circle should be a red circle",
            (1, 2),
        ),
    ]
    for objects, reason, attributes in cases:
        judged = judge(sample, Scene.of(objects))
        assert judged == Judgement(not reason, reason, attributes)


def test_a_broken_object_counts_as_drawn_and_not_asked_for():
    sample = of_prompt("draw", "a red circle")
    pixels = world.render(Scene.of({0: RED, 35: BLUE}))
    pixels[-8:] = world.BACKGROUND
    judged = tasks.score(sample, pixels)
    assert "row 6, column 6" in judged.reason
    assert judged.attributes == (1, 2)


@pytest.mark.parametrize("relation", ["left of", "right of", "above", "below"])
def test_a_relation_is_strict_on_its_axis(relation):
    sample = of_prompt("draw", f"a red circle {relation} a blue square")
    for one, other in itertools.permutations(range(0, 36, 5), 2):
        (y, x), (v, u) = divmod(one, 6), divmod(other, 6)
        right = {"left of": x < u, "right of": u < x, "above": y < v, "below": v < y}[relation]
        judged = judge(sample, Scene.of({one: RED, other: BLUE}))
        assert judged.ok == right
        assert right or judged.reason == f"the red circle is not {relation} the blue square"


SOURCE = Scene.of({7: RED, 9: BLUE})


@pytest.mark.parametrize(
    ("prompt", "changes", "reason"),
    [
        ("add a small red circle left of the blue square", {8: RED}, ""),
        ("add a red circle in the top left corner", {0: RED}, ""),
        ("add a red circle in the top left corner", {1: RED}, "there is no new red circle where"),
        ("add a red circle left of the blue square", {10: RED}, "there is no new red circle"),
        ("add a red circle", {10: BLUE}, "there is no new red circle"),
        ("add a red circle", {10: RED, 11: RED}, "row 2, column 6 was empty and should have"),
        ("add a red circle", {10: RED, 9: None}, "row 2, column 4 was large blue square and sh"),
        ("remove the red circle", {7: None}, ""),
        ("remove the red circle", {}, "row 2, column 2 should be empty, it is small red circle"),
        ("remove the red circle", {9: None, 7: None}, "row 2, column 4 was large blue square"),
        ("replace the red circle with a blue square", {7: BLUE}, ""),
        ("replace the red circle with a small blue square", {7: BLUE}, "should be a small blue"),
        ("make the blue square green", {9: Object("square", "green", "large")}, ""),
        ("make the blue square green", {9: Object("square", "green", "small")}, "should be a la"),
        ("make the blue square green", {9: Object("cross", "green", "large")}, "should be a larg"),
        ("move the red circle right", {7: None, 8: RED}, ""),
        ("move the red circle up", {7: None, 1: RED}, ""),
        ("move the red circle down", {7: None, 14: RED}, "row 3, column 2 should be a small red"),
        ("move the red circle right", {8: RED}, "row 2, column 2 should be empty"),
        ("move the blue square to the bottom right corner", {9: None, 35: BLUE}, ""),
    ],
)
def test_reasons_of_an_edit_tell_what_is_wrong(prompt, changes, reason):
    result = SOURCE.changed({cell: thing.index if thing else 0 for cell, thing in changes.items()})
    judged = judge(of_prompt("edit", prompt, SOURCE), result)
    assert judged.ok == (reason == "")
    assert reason in judged.reason


def test_a_known_cell_must_stay():
    for task in ("inpaint", "outpaint"):
        for sample in examples(task):
            known = [cell for cell, thing in sample.target.objects() if sample.known[cell]]
            hole = [
                cell for cell in range(36) if not sample.known[cell] and not sample.target[cell]
            ]
            if known and hole:
                moved = sample.target.changed({known[0]: 0, hole[0]: sample.target.cells[known[0]]})
                assert "was given as" in judge(sample, moved).reason


CELL_0, CELL_1 = "<LOC_0><LOC_0><LOC_4><LOC_4>", "<LOC_4><LOC_0><LOC_8><LOC_4>"


@pytest.mark.parametrize(
    ("prompt", "answer", "reason"),
    [
        ("a red circle", f" small red circle{CELL_1}", ""),
        ("a red circle left of a cross", f" small red circle{CELL_0}, large red cross{CELL_1}", ""),
        (
            "a red circle left of a cross",
            f" small red circle{CELL_1}, large red cross{CELL_0}",
            "the red circle is not left of the cross",
        ),
        ("a red circle", f" small blue circle{CELL_1}", "should be a red circle"),
        ("a red circle", f" small red circle{CELL_1}, nothing{CELL_0}", "to nothing"),
        ("a red circle", " small red circle", "not a box"),
        ("a red circle", "", "not a box"),
    ],
)
def test_any_valid_layout_is_right(prompt, answer, reason):
    judged = judge(of_prompt("layout", prompt), answer)
    assert judged.ok == (reason == "")
    assert reason in judged.reason


@pytest.mark.parametrize(
    ("answer", "ok"),
    [
        ("<LOC_5><LOC_5><LOC_7><LOC_7>", True),  # the small circle exactly
        ("<LOC_5><LOC_5><LOC_7><LOC_8>", True),  # 2/3
        ("<LOC_4><LOC_5><LOC_8><LOC_7>", True),  # 1/2
        ("<LOC_4><LOC_4><LOC_8><LOC_8>", False),  # its cell: 1/4
        ("<LOC_6><LOC_5><LOC_8><LOC_7>", False),  # one step aside: 1/3
        ("<LOC_7><LOC_7><LOC_5><LOC_5>", False),
        ("the red circle", False),
    ],
)
def test_a_box_must_overlap_by_half(answer, ok):
    judged = judge(of_prompt("point", "where is the red circle?", SOURCE), answer)
    assert judged.ok == ok
    assert ok or judged.reason


def test_wrong_answers_are_told_the_right_one():
    for sample in examples("answer"):
        judged = judge(sample, " seven")
        assert judged.reason == f"the answer is '{sample.answer.strip()}', not 'seven'"
        assert judge(sample, sample.answer.strip()).ok


def test_a_sum_needs_its_steps():
    sample = of_prompt("arithmetic", "", SOURCE, answer=" 1 plus 1 is 2")
    assert "the number is right, the steps are" in judge(sample, " 2 plus 0 is 2").reason
    assert "the answer is" in judge(sample, " 1 plus 1 is 3").reason


def test_a_caption_may_be_in_any_order_and_must_be_complete():
    sample = of_prompt("caption", "", Scene.of({0: RED, 1: RED, 2: BLUE}))
    for right in (
        "two small red circles and a large blue square",
        " a small red circle and a large blue square and a small red circle",
    ):
        assert judge(sample, right).ok
    judged = judge(sample, " a small red circle and a large blue square")
    assert judged.reason == "F1 0.80: small red circle is not described"
    judged = judge(sample, " two small red circles and a small blue square")
    assert "large blue square is not described, there is no such small blue" in judged.reason
    assert "does not describe an object" in judge(sample, " a dog").reason


def test_given_words_must_stay_where_they_are():
    answer = " a small red circle and a large blue square"
    given = ((2, 8), (19, 23))  # " small", " and"
    sample = of_prompt("constrained_caption", "", SOURCE, answer=answer, given=given)
    assert judge(sample, answer).ok
    swapped = " a large blue square and a small red circle"
    assert judge(sample, swapped).reason == "the given word 'small' was made 'large'"
    assert "must have 9 words" in judge(sample, " a small red circle").reason


def test_any_valid_filling_is_right():
    total = of_prompt("infill", "", answer=" 2 plus 1 is 3", given=((2, 7),))
    assert judge(total, " 4 plus 5 is 9").ok
    assert judge(total, " 4 plus 5 is 8").reason == "4 plus 5 is 9, not 8"
    said = " a red circle is above a blue square so a blue square is below a red circle"
    converse = of_prompt("infill", "", answer=said, given=((0, 2),))
    other = " a green cross is left of a red square so a red square is right of a green cross"
    assert "must have" in judge(converse, other).reason
    assert judge(converse, said.replace("above", "below").replace("so a blue square is below",
        "so a blue square is above")).ok  # fmt: skip
    assert "the converse is" in judge(converse, said.replace("below", "above")).reason
    assert "neither a sum" in judge(converse, " a" + " red" * 16).reason


def test_a_response_of_the_wrong_kind_is_an_error():
    with pytest.raises(ValueError, match="a response to 'draw' is pixels, got a str"):
        judge(of_prompt("draw", "a red circle"), " red")
    with pytest.raises(ValueError, match="a response to 'answer' is a string, got a ndarray"):
        judge(of_prompt("answer", "is there a circle?", SOURCE), SOURCE)


def test_what_an_edit_kept_is_told_apart_from_what_it_changed():
    prompt = "replace the red circle with a green cross"
    red, green = RED.index, Object("cross", "green", "large").index
    source = world.EMPTY_SCENE.changed({0: red, 7: BLUE.index})

    def parts(**cells):
        result = source.changed({int(cell[1:]): index for cell, index in cells.items()})
        return judge(of_prompt("edit", prompt, source), result).parts

    assert parts(c0=green) == {"kept cells": (35, 35), "changed": (1, 1)}
    assert parts(c0=red) == {"kept cells": (35, 35), "changed": (0, 1)}
    assert parts(c0=green, c7=0, c8=BLUE.index) == {"kept cells": (33, 35), "changed": (1, 1)}
    added = of_prompt("edit", "add a green cross", source)
    assert judge(added, source).parts == {"kept cells": (35, 35), "changed": (0, 1)}
    assert judge(added, source.changed({9: green})).parts["changed"] == (1, 1)
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    torn = world.render(source.changed({0: green}))
    torn[-16:, -16:] = noise[-16:, -16:]
    assert judge(of_prompt("edit", prompt, source), torn).parts == {
        "kept cells": (34, 35), "changed": (1, 1),
    }  # fmt: skip
