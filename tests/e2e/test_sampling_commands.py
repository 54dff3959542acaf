# SPDX-License-Identifier: Apache-2.0
"""A trained model draws the same from disk as in memory, and the same for the same seed."""

import dataclasses

import jax
import numpy as np
import pytest
import stand_ins
from PIL import Image

from sparse_lavida_jax import main, pipeline
from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.sampling import calls
from sparse_lavida_jax.scenes import tasks, world

PROMPTS = ["a red circle", "two blue squares", "a green cross"]


def test_a_loaded_model_draws_what_it_drew_in_memory(finished):
    loaded = pipeline.SparseLaViDa.from_pretrained(finished.folder)
    assert loaded.settings == finished.pipe.settings
    for seed in (0, 5):
        ours, theirs = (one.generate(PROMPTS, seed=seed).pixels for one in (loaded, finished.pipe))
        np.testing.assert_array_equal(ours, theirs)
    images = [world.render(tasks.sample("answer", 0, index).image) for index in range(2)]
    asked = ["how many circles are there?", "is there a red cross?"]
    assert loaded.ask(images, asked).texts == finished.pipe.ask(images, asked).texts


def drawn(path):
    with Image.open(path) as image:
        return np.asarray(image)


def test_the_command_line_draws_the_same_for_the_same_seed(finished, tmp_path, capsys):
    words = ["main", "--mode=sample", f"--checkpoint={finished.folder}", "--prompt=a red circle"]
    images = {}
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        path = tmp_path / f"{name}.png"
        assert main.main([*words, f"--seed={seed}", f"--out={path}"]) == 0
        assert capsys.readouterr().out == f"{path}: a red circle\n"
        images[name] = drawn(path)
    assert images["first"].shape == (96, 96, 3)
    np.testing.assert_array_equal(images["first"], images["again"])
    assert (images["first"] != images["other"]).any()


def test_the_command_line_evaluates(finished, tmp_path, capsys):
    words = ["main", "--mode=evaluate", f"--checkpoint={finished.folder}", f"--workdir={tmp_path}"]
    assert main.main(words) == 0
    table = capsys.readouterr().out
    for task in ("draw", "answer", "draw/held_out"):
        assert f"| {task} | " in table


@pytest.fixture
def rows(monkeypatch):
    """The numbers of requests and rows of each prefill."""
    seen, gather = [], calls.gather

    def counting(model, responses, decoded_at, row_key, parts, **more):
        caches = jax.tree.leaves(parts, is_leaf=lambda one: isinstance(one, KVCache))
        seen.append((len(responses), sum(cache.block.shape[0] for cache in caches)))
        return gather(model, responses, decoded_at, row_key, parts, **more)

    monkeypatch.setattr(calls, "gather", counting)
    return seen


def test_guided_drawing_takes_two_rows_an_image(finished, rows):
    pipe = finished.pipe
    guided = dataclasses.replace(pipe.settings.sampling, guidance=50.0)
    without, guided = (pipe.generate(PROMPTS, sampling=chosen).pixels for chosen in (None, guided))
    assert rows == [(4, 4), (4, 8)]
    assert np.not_equal(without, guided).any()


@pytest.mark.slow
def test_guided_editing_takes_three_rows_and_keeps_what_is_known(rows, tmp_path):
    folder = stand_ins.model_of_every_task(tmp_path / "model")
    pipe = pipeline.SparseLaViDa.from_pretrained(folder, batch_size=2)
    guided = dataclasses.replace(pipe.settings.sampling, guidance=1.0, guidance_image=0.5)
    filled = [tasks.sample("inpaint", 0, index) for index in range(2)]
    shown = [world.render(sample.image) for sample in filled]
    known = [sample.known_grid for sample in filled]
    words = [sample.prompt for sample in filled]
    drawn = pipe.inpaint(shown, words, known=known, sampling=guided, seed=1, layout=False)
    assert rows == [(2, 6)]
    before, after = pipe.codec.encode(np.stack(shown)), pipe.codec.encode(np.stack(drawn.pixels))
    kept = np.stack(known).reshape(2, -1)
    np.testing.assert_array_equal(after[kept], before[kept])
