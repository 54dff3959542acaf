# SPDX-License-Identifier: Apache-2.0
"""Correct responses score 1, empty ones 0, and intervals are Wilson's."""

import collections
import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax import config
from sparse_lavida_jax.evals import benchmark, chance, exact, scorers
from sparse_lavida_jax.evals.benchmarks import scenes
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.scenes.prompts import ANSWER_TOKENS

PROMPTS = 40
EVALUATE = config.Evaluate(limit=PROMPTS)
SETTINGS = stand_ins.settings()


def asked(task, split="test", count=PROMPTS):
    return [tasks.sample(task, exact.EVAL_SEED, index, split) for index in range(count)]


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_the_published_one(correct, total, low, high):
    """R. G. Newcombe, Statistics in Medicine 17 (1998) 857, Table I, method 3."""
    assert scorers.wilson_interval(correct, total) == pytest.approx((low, high), abs=6e-5)


def test_an_interval_stays_between_0_and_1():
    assert scorers.wilson_interval(0, 0) == (0.0, 1.0)
    for total in (1, 7, 2000):
        low, high = scorers.wilson_interval(total, total)
        assert 0 < low < high == 1.0


@pytest.mark.parametrize("task", tasks.TASKS)
def test_right_responses_score_1(task):
    samples = asked(task)
    pipe = stand_ins.Knowing(SETTINGS, samples)
    result = exact.evaluate(pipe, task, PROMPTS)
    assert (result.correct, result.total, result.reasons) == (PROMPTS, PROMPTS, {})
    assert result.share == 1.0
    if task in ("draw", "inpaint", "outpaint"):
        assert result.attribute_precision == 1.0
    else:
        assert result.attribute_precision is None
    assert len(pipe.calls) == 1


@pytest.mark.parametrize("task", tasks.TASKS)
def test_empty_responses_score_0_with_reasons(task):
    samples = asked(task)
    result = exact.evaluate(stand_ins.Knowing(SETTINGS, [], ignorant=True), task, PROMPTS)
    emptied = sum(sample.target == world.EMPTY_SCENE for sample in samples)
    assert result.correct == emptied <= 3  # the only object was to be removed
    assert sum(result.reasons.values()) <= result.total - result.correct
    assert result.reasons and all(result.reasons)
    assert not result.attribute_precision


def test_held_out_combinations_have_a_name_of_their_own():
    pipe = stand_ins.Knowing(SETTINGS, asked("draw", "held_out"))
    result = exact.evaluate(pipe, "draw", PROMPTS, split="held_out")
    assert (result.task, result.share) == ("draw/held_out", 1.0)


