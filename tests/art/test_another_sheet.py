# SPDX-License-Identifier: Apache-2.0
"""A model of another sheet than the bundled one: what it is taught, and how it is judged."""

import dataclasses

import pytest
import stand_ins
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge, prompts, sheet, tasks, vocabulary
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.evals.benchmarks import art
from sparse_lavida_jax.scenes import scene_batches
from sparse_lavida_jax.scenes.tokenizer import Tokenizer
from sparse_lavida_jax.training import sources, train_vq

COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with things that have other colours and names than the bundled ones."""
    bundled, folder = sheet.load(), tmp_path_factory.mktemp("sheet")
    words = (("blorp", "Blorp", "ブロープ"), ("quib", "Quib", "クイブ"))
    things = tuple(
        dataclasses.replace(
            thing, names=tuple(f"{word} {thing.name}" for word in words[number % 2])
        )
        for number, thing in enumerate(bundled.things[:COUNT])
    )
    colours = [2, 0, 1, 3]
    sprites = {size: drawn[:COUNT][..., colours] for size, drawn in bundled.sprites.items()}
    sheet.write(sheet.Sheet(things, sprites), folder)
    return folder


@pytest.fixture(scope="module")
def given(folder):
    model = dataclasses.replace(
        stand_ins.settings().model,
        vocab_size=Tokenizer(vocabulary.SHIPPED).vocab_size,
        grid_size=12,
        codebook_size=256,
    )
    data = {
        "source": "art", "sheet": str(folder), "things": 10, "max_answer_len": 80,
        "max_prompt_len": 128, "tasks": dict.fromkeys(tasks.TABLE, 1.0),
        "image_codec": str(stand_ins.FOUR_CODES),
    }  # fmt: skip
    return stand_ins.settings(model=config.to_dict(model), data=data)


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_right_responses_to_all_its_tasks_are_judged_right(given, split):
    here = exact.world_of(given)
    taught = sheet.taught(given.data)
    names = {thing.name for thing in taught.things}
    assert len(names) == 10 and len(taught.whole.things) == COUNT
    for task in tasks.TASKS:
        for number in range(3):
            sample = here.sample(task, 0, number, split)
            scenes = [one for one in (sample.image, sample.target) if one is not None]
            assert {thing.name for scene in scenes for thing in scene.things} <= names
            right = sample.answer if sample.answer is not None else here.render(sample.target)
            assert here.score(sample, right).ok, (task, sample.prompt)
    drawn = here.sample("draw", 0, 1)
    assert judge.read(here.render(drawn.target), drawn.sheet).scene == drawn.target
    assert not {thing.name for thing in judge.read(here.render(drawn.target)).scene.things} & names
    assert art.is_open(drawn._replace(prompt=f"a {drawn.target.things[0].name}"))


def test_batches_and_prompts_are_about_its_things(given, monkeypatch):
    monkeypatch.setattr(scene_batches, "LENGTH_PROBE", 4)
    data = sources.open_source(given, tiny.denoiser(given.model))
    for group in data.batches.groups:
        row = data.batches.made(group, 0, 0)
        assert (len(row.example.response) == 144) == (group in ("draw", "part", "edit"))
    things = sheet.taught(given.data).things
    language = prompts.ArtPrompts.of(data.tokenizer, given, data.codec)
    assert "10 things" in language.vocabulary.knows and things[0].name in language.vocabulary.knows
    prompt = f"a {things[0].name} and a {things[3].name} in noto style"
    assert not language.read("generate", prompt, 0).warning
    assert language.read("generate", "a camera", 0).warning
    sample = exact.world_of(given).sample("edit", 0, 0)
    assert language.kept_cells(sample.layout).any()
    assert language.replacement(f"noto {things[0].name}", f"a fluent {things[0].name}") == (
        f"draw the {things[0].name} in fluent style"
    )


def test_an_image_tokenizer_is_trained_on_its_things(given):
    images, _, _, report = train_vq.SOURCES["art"](given.data)
    shown, things = images((0, 0), 3), sheet.taught(given.data).whole
    assert "named 1.000" in report(shown, shown)
    assert sum(len(judge.read(image, things).found) for image in shown) >= 3


def test_what_is_no_sheet_is_refused(given, folder, tmp_path):
    for changed, said in [
        ({"sheet": str(tmp_path)}, "holds no sheet of things: .*--out=FOLDER"),
        ({"things": COUNT + 1}, "has 12 things; 13 are needed"),
    ]:
        with pytest.raises(config.ConfigError, match=said):
            sheet.taught(dataclasses.replace(given.data, **changed))
    few = sheet.load(folder)
    sprites = {size: drawn[:5] for size, drawn in few.sprites.items()}
    sheet.write(sheet.Sheet(few.things[:5], sprites), tmp_path / "few")
    with pytest.raises(config.ConfigError, match="has 5 things; 8 are needed"):
        sheet.taught(dataclasses.replace(given.data, sheet=str(tmp_path / "few"), things=0))
    with pytest.raises(config.ConfigError, match="sheet"):
        config.build(config.Data, {"sheet": "things", "source": "scenes"})
    assert sheet.taught(config.Data(source="art", things=10)) is sheet.shipped(10)
