# SPDX-License-Identifier: Apache-2.0
"""The tasks of the art world: their words, their held-out combinations and their judges."""

import dataclasses

import numpy as np
import pytest

from sparse_lavida_jax.art import dice, judge, rules, sheet, tasks, world
from sparse_lavida_jax.art.grammar import (
    Art,
    ArtEdit,
    ArtLayout,
    ArtRequest,
    article,
    plural,
)
from sparse_lavida_jax.art.world import ArtScene, Placed
from sparse_lavida_jax.scenes.grammar import GrammarError

SHEET = sheet.load()
BEAR = Placed(2, 4, "bear", "twemoji", "large")
CAT = Placed(14, 4, "cat", "twemoji", "small", "left")
SCENE = ArtScene.of("pink", [BEAR, CAT])


def made(task, count, split="test"):
    return [tasks.sample(task, 0, index, split) for index in range(count)]


def right(sample):
    """Returns a correct response to an example."""
    return sample.answer if sample.target is None else world.render(sample.target)


# ---------------------------------------------------------------------------------------------
# Words.


def test_every_name_has_a_plural_and_an_article_and_is_read_back():
    names = [thing.name for thing in SHEET.things]
    for name in names:
        assert ArtRequest.parse(Art(name).times(1)).phrases == (Art(name),)
        assert ArtRequest.parse(Art(name).times(3)).phrases == (Art(name),) * 3
    assert [plural(name) for name in ("fox", "bus", "strawberry", "mouse", "turtle")] == [
        "foxes", "buses", "strawberries", "mice", "turtles"
    ]  # fmt: skip
    assert [article(name) for name in ("owl", "unicorn", "umbrella", "bear")] == [
        "an", "a", "an", "a"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, items, others",
    [
        ("a bear", ((1, Art("bear")),), {}),
        ("a small noto cat facing left", ((1, Art("cat", "small", "noto", "left")),), {}),
        ("two large owls", ((2, Art("owl", "large")),), {}),
        ("an owl left of a bear", ((1, Art("owl")), (1, Art("bear"))), {"relation": "left of"}),
        (
            "three mice and a palm tree in fluent style on a blue background",
            ((3, Art("mouse")), (1, Art("palm tree"))),
            {"style": "fluent", "background": "blue"},
        ),
    ],
)
def test_requests_are_said_and_read(text, items, others):
    request = ArtRequest(items, **others)
    assert str(request) == text
    assert ArtRequest.parse(text) == request


@pytest.mark.parametrize(
    "language, text",
    [
        ("de", "Bär und roter Apfel im Stil noto"),
        ("ja", "クマの顔と赤リンゴ、notoスタイル"),
    ],
)
def test_requests_are_said_and_read_in_other_languages(language, text):
    request = ArtRequest(((1, Art("bear")), (1, Art("red apple"))), style="noto")
    assert request.said(language, SHEET) == text
    assert ArtRequest.parse(text) == request
    with pytest.raises(GrammarError, match="only be said in English"):
        dataclasses.replace(request, background="pink").said(language, SHEET)


@pytest.mark.parametrize(
    "text", ["", "bear", "a dragon", "two bear", "six bears", "two bears above a cat", "a bear and"]
)
def test_words_without_a_meaning_are_refused(text):
    with pytest.raises(GrammarError):
        ArtRequest.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "add a bear", "add an owl above the cat", "remove the small cat", "mirror the cat",
        "replace the bear with an owl", "move the bear left", "draw the cat in noto style",
    ],
)  # fmt: skip
def test_instructions_are_said_and_read(text):
    assert str(ArtEdit.parse(text)) == text
    with pytest.raises(GrammarError, match="is not an instruction"):
        ArtEdit.parse(f"please {text}")


def test_a_layout_for_a_request_has_its_order():
    request = ArtRequest.parse("a cat below a bear")
    assert [name for name, _ in ArtLayout.of(SCENE, request).entries] == ["cat", "bear"]
    for number in range(40):
        sample = tasks.sample("layout", 3, number)
        names = [phrase.name for phrase in ArtRequest.parse(sample.prompt).phrases]
        assert [name for name, _ in ArtLayout.parse(sample.answer).entries] == names


def test_a_layout_names_things_places_and_sizes_only():
    layout = ArtLayout.of(SCENE)
    assert str(layout) == (
        " bear<LOC_4><LOC_2><LOC_14><LOC_12>, cat<LOC_4><LOC_14><LOC_10><LOC_20>"
    )
    assert ArtLayout.parse(str(layout)) == layout
    assert [(one.name, one.size, one.box) for one in layout.things] == [
        (one.name, one.size, one.box) for one in SCENE.things
    ]
    for text, said in (
        (" dragon<LOC_4><LOC_2><LOC_14><LOC_12>", "'dragon'"),
        (" bear<LOC_4><LOC_2><LOC_14><LOC_11>", "not the box of a thing"),
        (" bear<LOC_4><LOC_2><LOC_9><LOC_7>", "not the box of a thing"),
    ):
        with pytest.raises(GrammarError, match=said):
            ArtLayout.parse(text)


