# SPDX-License-Identifier: Apache-2.0
"""Models of the art world: their examples, batches, words and codes."""

import dataclasses
import itertools
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
import tiny
from flax import nnx

from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge, prompts, sheet, tasks, vocabulary, world
from sparse_lavida_jax.art.art_batches import ArtBatches
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.grammar import ArtEdit
from sparse_lavida_jax.art.world import ArtScene
from sparse_lavida_jax.evals import exact
from sparse_lavida_jax.models.vq import VQModel
from sparse_lavida_jax.page import example_prompts
from sparse_lavida_jax.prompting.vocabulary import Reading
from sparse_lavida_jax.scenes import scene_batches as scene_batches
from sparse_lavida_jax.scenes.tokenizer import Tokenizer
from sparse_lavida_jax.training import sources

SHEET = sheet.load()
ART = config.read(pathlib.Path(__file__).parents[2] / "configs/art.py")


class HashCodec:
    """Stands in for an image tokenizer: the code of a cell is a number made of its pixels."""

    is_grey = False

    def encode(self, pixels):
        sides = pixels.shape[1] // 8
        cells = pixels.reshape(len(pixels), sides, 8, sides, 8, 3).swapaxes(2, 3)
        cells = cells.reshape(len(pixels), sides**2, -1).astype(np.int64)
        return (cells @ np.arange(1, 193) % 1024)[..., None]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(vocabulary.SHIPPED)


@pytest.fixture(scope="module")
def given(tokenizer):
    model = stand_ins.settings().model
    model = dataclasses.replace(
        model, vocab_size=tokenizer.vocab_size, grid_size=12, codebook_size=256
    )
    data = {
        "source": "art", "tasks": dict.fromkeys(tasks.TABLE, 1.0), "max_answer_len": 48,
        "image_codec": str(stand_ins.FOUR_CODES),
    }  # fmt: skip
    return stand_ins.settings(model=config.to_dict(model), data=data)


@pytest.fixture(scope="module")
def language(given, tokenizer):
    return prompts.ArtPrompts.of(tokenizer, given, HashCodec())


def test_the_codes_of_a_scene_are_put_together_from_those_of_its_things(language):
    for index in range(8):
        scene = ArtDice(0, "codes", index).scene()
        whole = HashCodec().encode(world.render(scene)[None])[0]
        assert (language.encoder.scene_codes(scene) == whole).all()


def test_the_code_of_a_cell_depends_on_that_cell_alone():
    shape = {"channels": (4, 4, 4, 4), "norm": "pixel", "norm_groups": 1, "codebook_size": 64}
    images = np.random.default_rng(0).random((1, 96, 96, 3), np.float32)
    others = np.random.default_rng(1).random((1, 96, 96, 3), np.float32)
    others[:, 40:48, 16:24] = images[:, 40:48, 16:24]
    for alone in (True, False):
        model = VQModel(config.build(config.VQ, shape | {"cells_alone": alone}), rngs=nnx.Rngs(0))
        latents, changed = model.latents(jnp.asarray(images)), model.latents(jnp.asarray(others))
        assert latents.shape == (1, 12, 12, 16)
        assert bool((latents[0, 5, 2] == changed[0, 5, 2]).all()) == alone
        assert not (latents[0, 5, 3] == changed[0, 5, 3]).all()


def test_a_run_on_art_makes_batches_of_all_tasks(given, tokenizer, monkeypatch):
    monkeypatch.setattr(scene_batches, "LENGTH_PROBE", 4)
    data = sources.open_source(given, tiny.denoiser(given.model))
    assert isinstance(data.batches, ArtBatches)
    assert data.tokenizer.vocab_size == tokenizer.vocab_size
    assert {*data.batches.groups} == {"write", "answer", "tell", "draw", "part", "edit"}
    for group in data.batches.groups:
        row = data.batches.made(group, 0, 0)
        codes = row.example.response
        assert (len(codes) == 144) == (group in ("draw", "part", "edit"))
    wrong = dataclasses.replace(given.data, tasks={"point": 1.0})
    with pytest.raises(config.ConfigError, match=r"has no point\. It has: ask, caption"):
        ArtBatches(dataclasses.replace(given, data=wrong), data.batches.encoder)


