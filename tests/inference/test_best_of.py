# SPDX-License-Identifier: Apache-2.0
"""The best of several images: which one is returned, what is drawn again, and what it costs."""

import dataclasses
import json

import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax.inference import batch_shapes
from sparse_lavida_jax.inference.tasks import TaskRun
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes import rules, tasks, world

SAMPLING = {"num_steps": 2, "text": {"steps": 1}}
LAYOUT = " large red circle<LOC_4><LOC_8><LOC_8><LOC_12>"


def made(trained):
    return stand_ins.pipe_of_tasks(trained, 4, **SAMPLING)


@pytest.fixture(scope="module")
def pipe():
    with stand_ins.quick_compilation():
        yield made((*tasks.TASKS, "fill_layout"))


@pytest.fixture
def judge(monkeypatch):
    """Sets at which attempt the image of each seed is accepted; returns what was judged."""
    seen = []

    def set_attempts(accepted):
        def verdicts(self, requests, images):
            seen.append([(one.seed, one.attempt) for one in requests])
            right = [one.attempt >= accepted.get(one.seed, 10**9) for one in requests]
            return [rules.CORRECT if one else "is missing a circle" for one in right]

        monkeypatch.setattr(TaskRun, "verdicts", verdicts)
        return seen

    return set_attempts


def test_rows_that_are_refused_are_drawn_again_and_no_others(pipe, judge):
    seen, told = judge({5: 0, 6: 2, 7: 1}), []
    result = pipe.generate(
        ["a"] * 4, seed=[5, 6, 7, 8], layout=LAYOUT, best_of=3,
        callback=lambda state: told.append((state.stage, state.rows)),
    )  # fmt: skip
    assert seen == [[(5, 0), (6, 0), (7, 0), (8, 0)], [(6, 1), (7, 1), (8, 1)], [(6, 2), (8, 2)]]
    assert result.tries == (1, 3, 2, 3)
    assert [text == rules.CORRECT for text in result.texts] == [True, True, True, False]
    rows = list(dict.fromkeys(rows for stage, rows in told if stage == "image"))
    assert rows == [(0, 1, 2, 3), (1, 2, 3), (1, 3)]
    # Every try costs what the first did, since all follow the same layout.
    plain = pipe.generate(["a"] * 4, seed=[5, 6, 7, 8], layout=LAYOUT)
    costs = zip((1, 3, 2, 3), plain.passed, strict=True)
    assert result.passed == tuple(tries * tokens for tries, tokens in costs)
    np.testing.assert_array_equal(result.pixels[0], plain.pixels[0])
    assert (plain.texts, plain.tries) == ((), ())


@pytest.mark.parametrize("task", ["generate", "inpaint", "outpaint"])
def test_a_try_is_drawn_again_from_its_record(pipe, judge, task, tmp_path):
    judge({3: 2})
    image = world.render(tasks.sample("edit", 0, 0).image)
    shown = {"generate": None, "inpaint": image, "outpaint": image[:48, :48]}[task]
    box = {"box": (0, 0, 64, 96)} if task == "inpaint" else {}
    asked = pipe.requests(task, "a red circle", shown, seed=3, layout=False, best_of=8, **box)
    result = pipe.run(asked)
    assert (result.tries, result.records[0]["recipe"]["attempt"]) == ((3,), 2)
    (one,) = asked
    alone = pipe.run([dataclasses.replace(one, attempt=2, best_of=1)])
    np.testing.assert_array_equal(result.pixels[0], alone.pixels[0])
    first = pipe.run([dataclasses.replace(one, best_of=1)])
    assert (first.tokens[0] != alone.tokens[0]).any()  # or this says nothing
    again = pipe.replay(json.loads(json.dumps(result.records[0])), shown)
    result.save(tmp_path / "first.png")
    again.save(tmp_path / "again.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    branch = pipe.branch(result, "image:1", num_images=1, seed=3, shown=shown)
    np.testing.assert_array_equal(branch.pixels[0], result.pixels[0])  # of the same try


def test_copies_are_judged_one_by_one(pipe, judge):
    judge({0: 1, 1: 0})
    assert pipe.generate("a", num_images=2, best_of=2, layout=False).tries == (2, 1)


def test_the_model_judges_whether_an_image_shows_the_words(pipe, monkeypatch):
    examples, sample = [], pipe.engine.sample

    def seen(asked, *given, stage, **how):
        examples.extend(asked if stage == "text" else [])
        return sample(asked, *given, stage=stage, **how)

    monkeypatch.setattr(pipe.engine, "sample", seen)
    result = pipe.generate("a red circle", layout=False, best_of=2, seed=4)
    plain = pipe.generate("a red circle", layout=False, seed=4)
    assert len(examples) == result.tries[0]
    for example in examples:
        words = next(part.ids for part in example.parts[2:-2] if hasattr(part, "ids"))
        assert pipe.tokenizer.decode(words.tolist()) == "check: a red circle"
    assert result.passed[0] > result.tries[0] * plain.passed[0]  # with what judging passes


@pytest.mark.parametrize(
    ("task", "best_of", "told"),
    [
        ("edit", 2, "edit takes no best_of here: the model judges what an image shows"),
        ("reflect", 2, "reflect takes no best_of here: .* set rounds"),
        ("ask", 2, "ask takes no best_of. It takes"),
        ("generate", 0, "best_of=0 is out of range: 1 to 1024"),
        ("generate", 1025, "best_of=1025 is out of range: 1 to 1024"),
        ("generate", 2.5, "best_of=2.5 .*whole number"),
    ],
)
def test_where_it_means_nothing_it_is_refused(pipe, task, best_of, told):
    shown = None if task in ("generate", "reflect") else stand_ins.EMPTY
    with pytest.raises(RequestError, match=told):
        pipe.requests(task, "a", shown, best_of=best_of)


def test_a_model_that_judges_nothing_refuses(pipe):
    untaught = made(["draw", "edit", "inpaint", "outpaint"])
    with pytest.raises(RequestError, match="generate takes no best_of here: this check"):
        untaught.requests("generate", "a", best_of=2)
    (one,) = untaught.requests("generate", "a", best_of=1)
    assert one.best_of == 1


def test_judged_and_unjudged_requests_share_no_batch(pipe):
    (judged,), (plain,) = (pipe.requests("generate", "a", best_of=n) for n in (2, 1))
    (more,) = pipe.requests("generate", "a", best_of=8)
    assert (
        batch_shapes.batching_key(judged)
        == batch_shapes.batching_key(more)
        != batch_shapes.batching_key(plain)
    )