# ---------------------------------------------------------------------------------------------
# Examples.


@pytest.mark.parametrize("task", tasks.TASKS)
def test_correct_responses_are_scored_as_correct_and_others_not(task):
    count = 4 if tasks.TABLE[task].is_image else 12
    for split in tasks.SPLITS:
        examples = made(task, count, split)
        assert examples == made(task, count, split)
        for number, sample in enumerate(examples):
            judgement = tasks.score(sample, right(sample))
            assert (judgement.ok, judgement.reason) == (True, ""), sample
            other = tasks.sample(task, 1, number, split)
            if right(sample) is not right(other) and sample.prompt != other.prompt:
                empty = np.full((96, 96, 3), 243, np.uint8)
                wrong = "a dragon" if sample.target is None else empty
                assert tasks.score(sample, wrong).reason


@pytest.mark.parametrize("task", tasks.TABLE)
def test_splits_hold_out_what_they_should(task):
    for split in tasks.SPLITS:
        for sample in made(task, 40, split):
            assert sample.held_out == (split == "held_out")
            scenes = [scene for scene in (sample.image, sample.target) if scene is not None]
            if scenes:
                held_out = any(dice.is_held_out(scene, SHEET) for scene in scenes)
                assert held_out == sample.held_out


def test_a_held_out_look_is_asked_for():
    looks = dice.held_out_looks(SHEET)
    for sample in made("draw", 40, "held_out"):
        request = ArtRequest.parse(sample.prompt)
        for thing in sample.target.things:
            if (thing.name, thing.style) in looks:
                assert Art(thing.name, style=thing.style) in [
                    Art(phrase.name, style=phrase.style) for phrase in request.phrases
                ]


def test_all_kinds_are_drawn_and_asked():
    drawn = made("draw", 120)
    assert {one.column for one in drawn} >= {"open", "style", "facing", "size", "counting"}
    assert sum(ArtRequest.parse(one.prompt).phrases[0].style is None for one in drawn) > 40
    asked = made("ask", 120)
    assert {one.column for one in asked} == {"count", "presence", "style", "facing", "size"}
    assert {one.answer for one in asked} >= {" yes", " no", " ja", " nein", " はい", " いいえ"}
    assert {ArtEdit.parse(one.prompt).kind for one in made("edit", 60)} == {
        "add", "remove", "replace", "move", "restyle", "mirror"
    }  # fmt: skip


def test_unknown_tasks_and_wrong_kinds_of_responses_are_refused():
    with pytest.raises(ValueError, match="no task 'dance'"):
        tasks.sample("dance", 0, 0)
    (sample,) = made("draw", 1)
    with pytest.raises(ValueError, match="is pixels, got a str"):
        tasks.score(sample, "a bear")
    with pytest.raises(ValueError, match="Tasks with a judge"):
        tasks.score(sample._replace(task="dance"), "a bear")


# ---------------------------------------------------------------------------------------------
# Judges.


@pytest.mark.parametrize(
    "prompt, said",
    [
        ("a bear and a cat", ""),
        ("a bear above a cat in twemoji style on a pink background", ""),
        ("a bear below a cat", "the bear is not below the cat"),
        (
            "a bear and a cat in noto style",
            "a twemoji bear should be a noto bear, a twemoji cat should be a noto cat",
        ),
        ("a bear and a cat facing right", "a cat facing left should be a cat facing right"),
        ("a cat", "a bear is too many"),
        ("a bear and a cat and an owl", "an owl is missing"),
        ("a bear and a cat on a blue background", "the background is pink, not blue"),
        ("Bär und Katze", ""),
    ],
)
def test_drawn_images_are_judged(prompt, said):
    sample = tasks.Sample(prompt, target=SCENE, task="draw")
    assert tasks.score(sample, world.render(SCENE)).reason == said


def test_coherence_counts_things_that_are_whole():
    sample = tasks.Sample("a bear and a cat", target=SCENE, task="draw")
    image = world.render(SCENE)
    assert rules.coherence(sample, judge.read(image)) == (2, 2, 2)
    noto = world.render(ArtScene.of("pink", [dataclasses.replace(BEAR, style="noto"), CAT]))
    image[8:48, 32:56] = noto[8:48, 32:56]
    coherent, _, asked = rules.coherence(sample, judge.read(image))
    assert (coherent, asked) == (1, 2)


@pytest.mark.parametrize(
    "prompt, changes, said",
    [
        ("mirror the cat", {"facing": "right"}, ""),
        ("mirror the cat", {}, "there should be a small twemoji cat facing right at step 4, 14"),
        ("move the cat right", {"x": 8}, ""),
        ("move the cat right", {"x": 9}, "at step 8, 14"),
        ("draw the cat in noto style", {"style": "noto"}, ""),
        ("draw the cat in noto style", {"style": "fluent"}, "a small noto cat"),
        ("remove the bear", {}, "1 things are new, not 0"),
        (
            "mirror the bear",
            {"facing": "right"},
            "cat facing left at step 4, 14 should have stayed",
        ),
        ("replace the cat with an owl", {"name": "owl", "facing": ""}, ""),
    ],
)
def test_edited_images_are_judged(prompt, changes, said):
    sample = tasks.Sample(prompt, SCENE, target=SCENE, task="edit")
    result = ArtScene.of("pink", [BEAR, dataclasses.replace(CAT, **changes)])
    reason = tasks.score(sample, world.render(result)).reason
    assert said in reason if said else reason == ""