def test_a_model_of_fewer_things_is_taught_and_tested_on_these_alone(given, language):
    few = dataclasses.replace(given, data=dataclasses.replace(given.data, things=10))
    taught = sheet.shipped(10)
    names = {thing.name for thing in taught.things}
    assert len(names) == 10 and len({thing.group for thing in taught.things}) > 3
    for number in range(10):
        assert (taught.sprites["small"][number] == SHEET.sprites["small"][number * 12]).all()
    batches, here, shown = ArtBatches(few, language.encoder), exact.world_of(few), set()
    for number in range(60):
        samples = [batches.sample("draw", number), here.sample("draw", 0, number, "held_out")]
        shown |= {thing.name for one in samples for thing in one.target.things}
    assert shown == names
    knows = prompts.ArtPrompts.of(language.encoder.tokenizer, few, HashCodec())
    assert "10 things" in knows.vocabulary.knows and "owl" in language.vocabulary.words
    for task, text in [("generate", "an owl"), ("ground", "owl"), ("ask", "how many owls?")]:
        assert not language.read(task, text, 0).warning
        assert "owl" not in knows.read(task, text, 0).sentence
        assert "'owl" in knows.read(task, text, 0).warning
    assert knows.read("generate", "a dog", 0) == language.read("generate", "a dog", 0)
    for things, source in [(4, "art"), (121, "art"), (10, "scenes")]:
        with pytest.raises(config.ConfigError, match="things"):
            config.build(config.Data, {"things": things, "source": source})


def test_a_part_of_an_image_is_learned_around_one_thing(given, language):
    makers = ArtBatches(given, language.encoder)
    for number in range(20):
        sample = tasks.sample("draw_part", 3, number)
        rows, columns = sample.window
        assert 0 <= rows.start and rows.stop == rows.start + 6 <= 12
        assert any(
            rows.start <= one.cells[0].start and one.cells[0].stop <= rows.stop
            and columns.start <= one.cells[1].start and one.cells[1].stop <= columns.stop
            for one in sample.target.things
        )  # fmt: skip
        row = makers.made("part", number, 0)
        masked, learned = row.blocks.masked[:144], row.example.learned
        assert learned.sum() == 36
        assert masked.any() and not (masked & ~learned).any()


def test_the_prompts_are_those_of_the_art_world(given, language):
    assert given.prompts == "art"
    assert language.refusal("generate") == language.refusal("ground") == ""
    assert "was not trained to converse" in language.refusal("converse")
    assert all(map(language.lays_out, ("generate", "edit", "inpaint")))


@pytest.mark.parametrize("things", [0, ART.data.things])
def test_what_the_page_offers_is_taught_and_about_its_image(given, tokenizer, things):
    data = dataclasses.replace(given.data, things=things)
    settings = dataclasses.replace(given, data=data)
    language = prompts.ArtPrompts.of(tokenizer, settings, HashCodec())
    examples = example_prompts.of_world("art")
    assert judge.read(examples.start()).scene == example_prompts.ART_SCENE
    offered = [(task, one) for task, prompts in examples.prompts.items() for one in prompts]
    offered += [(task, one) for task, text in examples.words.items() for one in text.splitlines()]
    for task, words in offered:
        read = language.read("generate" if task == "surprise" else task, words, 0)
        assert (read.sentence, read.warning) == (words, ""), task
    assert not language.read("generate", language.example, 0).warning
    said = language.vocabulary.knows.split("'")[1]
    assert language.read("generate", said, 0) == Reading(said)


def test_an_image_is_erased_to_its_own_background(language):
    scene = ArtDice(0, "erased", 3).scene(3, 5)
    erased = language.erased(world.render(scene), np.ones((12, 12), bool))
    assert (erased == world.render(ArtScene(scene.background, ()))).all()


