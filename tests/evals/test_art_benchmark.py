# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the art world: what is asked, and what coherence, agreement and kept cells are.

The model here knows every answer; faults are planted in what it draws.
"""

import collections
import dataclasses
import pathlib
import types

import numpy as np
import pytest

from sparse_lavida_jax import config
from sparse_lavida_jax.art import tasks, world
from sparse_lavida_jax.evals import benchmark, benchmarks, chance
from sparse_lavida_jax.evals.benchmarks.art import KEPT_ERROR, ArtTasks
from sparse_lavida_jax.evals.official_files import EvaluationError

ART = config.read(pathlib.Path(__file__).parents[2] / "configs/art.py")
SETTINGS = dataclasses.replace(
    ART,
    data=dataclasses.replace(ART.data, tasks={"draw": 1.0, "edit": 1.0, "ask": 1.0}),
    evaluate=config.Evaluate(limit=3, batch_size=4),
)
STYLES = {"noto": "twemoji", "twemoji": "fluent", "fluent": "noto"}


class Knowing:
    """A pipeline that draws what `changed` makes of the right scenes, and knows all answers."""

    def __init__(self, bench, changed=lambda scene, place: scene, drawn=lambda pixels: pixels):
        samples = [bench.sample(item.record) for item in bench.items]
        self.known = {one.prompt: one for one in samples}
        self.settings, self.changed, self.drawn = SETTINGS, changed, drawn
        self.codec = types.SimpleNamespace(encode=lambda x: x, to_pixels=lambda x: x)
        self.layouts = collections.Counter()
        self.prompts = types.SimpleNamespace(answer_tokens=8, ask=lambda words, *_: words)

    def generate(self, prompts, *, layout, **_):
        self.layouts[layout] += len(prompts)
        scenes = [self.changed(self.known[one].target, i) for i, one in enumerate(prompts)]
        images = [self.drawn(world.render(one)) for one in scenes]
        return types.SimpleNamespace(pixels=images)

    def edit(self, shown, prompts, **how):
        return self.generate(prompts, **how)

    def sample(self, examples, **_):
        return examples

    def texts(self, said):
        return [self.known[words].answer for words in said]


def scores(tmp_path, **faults):
    bench = ArtTasks(SETTINGS)
    pipe, answers = Knowing(bench, **faults), []
    for batch in bench.batches(bench.items):
        outputs = bench.answer(pipe, batch, tmp_path)
        answers += [
            benchmark.Answer(item, bench.seed_of(item), output, 0.0)
            for item, output in zip(batch, outputs, strict=True)
        ]
    answers.sort(key=lambda answer: answer.item.index)
    assert len({(one.item.record["task"], one.seed, one.item.key) for one in answers}) == len(
        answers
    )
    task, found = "", {}
    for one in bench.scores(answers, tmp_path):
        task = task if one.name.startswith("-") else one.name
        found[task, one.name.strip("- ") if one.name.startswith("-") else ""] = one
    return found, pipe


def test_tasks_and_splits_are_chosen_by_name_and_unknown_ones_refused():
    def named(*tasks: str, split: str = "") -> config.Config:
        chosen = config.Evaluate(limit=3, tasks=tasks, split=split)
        return dataclasses.replace(SETTINGS, evaluate=chosen)

    def keys(*tasks: str, split: str = "") -> set[str]:
        return {item.key for item in ArtTasks(named(*tasks, split=split)).items}

    assert keys("ask") == {key for key in keys() if key.startswith("ask/")}
    assert keys("ask", "draw", split="test") == {
        key for key in keys() if key.startswith(("ask/test", "draw/test"))
    }
    assert keys(split="test") | keys(split="held_out") == keys()
    with pytest.raises(EvaluationError, match="reflect has no prompts of held-out combinations"):
        reflecting = dataclasses.replace(SETTINGS.data, tasks={"reflect": 1.0})
        ArtTasks(dataclasses.replace(named(split="held_out"), data=reflecting))
    with pytest.raises(EvaluationError, match="'valid': Real art has test and held_out"):
        ArtTasks(named(split="valid"))
    with pytest.raises(EvaluationError, match="names count: the model learned draw, edit, ask"):
        ArtTasks(named("ask", "count"))
    with pytest.raises(EvaluationError, match="MME has no tasks to choose from"):
        benchmarks.find("mme")(named("ask"))


def test_a_model_that_knows_everything_is_right_and_coherent(tmp_path):
    found, pipe = scores(tmp_path)
    asked = ["draw", "edit", "ask", "draw/held_out", "edit/held_out", "ask/held_out"]
    asked += [f"{task}, without a layout" for task in ("draw", "edit")]
    asked += [f"{task}/held_out, without a layout" for task in ("draw", "edit")]
    asked += ["draw, open", "draw, open, without a layout"]
    assert [task for task, part in found if not part] == asked
    assert all(found[task, ""].value == 1.0 for task in asked)
    for task in ("draw", "draw/held_out", "draw, open"):
        for way in ("", ", without a layout"):
            for part in ("things coherent", "things found"):
                assert found[task + way, part].value == 1.0
    for way in ("draw, open", "draw, open, without a layout"):
        assert found[way, ""].count == 12
        assert found[way, "prompts with equal images"].value == 1.0
    assert found["edit", "cells kept"].value == 1.0 < found["edit", "cells kept"].count
    assert found["ask", ""].chance == chance.ART_CHANCE["ask"]
    assert found["edit/held_out, without a layout", ""].chance is None
    assert (pipe.layouts[False], pipe.layouts[None]) == (24, 24)


def test_other_styles_and_mixed_ones_are_told_apart(tmp_path):
    def restyled(scene, place):
        things = [dataclasses.replace(one, style=STYLES[one.style]) for one in scene.things]
        return world.ArtScene.of(scene.background, things) if place % 2 else scene

    found, _ = scores(tmp_path, changed=restyled)
    assert found["draw, open", "prompts with equal images"].value == 0.0
    assert found["draw, open", "things coherent"].value == 1.0

    def half(scene, place):
        other = restyled(scene, 1)
        return dataclasses.replace(scene, things=(*scene.things, *other.things))

    mixed, _ = scores(tmp_path, changed=half)  # drawings on top of each other
    assert mixed["draw", "things coherent"].value < 0.9


def test_a_cell_that_changed_is_not_kept(tmp_path):
    def brighter(image):
        image = image.copy()
        image[:8, :8] = np.clip(image[:8, :8].astype(int) - 2 * KEPT_ERROR, 0, 255)
        return image

    found, _ = scores(tmp_path, drawn=brighter)
    kept = found["edit", "cells kept"]
    assert 0 < kept.count - kept.correct <= 3


def test_it_judges_models_of_art_alone():
    shapes = dataclasses.replace(SETTINGS.data, source="scenes", things=0)
    other = dataclasses.replace(SETTINGS, data=shapes)
    with pytest.raises(EvaluationError, match="judges models of art"):
        ArtTasks(other)
    assert "art" in benchmarks.names() and benchmarks.preset("art")["evaluate"]["limit"] == 100


@pytest.mark.parametrize("split", ["", "/held_out"])
def test_chance_of_a_box_is_that_of_any_thing(split):
    found = []
    for number in range(150):
        sample = tasks.sample("ground", 2026, number, split.strip("/") or "test")
        boxes = ["".join(f"<LOC_{edge}>" for edge in one.box) for one in sample.image.things]
        found.append(np.mean([tasks.score(sample, box).ok for box in boxes]))
    assert np.mean(found) == pytest.approx(chance.ART_CHANCE[f"ground{split}"], abs=0.06)
