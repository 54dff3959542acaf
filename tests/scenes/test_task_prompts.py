# SPDX-License-Identifier: Apache-2.0
"""Tasks of the interface become the same examples as in training."""

import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax.data import templates
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.inference.requests import paired
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.scenes.prompts import ScenePrompts

ALL = dict.fromkeys((*tasks.TASKS, "fill_layout"), 1.0)


@pytest.fixture(scope="module")
def prompts():
    return ScenePrompts(
        stand_ins.encoder(stand_ins.settings(data={"tasks": ALL, "max_answer_len": 40}))
    )


def parts(example):
    return [(type(part).__name__, *(np.asarray(v).tolist() for v in vars(part).values()))
            for part in example.parts[:-1]]  # fmt: skip


def first(task):
    sample = tasks.sample(task, 0, 0)
    return sample, None if sample.image is None else world.render(sample.image)


@pytest.mark.parametrize("text", ["a ___ b", "___", "{3} a", "a {2} {3}", "__ __ a"])
def test_gaps_are_read(text):
    template = templates.parse_template(text)
    gaps = [piece for piece in template if isinstance(piece, int)]
    assert gaps == {"a ___ b": [1], "___": [1], "{3} a": [3], "a {2} {3}": [2, 3]}.get(text, [1, 1])
    assert all(piece.startswith(" ") for piece in template if isinstance(piece, str))


def test_a_text_without_gaps_is_reported():
    with pytest.raises(RequestError, match="has no gap to fill"):
        templates.parse_template("a red circle")
    with pytest.raises(RequestError, match=r"a gap of 0 tokens is out of range: 1\.\.512"):
        templates.parse_template("a {0}")
    with pytest.raises(RequestError, match="at least one word"):
        templates.words_template([" "])
    assert templates.words_template(["red", "cross"], 2) == (2, " red", 2, " cross", 2)


@pytest.mark.parametrize(
    "task", ["caption", "constrained_caption", "infill", "reflect", "point", "answer"]
)
def test_words_and_image_are_those_of_training(prompts, task):
    sample, image = first(task)
    trained = prompts.encoder.scene_example(sample)
    shown = () if image is None else (image,)
    asked = {
        "caption": lambda: prompts.ask(prompts.describe, [image], 40),
        "constrained_caption": lambda: prompts.complete(prompts.describe_in, (3,), [image]),
        "infill": lambda: prompts.complete(prompts.fill_in, (3,), shown),
        "reflect": lambda: prompts.judge(sample.prompt.removeprefix("check: "), image),
        "point": lambda: prompts.locate([sample.prompt[len("where is the ") : -1]], image)[0],
        "answer": lambda: prompts.ask(sample.prompt, [image], 1),
    }[task]()
    assert parts(asked) == parts(trained)


@pytest.mark.parametrize("task", ["inpaint", "outpaint"])
def test_holes_are_told_as_in_training(prompts, task):
    for index in range(5):
        sample = tasks.sample(task, 0, index)
        wanted = sample.prompt.rpartition(", ")[0]
        assert prompts.fill_words(task, wanted, ~sample.known_grid) == sample.prompt
        whole = world.render(sample.target)
        erased = prompts.erased(whole, ~sample.known_grid)
        np.testing.assert_array_equal(erased, world.render(sample.image))


def test_a_template_is_given_where_it_is_known(prompts):
    template = templates.parse_template("a red ___ above a blue square")
    example = prompts.complete(prompts.fill_in, template, ())
    assert example.given.tolist() == [True, True, False, True, True, True, True, False]
    filled = example.response.copy()
    filled[2] = prompts.encoder.tokenizer.encode(" circle")
    filled[7] = prompts.encoder.tokenizer.encode(" and")
    assert prompts.completed(template, filled) == " a red circle above a blue square"
    with pytest.raises(RequestError, match="41 tokens long: at most 40"):
        prompts.complete(prompts.fill_in, (41,), ())


@pytest.mark.parametrize(
    ("verdict", "edit"),
    [
        ("a red circle should be a green cross, x", "replace the red circle with a green cross"),
        (" a red circle is missing", "add a red circle"),
        ("a red circle is too many", "remove the red circle"),
        ("the red circle is not above the cross", None),
        ("is correct", None),
    ],
)
def test_a_fault_becomes_an_edit(prompts, verdict, edit):
    assert prompts.correction(verdict) == edit
    assert prompts.accepts(verdict) == (verdict == "is correct")


def test_what_was_not_learned_is_reported(prompts):
    small = ScenePrompts(stand_ins.encoder(stand_ins.settings()))
    small.check_task("generate")
    assert not small.lays_out("generate")
    assert prompts.lays_out("inpaint")
    with pytest.raises(RequestError, match="not trained to ground: it was trained on draw, answer"):
        small.check_task("ground")


def test_a_prompt_that_is_too_long_is_reported(prompts):
    with pytest.raises(RequestError, match="at most 96 fit"):
        prompts.ask("red " * 95, [stand_ins.EMPTY], 8)
    with pytest.raises(RequestError, match="one image, it was given 2"):
        prompts.ask("what?", [stand_ins.EMPTY] * 2, 8)


def test_earlier_turns_are_told_as_such_and_the_image_before_them_all(prompts):
    _, image = first("answer")
    turns = [("is it red?", "yes"), ("why?", "so")]
    asked = prompts.ask("what is it?", [image], 8, turns)
    alone = [prompts.ask(words, [image] * (i == 0), 8) for i, (words, _) in enumerate(turns)]
    ended = [("Text", [prompts.tokenizer.end_of_turn_id], True)]
    spoken = [[("Text", prompts.tokenizer.encode(said), False)] for _, said in turns]
    last = parts(prompts.ask("what is it?", [], 8))
    wanted = [*parts(alone[0]), *spoken[0], *ended, *parts(alone[1]), *spoken[1], *ended, *last]
    assert parts(asked) == wanted
    assert asked.pixels is not None and len(asked.response) == 8
    with pytest.raises(RequestError, match="tokens long, images included: at most"):
        prompts.ask("what?", [image], 8, [("is it red?" * 30, "yes")])


def test_rows_about_all_images_are_asked_for_together(prompts):
    _, image = first("answer")
    assert [len(shown) for _, shown in paired(["a", "b"], [image] * 2)] == [1, 1]
    assert [len(shown) for _, shown in paired(["a", "b"], [image] * 3, together=True)] == [3, 3]