@pytest.mark.parametrize("task", ["inpaint", "outpaint"])
def test_holes_are_asked_for_and_shown_as_in_training(language, task):
    for index in range(8):
        sample = tasks.sample(task, 0, index)
        hole, whole = ~sample.known_grid, world.render(sample.target)
        bare = sample.prompt[: sample.prompt.rindex(", ")]
        assert language.fill_words(task, bare, hole) == sample.prompt
        assert (language.erased(whole, hole) == world.render(sample.image)).all()
        codes = HashCodec().encode(world.render(sample.image)[None])[0]
        assert (language.encoder.scene_codes(sample.image) == codes).all()


def test_the_layout_of_an_edit_keeps_what_it_does_not_touch(language):
    for index in range(40):
        sample = tasks.sample("edit", 0, index)
        kept = language.encoder.kept(sample)
        assert (kept == language.kept_cells(sample.layout)).all()
        codes = [language.encoder.scene_codes(one) for one in (sample.image, sample.target)]
        assert (codes[0] == codes[1])[kept].all() and 0 < kept.sum() < 144
    assert language.kept_cells("a dragon") is None


def test_a_larger_image_has_more_cells_and_places(given):
    model = dataclasses.replace(given.model, grid_size=16)
    larger = Tokenizer(vocabulary.tokenizer_for(model))
    model = dataclasses.replace(model, vocab_size=larger.vocab_size)
    language = prompts.ArtPrompts.of(larger, dataclasses.replace(given, model=model), HashCodec())
    assert language.frame == 32
    box = larger.encode("<LOC_0><LOC_16><LOC_32><LOC_32>")
    assert language.boxes(["bear"], [np.array(box)[:, None]], (128, 128)) == [(0, 64, 128, 128)]
    far = 0
    for index, task in itertools.product(range(6), tasks.TASKS):
        sample = tasks.sample(task, 5, index, side=128)
        if isinstance(sample.answer, str) and not sample.target:
            assert tasks.score(sample, sample.answer, side=128).ok
            beyond = any(int(edge) > 24 for edge in re.findall(r"LOC_(\d+)", sample.answer))
            far += beyond
            assert tasks.score(sample, sample.answer).ok != beyond
        for scene in filter(None, (sample.image, sample.target)):
            codes = HashCodec().encode(world.render(scene, 128)[None])[0]
            assert (language.encoder.scene_codes(scene) == codes).all() and len(codes) == 256
        if task in ("inpaint", "outpaint"):
            bare = sample.prompt[: sample.prompt.rindex(", ")]
            hole = ~np.reshape(sample.known, (16, 16))
            assert language.fill_words(task, bare, hole) == sample.prompt
    assert far > 3
    with pytest.raises(config.ConfigError, match="grids of 12 or 16 cells"):
        vocabulary.tokenizer_for(dataclasses.replace(model, grid_size=14))


@pytest.mark.parametrize(
    "verdict, instruction",
    [
        ("a cat should be an owl", "replace the cat with an owl"),
        ("a twemoji cat should be a fluent cat", "draw the cat in fluent style"),
        ("a cat facing left should be a cat facing right", "mirror the cat"),
        ("a jack-o-lantern is missing", "add a jack-o-lantern"),
        ("an owl is too many", "remove the owl"),
        ("the bear is not below the cat", None),
        ("is correct", None),
    ],
)
def test_a_verdict_is_corrected_by_an_instruction(language, verdict, instruction):
    assert language.correction(verdict) == instruction
    if instruction:
        assert str(ArtEdit.parse(instruction)) == instruction


def test_all_words_of_examples_are_known():
    known = vocabulary.of_sheet(SHEET)
    for task in tasks.TABLE:
        for index in range(30):
            sample = tasks.sample(task, 2, index)
            words = " ".join(filter(None, (sample.prompt, sample.answer, sample.layout)))
            assert known.unknown(words) == []
    assert "dragon" in known.warning(["a dragon"])
    assert "120 things (animals, food, vehicles, objects and faces)" in known.warning(["x"])


def test_texts_are_short(tokenizer):
    longest = {"prompt": 40, "answer": 40, "layout": 40}
    for task in tasks.TABLE:
        for index in range(60):
            sample = tasks.sample(task, 1, index)
            for part, most in longest.items():
                text = getattr(sample, part) or ""
                assert len(ids := tokenizer.encode(text)) <= most
                assert tokenizer.decode(ids) == text
