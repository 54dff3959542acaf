# SPDX-License-Identifier: Apache-2.0
"""A vision tower learns the labels of cells, and a run begins with it."""

import dataclasses
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.art import cell_labels
from sparse_lavida_jax.art.sheet import STYLES, shipped
from sparse_lavida_jax.art.world import ArtScene, Placed
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.training import start, vision_tower

SHEET = shipped(8)
CELLS = 12
BASE = stand_ins.settings()
SETTINGS = config.changed(
    BASE,
    {
        "model": {
            "grid_size": CELLS,
            "vision": {"image_size": 96, "patch_size": 8, "width": 16, "num_layers": 1, "pool": 2},
        },
        "data": {"source": "art", "image_codec": "art", "things": 8},
    },
)


def test_labels_say_what_is_in_each_cell_and_which_part_of_it():
    thing = SHEET.things[3]
    placed = Placed(5, 2, thing.name, "twemoji", "small", "left" if thing.drawn else "")
    labels = cell_labels.labels_of(ArtScene("white", (placed,)), SHEET, CELLS)
    kinds = cell_labels.kinds(SHEET)
    look, facing, size, row, column = labels
    inside = np.zeros((CELLS, CELLS), bool)
    inside[2:6, 1:4] = True  # steps 5 to 10, and 2 to 7: a row begins in the middle of a cell
    assert (look[inside] == 3 * len(STYLES) + list(STYLES).index("twemoji")).all()
    assert (look[~inside] == kinds["look"] - 1).all()
    assert (facing[inside] == bool(thing.drawn)).all() and (size[inside] == 0).all()
    assert (row[2:6, 1] == [0, 2, 4, 6]).all() and (column[2, 1:4] == [1, 3, 5]).all()
    assert all((labels[i] < count).all() for i, count in enumerate(kinds.values()))


def test_the_loss_counts_things_and_their_parts_only_where_they_are():
    labels = jnp.asarray(cell_labels.examples(SHEET, CELLS, "test", 0, 4)[1])
    values = tuple(cell_labels.kinds(SHEET).values())
    right = np.concatenate(
        [30.0 * np.eye(n)[labels[:, number]] for number, n in enumerate(values)], axis=-1
    )
    loss, shares = vision_tower.losses(jnp.asarray(right), labels, values)
    assert float(loss) < 1e-5 and (np.asarray(shares) == 1).all()
    background = np.asarray(labels[:, 0] == values[0] - 1)
    right[background, values[0] :] *= -1  # has no part, size or facing
    again, shares = vision_tower.losses(jnp.asarray(right), labels, values)
    assert float(again) == pytest.approx(float(loss)) and (np.asarray(shares) == 1).all()
    right[~background, : values[0]] *= -1
    worse, shares = vision_tower.losses(jnp.asarray(right), labels, values)
    assert float(worse) > 1 and float(shares[0]) == 0


def test_a_tower_learns_and_a_run_begins_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(vision_tower, "EVERY", 20)
    monkeypatch.setattr(vision_tower, "TESTED", 32)
    (_, early, _), *_, (steps, last, said) = vision_tower.train(SETTINGS, 80)
    assert steps == 80 and "held_out look" in said
    images, labels = map(jnp.asarray, cell_labels.examples(SHEET, CELLS, "see/test", 0, 32))
    values = tuple(cell_labels.kinds(SHEET).values())
    before, after = (
        float(vision_tower.losses(m(images), labels, values)[0]) for m in (early, last)
    )
    assert after < before - 0.2

    path = tmp_path / "tower.safetensors"
    vision_tower.save(last, path)
    given = config.changed(SETTINGS, {"train": {"vision_from": str(path)}})
    begun = start.init_state(given, model_folder.make_denoiser(given)).params
    np.testing.assert_array_equal(begun.vision(images[:2]), last.vision(images[:2]))
    with pytest.raises(model_folder.CheckpointError, match="holds no vision tower for this model"):
        start.init_state(dataclasses.replace(BASE, train=given.train), tiny.denoiser(BASE.model))
    missing = config.changed(given, {"train": {"vision_from": str(tmp_path / "no")}})
    with pytest.raises(model_folder.CheckpointError, match=r"training\.vision_tower"):
        start.init_state(missing, model_folder.make_denoiser(missing))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--config=configs/scenes.py"], "is not a model of the art world"),
        (["--config=configs/no.py"], "no.py"),
        (["--config=configs/art.py", "--steps=0"], "--steps=0 must be 1 or more"),
    ],
)
def test_bad_input_is_named(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    out = tmp_path / "tower.safetensors"
    monkeypatch.setattr(sys, "argv", ["vision_tower", *words, f"--out={out}"])
    with pytest.raises(SystemExit, match="2"):
        vision_tower.main()
    assert told in capsys.readouterr().err and not out.exists()