@pytest.mark.parametrize(
    "prompt, said",
    [
        ("a bear and a cat", "is correct"),
        ("a bear and a fluent cat", "a twemoji cat should be a fluent cat"),
        ("an owl and a bear", "a cat should be an owl"),
        ("a cat", "a bear is too many"),
        ("a bear and a cat and a jack-o-lantern", "a jack-o-lantern is missing"),
        ("a bear below a cat on a blue background",
         "the bear is not below the cat, the background is pink, not blue"),
    ],
)  # fmt: skip
def test_a_verdict_names_everything_that_is_wrong(prompt, said):
    assert rules.verdict(ArtRequest.parse(prompt), SCENE) == said


def test_verdicts_are_as_often_good_as_bad_and_name_all_kinds_of_faults():
    said = [sample.answer.strip() for sample in made("reflect", 200)]
    assert 80 < said.count("is correct") < 130
    for fault in ("should be", "is missing", "is too many", "is not", "facing", "noto",
                  "the background is"):  # fmt: skip
        assert any(fault in one for one in said), fault


@pytest.mark.parametrize("task", ["inpaint", "outpaint"])
def test_of_a_hole_only_the_known_cells_are_shown(task):
    for sample in made(task, 12):
        known = sample.known_grid
        shown, whole = world.render(sample.image), world.render(sample.target)
        pixels = known.repeat(world.CELL, axis=0).repeat(world.CELL, axis=1)
        assert (shown[pixels] == whole[pixels]).all()
        assert (shown[~pixels] == world.BACKGROUNDS[sample.target.background]).all()
        hidden = [one for one in sample.target.things if not known[one.cells].all()]
        assert len(hidden) == len(ArtLayout.parse(sample.layout).entries) > 0
    parts = [
        sample.known_grid[one.cells] for sample in made(task, 40) for one in sample.target.things
    ]
    assert sum(part.any() and not part.all() for part in parts) > 10  # things that are cut


@pytest.mark.parametrize("task", ["caption", "infill"])
def test_an_unclear_facing_is_not_described(task):
    told = ArtRequest.parse("two large noto buses on a white background")
    buses = [Placed(2, x, "bus", "noto", "large", way) for x, way in ((2, "left"), (13, "right"))]
    scene = ArtScene.of("white", buses)
    assert tasks.caption.describe(scene, SHEET) == told
    sample = tasks.Sample("", scene, answer=" ", task="caption")
    assert tasks.score(sample, str(told)).ok
    assert not tasks.score(sample, str(told).replace("noto", "fluent")).ok
    said = [
        phrase
        for number in range(400)
        for phrase in ArtRequest.parse(tasks.sample(task, 0, number).answer.strip()).phrases
    ]
    assert any(one.name == "bus" for one in said)
    unclear = judge.unclear(SHEET)
    for one in said:
        faces = SHEET.things[SHEET.numbers[one.name]].drawn and (one.name, "facing") not in unclear
        assert bool(one.facing) == bool(faces), one


def test_the_steps_of_an_answer_lead_to_it():
    columns = set()
    for sample in made("reason", 120):
        steps, answer = sample.answer.strip().rsplit(": ", 1)
        columns.add(sample.column)
        if sample.column == "more":
            first, second = map(int, steps.split(" and "))
            assert answer == ("yes" if first > second else "no")
        elif sample.column == "sum":
            phrases = ArtRequest.parse(steps.replace(", ", " and ")).phrases
            assert len(phrases) == int(answer) == len(sample.image)
        else:
            assert answer in steps and steps.count("<LOC_") == 8
    assert columns == {"sum", "more", "further"}


@pytest.mark.parametrize(
    "prompt, output, said",
    [
        ("add an owl", "owl<LOC_12><LOC_2><LOC_18><LOC_8>", "stands on another thing"),
        ("add an owl", "owl<LOC_16><LOC_2><LOC_22><LOC_8>", ""),
        ("add an owl", "fox<LOC_16><LOC_2><LOC_22><LOC_8>", "is a fox, not an owl"),
        ("add an owl left of the bear", "owl<LOC_16><LOC_2><LOC_22><LOC_8>", "not left of"),
        ("add an owl", "nothing<LOC_16><LOC_2><LOC_22><LOC_8>", "must have one thing"),
    ],
)
def test_layouts_of_edits_are_judged(prompt, output, said):
    sample = tasks.Sample(prompt, SCENE, answer=" owl", task="edit_layout")
    reason = tasks.score(sample, output).reason
    assert said in reason if said else reason == ""
