# SPDX-License-Identifier: Apache-2.0
"""The second judge, with its committed weights: it names true things and notices wrong ones."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import judged_crops, look_network, second_judge
from sparse_lavida_jax.art.sheet import STYLES
from sparse_lavida_jax.art.world import ArtScene, Placed, render

SCENES = 60
CAT = Placed(5, 4, "cat", "noto", "large", "left")


@pytest.fixture(scope="module")
def scenes():
    return [judged_crops.crowded("unit", index) for index in range(SCENES)]


def test_true_things_are_named(scenes):
    right = []
    for scene in scenes:
        found = look_network.judge(render(scene), [thing.box for thing in scene.things])
        right += [
            look == look_network.look_of(thing)
            for look, thing in zip(found.looks, scene.things, strict=True)
        ]
    assert len(right) > 2 * SCENES
    assert np.mean(right) >= 0.97


def test_crops_that_were_changed_are_named():
    crops, things = judged_crops.examples("unit", 200)
    judged = look_network.judge_crops(crops)
    assert second_judge.accuracy(judged, things)["share"] >= 0.97


def test_a_wrong_sprite_is_noticed(scenes):
    """Every thing is drawn in the next style; none is named as the true one."""
    styles = tuple(STYLES)
    noticed = []
    for scene in scenes[:20]:
        wrong = [
            dataclasses.replace(one, style=styles[(styles.index(one.style) + 1) % len(styles)])
            for one in scene.things
        ]
        pixels = render(ArtScene.of(scene.background, wrong))
        found = look_network.judge(pixels, [thing.box for thing in scene.things])
        noticed += [
            look != look_network.look_of(thing)
            for look, thing in zip(found.looks, scene.things, strict=True)
        ]
    assert np.mean(noticed) >= 0.97


def test_nothing_and_no_boxes():
    blank = render(ArtScene("pink", ()))
    found = look_network.judge(blank, [(0, 0, 6, 6), (10, 10, 20, 20)])
    assert found.looks == [look_network.NOTHING] * 2
    assert (found.margins > look_network.UNSURE).all()
    assert look_network.judge(blank, []).looks == []


@pytest.mark.parametrize("box", [(0, 0, 6, 10), (20, 20, 26, 26), (6, 6, 6, 6), (-1, 0, 5, 6)])
def test_a_box_that_is_no_square_in_the_image_is_refused(box):
    with pytest.raises(ValueError, match=r"Give left, top, right and bottom in\s+steps"):
        look_network.judge(render(ArtScene("pink", ())), [box])


def test_weights_that_are_missing_are_asked_for(monkeypatch, tmp_path):
    look_network.load.cache_clear()
    monkeypatch.setattr(look_network, "WEIGHTS", tmp_path / "no.safetensors")
    with pytest.raises(FileNotFoundError, match="second_judge --train"):
        look_network.load()


def test_the_judges_are_compared():
    scene = ArtScene.of("blue", [CAT, Placed(18, 18, "key", "fluent", "small")])
    images = [render(scene)]
    found = second_judge.compared(images)
    assert [one.first for one in found] == [look_network.look_of(one) for one in scene.things]
    for row in (second_judge.agreement(found, [scene]), second_judge.agreement(found)):
        assert (row["correct"], row["total"], row["disagreements"]) == (2, 2, [])
    with pytest.raises(ValueError, match="agree on everything"):
        second_judge.sheet_of(images, found)
    found[1] = dataclasses.replace(found[1], second=look_network.NOTHING)
    assert second_judge.agreement(found)["share"] == 0.5
    assert second_judge.sheet_of(images, found).shape == (3 * 40, 3 * 3 * 40, 3)


def test_faults_change_the_right_half_or_all_of_a_thing():
    scene = ArtScene.of("blue", [CAT])
    true = render(scene)
    left, top, right, bottom = (4 * at for at in CAT.box)
    middle = (left + right) // 2
    for fault in judged_crops.FAULTS:
        changed = (judged_crops.faulty(scene, CAT, fault) != true).any(axis=-1)
        assert changed[top:bottom, middle:right].any()
        assert changed[top:bottom, left:middle].any() == (fault == "ghost")
    key = Placed(0, 0, "key", "fluent", "small")
    assert judged_crops.faulty(ArtScene.of("blue", [key]), key, "mirrored") is None
    with pytest.raises(ValueError, match="choose one of style, mirrored, ghost"):
        judged_crops.faulty(scene, CAT, "upside down")


def test_another_background_keeps_the_things():
    """On a background of the world, a drawn one is what is rendered, within rounding."""
    scene = ArtScene.of("blue", [CAT])
    there = np.array([(196, 222, 246)] * 96, np.float32)[:, None]
    moved = judged_crops.on_ground(scene, there).astype(int)
    assert np.abs(moved - render(scene)).max() <= 4


def test_training_learns_and_its_weights_are_read(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(look_network, "WEIGHTS", tmp_path / "one.safetensors")
    monkeypatch.setattr(look_network, "EPOCHS", 1)
    network = look_network.train(rounds=1, pool=look_network.BATCH)
    assert "round 1 of 1" in capsys.readouterr().out
    look_network.load.cache_clear()
    leaves = zip(jax.tree.leaves(network), jax.tree.leaves(look_network.load()), strict=True)
    for trained, read in leaves:
        np.testing.assert_allclose(trained, read, rtol=1e-3, atol=1e-6)
    look_network.load.cache_clear()