def test_several_images_of_a_prompt_are_scored_and_their_layouts_counted():
    """Of three images of a prompt two are the same, and one more has no readable layout."""
    samples = asked("draw", count=5)
    pipe = stand_ins.Knowing(SETTINGS, samples)
    assert exact.evaluate_several(pipe, 5, images=3)[1] == 1.0

    def generate(prompts, **_):
        shown = [world.render(sample.target) for sample in samples for _ in range(4)]
        for at in range(0, len(shown), 4):
            # Shifted by one cell: as right as before, for single objects and for any relation.
            shown[at + 1] = np.roll(shown[at], world.IMAGE_SIZE // world.GRID, axis=1)
            shown[at + 2] = np.full_like(shown[at], 128)
        return SimpleNamespace(pixels=shown)

    pipe.generate = generate
    result, layouts = exact.evaluate_several(pipe, 5)
    assert (result.task, result.total, layouts) == ("draw/4 images", 20, 2.0)
    assert 10 <= result.correct <= 15  # what was moved may now be on the other side


def test_everything_that_was_trained_is_evaluated(tmp_path):
    trained = {"draw": 1.0, "answer": 1.0, "fill_layout": 1.0}
    pipe = stand_ins.Knowing(
        stand_ins.settings(data={"tasks": trained}),
        [*asked("draw"), *asked("answer"), *asked("draw", "held_out")],
    )
    bench = scenes.SceneTasks(dataclasses.replace(pipe.settings, evaluate=EVALUATE))
    answers = []
    for batch in bench.batches(bench.items[::-1]):
        assert len({item.key.rsplit("/", 1)[0] for item in batch}) == 1 and len(batch) <= 8
        outputs = bench.answer(pipe, batch, tmp_path)
        for item, output in zip(batch, outputs, strict=True):
            answers.append(benchmark.Answer(item, bench.seed_of(item), output, 0.0))
    answers.sort(key=lambda answer: answer.item.index)
    scores = bench.scores(answers, tmp_path)
    tasks_scored = [score.name for score in scores if not score.name.startswith("-")]
    assert tasks_scored == ["draw", "answer", "draw/held_out"]
    assert all(score.value == 1.0 for score in scores)
    # Every prompt has the same seed as if its task were scored alone.
    assert [answer.seed for answer in answers] == 3 * [exact.EVAL_SEED + i for i in range(PROMPTS)]


def test_a_batch_of_infills_shows_images_to_all_rows_or_to_none(tmp_path):
    """This includes infills without a given word, of which only some show an image."""
    bench = scenes.SceneTasks(
        dataclasses.replace(
            stand_ins.settings(data={"tasks": {"infill": 1.0}}),
            evaluate=config.Evaluate(limit=250, batch_size=32),
        )
    )
    samples = asked("infill", count=250)
    assert {sample.image is None for sample in samples if not sample.given} == {True, False}
    pipe, seen = stand_ins.Knowing(SETTINGS, samples), set()
    for batch in bench.batches(bench.items):
        for item, output in zip(batch, bench.answer(pipe, batch, tmp_path), strict=True):
            asked_alike = [s for s in samples if s.prompt == samples[item.index].prompt]
            assert output["text"] in {sample.answer for sample in asked_alike}
        seen |= {item.index for item in batch}
    assert seen == set(range(250))


def test_tasks_that_show_different_things_are_asked_in_their_own_way():
    """An infill shows an image to some rows and none to others."""
    samples = asked("infill")
    assert 5 < sum(sample.image is None for sample in samples) < PROMPTS - 5
    for first in (0, next(i for i, sample in enumerate(samples) if sample.image)):
        chosen = samples[first:]
        outputs = exact.answer(stand_ins.Knowing(SETTINGS, chosen), chosen)
        assert outputs == [sample.answer for sample in chosen]
    kinds = {}
    for task in ("draw", "edit", "inpaint", "outpaint", "answer", "infill"):
        pipe = stand_ins.Knowing(SETTINGS, asked(task))
        exact.evaluate(pipe, task, 3, seed=exact.EVAL_SEED)
        kinds[task] = pipe.calls
    assert kinds == {
        task: [(call, exact.EVAL_SEED)]
        for task, call in {
            "draw": "draw", "edit": "edit", "inpaint": "fill", "outpaint": "extend",
            "answer": "sample", "infill": "sample",
        }.items()
    }  # fmt: skip


def test_an_image_task_without_a_command_is_asked_as_in_training(monkeypatch):
    """A command would refuse a model that did not learn another task, or write a layout first."""
    lone = dataclasses.replace(tasks.TABLE["edit"], command=None)
    monkeypatch.setitem(tasks.TABLE, "edit", lone)
    samples = asked("edit")
    pipe = stand_ins.Knowing(SETTINGS, samples)
    assert exact.evaluate(pipe, "edit", PROMPTS).share == 1
    assert {call for call, _ in pipe.calls} == {"sample"}
    assert exact.evaluate(stand_ins.Knowing(SETTINGS, [], ignorant=True), "edit", 3).share == 0


@pytest.mark.parametrize("task", [name for name in tasks.TASKS if not tasks.TABLE[name].is_image])
def test_the_space_for_an_answer_holds_the_longest(task):
    samples = asked(task, count=300)
    is_short = tasks.TABLE[task].group == "answer"
    longest = ANSWER_TOKENS if is_short else config.Data().max_answer_len
    if not any(sample.given for sample in samples):  # all others get as much space as they need
        lengths = [len(stand_ins.tokenizer().encode(sample.answer)) for sample in samples]
        assert max(lengths) < longest  # one for the end of text


def test_tallies_add_up():
    samples = asked("draw")
    images = [
        world.render(sample.target) if index % 4 else stand_ins.EMPTY
        for index, sample in enumerate(samples)
    ]
    result = exact.tally("draw", samples, images)
    assert (result.correct, result.total) == (30, 40)
    assert sum(hits for hits, _ in result.columns.values()) == 30
    assert sum(total for _, total in result.columns.values()) == 40
    assert len(result.reasons) <= 8 and sum(result.reasons.values()) <= 10
    low, high = exact.as_json(result)["interval_95"]
    assert low < result.share == 0.75 < high


def test_precision_counts_drawn_objects():
    (sample,) = [s for s in asked("draw") if s.column == "two"][:1]
    cells = [cell for cell, _ in sample.target.objects()]
    free = next(cell for cell in range(36) if cell not in cells)
    third = next(
        thing for thing in world.OBJECTS
        if thing.pair not in {shown.pair for _, shown in sample.target.objects()}
    )  # fmt: skip
    one_too_many = world.render(sample.target.changed({free: third.index}))
    result = exact.tally("draw", [sample], [one_too_many])
    assert result.correct == 0
    assert result.attribute_precision == pytest.approx(2 / 3)


def test_the_table_has_a_line_for_each_task_and_column():
    samples = asked("draw")
    result = exact.tally("draw", samples, [world.render(s.target) for s in samples])
    lines = scorers.table(result.metrics).splitlines()
    low, high = scorers.wilson_interval(40, 40)
    assert lines[2] == f"| draw | 1 | 40 | 40 | {low:.3f} to {high:.3f} | 0.01 |"
    assert [line.split("|")[1].strip() for line in lines[3:]] == [
        *(f"- {column}" for column in sorted(result.columns)), "- attribute precision",
    ]  # fmt: skip
    assert exact.as_json(result)["interval_95"] == [low, high]


@pytest.mark.parametrize(
    "name",
    ["answer", "answer/held_out", "arithmetic", "reflect", "point", "point/held_out", "caption",
     "detect", "edit", "inpaint", "outpaint"],
)  # fmt: skip
def test_chance_is_what_a_reply_gets_that_does_not_look(name):
    """The most frequent right answer to prompts of the same kind, the image shown, any object."""
    task, _, split = name.partition("/")
    samples = [tasks.sample(task, 1, i, split or "test") for i in range(1500)]
    if tasks.TABLE[task].is_image:
        replies = [world.render(sample.image) for sample in samples[:200]]
        share = exact.tally(name, samples[:200], replies).share
    elif task == "point":
        share = sum(1 / len(sample.image) for sample in samples) / len(samples)
    else:
        kinds = collections.defaultdict(collections.Counter)
        for sample in samples:
            kind = re.findall(r"plus|minus|^\w+ \w+", sample.prompt)
            kinds[tuple(kind)][sample.answer] += 1
        share = sum(max(answers.values()) for answers in kinds.values()) / len(samples)
    assert share == pytest.approx(chance.CHANCE[name], abs=0.03)


@pytest.mark.parametrize("task", ["inpaint", "outpaint"])
def test_a_request_of_the_world_says_already_which_cells_to_fill(task):
    """The words go to the model unchanged: other tasks would add a box."""
    prompts = stand_ins.Knowing(SETTINGS, []).prompts
    for sample in asked(task):
        assert prompts.fill_words(task, sample.prompt, ~sample.known_grid) == sample.prompt
