# SPDX-License-Identifier: Apache-2.0
"""The stage that trains the image tokenizer: a short run, its parts, and what it refuses."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.models import vq, vq_files
from sparse_lavida_jax.scenes import world
from sparse_lavida_jax.training import train_vq

SETTINGS = config.Config(
    vq=config.VQ(channels=(4, 4), latent_channels=4, norm="pixel", norm_groups=1, codebook_size=16),
    optimizer=config.Optimizer(learning_rate=1e-2, warmup_steps=1, b1=0.9, b2=0.99),
    train=config.Train(stage="vq", train_steps=6, batch_size=1),
)


@pytest.mark.slow
def test_a_short_run_writes_a_tokenizer_and_says_how_good_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_vq, "REPORT_IMAGES", 6)
    monkeypatch.setattr(train_vq, "SURVEY_IMAGES", 4)
    train_vq.train(SETTINGS, tmp_path)
    model, settings = vq_files.load(tmp_path / "vq")
    assert settings == SETTINGS.vq
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(model))
    assert Image.open(tmp_path / "reconstructions.png").size == (576, 192)
    assert "mean absolute pixel error" in capsys.readouterr().out


def test_targets_know_nothing_of_the_surroundings():
    survey = train_vq._images((0,), 8)
    components = train_vq._components(survey, SETTINGS.vq)
    grids = np.zeros((2, world.GRID, world.GRID), int)
    grids[:, 2, 2], grids[1, 2, 3] = 5, 9
    targets = components(vq.to_float(np.stack([world.render(grid) for grid in grids])))
    differ = np.abs(np.asarray(targets[0] - targets[1])).max(axis=-1) > 0
    assert differ[16:24, 24:32].any() and not differ[:, :24].any()


def test_the_codebook_has_one_code_a_cluster_the_most_common_first():
    centres = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [0, 2, 0, 0]], np.float32)
    which = np.array([0] * 5 + [1] * 20 + [2] * 7)
    noise = np.random.default_rng(0).normal(0, 0.01, (len(which), 4)).astype(np.float32)
    points = jax.numpy.asarray((centres[which] + noise)[None, :, None])
    codebook, owner = train_vq._place_codebook(points, SETTINGS.vq)
    np.testing.assert_allclose(codebook[:3], centres[[1, 2, 0]], atol=0.02)
    np.testing.assert_array_equal(owner, [0, 1, 2] + [0] * 13)
    np.testing.assert_array_equal(codebook[3:], np.broadcast_to(codebook[0], (13, 4)))


@pytest.mark.parametrize(
    ("section", "changes", "name"),
    [
        ("data", {"source": "prepared"}, "Data.source"),
        ("train", {"seconds": 60.0}, "Train.seconds"),
        ("train", {"init_from": "art"}, "Train.init_from"),
        ("optimizer", {"warmup_steps": 6}, "Optimizer.warmup_steps"),
    ],
)
def test_what_the_stage_cannot_do_is_refused(tmp_path, section, changes, name):
    changed = dataclasses.replace(getattr(SETTINGS, section), **changes)
    with pytest.raises(config.ConfigError, match=name):
        train_vq.train(dataclasses.replace(SETTINGS, **{section: changed}), tmp_path)
