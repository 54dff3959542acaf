# SPDX-License-Identifier: Apache-2.0
"""What models of the small world know, and what is said about other words and in answers."""

import dataclasses

import numpy as np
import pytest

from sparse_lavida_jax import config
from sparse_lavida_jax.inference.requests import TASK_SPECS, RequestMaker
from sparse_lavida_jax.models import image_codec
from sparse_lavida_jax.prompting.vocabulary import words_of
from sparse_lavida_jax.scenes import tasks, vocabulary
from sparse_lavida_jax.scenes.prompts import ScenePrompts
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

KNOWN = vocabulary.of_source("scenes")


def prompts_of(*trained):
    settings = config.Config(data=config.Data(tasks=dict.fromkeys(trained, 1.0)))
    codec = image_codec.ImageCodec("scenes", settings.model)
    return settings, ScenePrompts.of(Tokenizer(), settings, codec)


@pytest.mark.slow
def test_the_words_of_the_small_world_are_those_of_its_examples():
    said = set()
    for name in tasks.TABLE:
        for index in range(60):
            sample = tasks.sample(name, 0, index)
            for text in filter(None, (sample.prompt, sample.answer, sample.layout)):
                # Descriptions of a crowd may count further than any request.
                assert {*KNOWN.unknown(text)} <= {"five", "six"}, text
                assert KNOWN.spelled(text) == text
                said |= {*words_of(text)}
    assert {word for word in KNOWN.words if not word.isdecimal()} <= said


def test_what_it_knows_is_a_sentence():
    assert KNOWN.knows == (
        "small and large circles, squares, triangles and crosses in red, green, blue, yellow,"
        " purple and cyan: one to four of a kind ('three large green triangles'), one of each of"
        " two kinds ('a red circle and a small blue square') or one above, below, left of or right"
        " of another ('a red circle above a blue square'); not 'five red circles' or 'a red circle"
        " and two blue squares'"
    )
    assert vocabulary.of_source("prepared") is None


@pytest.mark.parametrize(
    ("text", "unknown", "spelled"),
    [
        ("Red Circles", [], "red circles"),
        ("A Red Circle.", [], "a red circle"),
        ("a RED circle, a hexagon", ["hexagon"], "a red circle, a hexagon"),
        ("five crosses", ["five"], "five crosses"),
        ("colours of things", [], "colours of things"),
        ("___ <LOC_3>Ein Käse", ["Ein", "Käse"], "___ <LOC_3>Ein Käse"),
    ],
)
def test_case_and_plural_do_not_matter(text, unknown, spelled):
    assert KNOWN.unknown(text) == unknown
    assert KNOWN.spelled(text) == spelled


def test_a_long_unknown_word_is_cut():
    assert KNOWN.warning(["x" * 9999]).endswith(f": '{'x' * 40}' is not among them.")


def test_many_unknown_words_are_counted():
    warning = KNOWN.warning([" ".join(f"x{i}" for i in range(10))])
    assert warning.endswith(
        ": 'x0', 'x1', 'x2', 'x3', 'x4', 'x5', 'x6', 'x7' and 2 more are not among them."
    )


@pytest.mark.parametrize(
    ("task", "words", "given"),
    [
        ("generate", "a Red hexagon", {}),
        ("generate", "a Red circle", {"layout": " hexagon<LOC_0><LOC_0><LOC_4><LOC_4>"}),
        ("ground", ["Red circle", "hexagon"], {"shown": np.zeros((8, 8, 3), np.uint8)}),
        ("infill", "a Red hexagon is ___", {}),
        ("constrained_caption", None, {"required": ["Red", "hexagon"]}),
        ("constrained_caption", None, {"template": "a Red hexagon {2}"}),
    ],
)
def test_every_task_warns_and_reads_any_case(task, words, given, caplog):
    settings, prompts = prompts_of("draw", "ask", "point", "infill", "constrained_caption")
    shown = given.pop("shown", np.zeros((8, 8, 3), np.uint8) if words is None else None)
    made = RequestMaker(settings, prompts, 96).make(task, words, shown, given)
    (warning,) = caplog.messages
    assert "'hexagon'" in warning
    assert warning in {one.warning for one in made}
    assert "Red" not in f"{[dataclasses.replace(one, asked='') for one in made]}"


def test_a_question_without_an_image_is_warned_about():
    settings, prompts = prompts_of("draw", "answer")
    maker, shown = RequestMaker(settings, prompts, 96), np.zeros((8, 8, 3), np.uint8)
    (alone,) = maker.make("ask", "how many circles are there?", None, {})
    assert alone.warning.endswith("about an image only: give it one.")
    (about,) = maker.make("ask", "how many circles are there?", shown, {})
    assert about.warning == ""


def test_tasks_that_a_model_was_not_trained_for_are_refused():
    _, prompts = prompts_of("draw")
    allowed = {task for task in TASK_SPECS if not prompts.refusal(task)}
    assert allowed == {"generate"}
    assert "was not trained to edit: it was trained on draw" in prompts.refusal("edit")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (" yes", "yes"),
        (" small<LOC_12>, two<LOC_3><LOC_4>", "small, two"),
        ("<LOC_0><LOC_0><LOC_4><LOC_4>", "at the top left"),
        (" a cross<LOC_8><LOC_8><LOC_16><LOC_16>", "a cross at the centre"),
        ("<LOC_20><LOC_12><LOC_24><LOC_16>, no", "at the right, no"),
        ("<LOC_4><LOC_0><LOC_4><LOC_4> 3", "3"),
    ],
)
def test_an_answer_is_in_words(said, answer):
    _, prompts = prompts_of("draw")
    assert prompts.answer(np.array(prompts.tokenizer.encode(said))[:, None]) == answer
