# SPDX-License-Identifier: Apache-2.0
"""A run leaves all promised files, and a stopped or killed run ends like an undisturbed one."""

import os
import shutil
import signal

import jax
import numpy as np
import other_settings
import pytest
import stand_ins

from sparse_lavida_jax import main, train
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.training import metrics


def logged(folder):
    """The metrics of a run without measured times."""
    return [
        {name: value for name, value in line.items() if name not in metrics.TIMED}
        for line in metrics.read_metrics(folder / "metrics.jsonl")
    ]


def test_a_run_leaves_a_model_a_report_metrics_and_images(finished, capsys):
    lines = logged(finished.folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert {"loss", "gradient_norm", "learning_rate", "loss_fraction"} < line.keys()
        assert ("text_nll" in line) != ("image_nll" in line)
        assert all(np.isfinite(value) for value in line.values())
    assert {"text_nll", "image_nll"} <= {name for line in lines for name in line}
    text = (finished.folder / "report.md").read_text()
    for part in ("6 steps", "| draw | ", "| answer | ", "images/drawn.png", "times faster"):
        assert part in text
    assert (finished.folder / "images" / "drawn.png").is_file()
    assert (finished.folder / "images" / "answered.png").is_file()
    loaded = model_folder.load_model(finished.folder)
    assert loaded.config == stand_ins.settings(train={"train_steps": 6})
    assert (loaded.vq_folder / "params.safetensors").is_file()
    assert "6 steps" in (finished.folder / "model" / "README.md").read_text()


@pytest.fixture
def interfere(monkeypatch):
    """Acts before one step; what `before` returns undoes that. No report is written."""

    def before(step, action):
        real = train.train_step

        def wrapped(state, *args, **more):
            if int(state.state.step) + 1 == step:
                action()
            return real(state, *args, **more)

        monkeypatch.setattr(train, "train_step", wrapped)
        return lambda: monkeypatch.setattr(train, "train_step", real)

    monkeypatch.setattr(training_report, "write", lambda pipe, folder, **_: folder / "report.md")
    return before


def assert_same_end(folder, finished):
    assert logged(folder) == logged(finished.folder)
    ours, theirs = (model_folder.load_model(run).model for run in (folder, finished.folder))
    for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_stopped_run_ends_like_one_that_was_not(finished, interfere, tmp_path, capsys):
    """Also if everything is set otherwise in jax when it goes on."""
    words = ["main", *finished.words, f"--workdir={tmp_path / 'run'}"]
    leave_alone = interfere(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert main.main(words) == 0
    assert "SIGTERM after step 3, everything is saved" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()
    leave_alone()
    others = {name: x for name, x in other_settings.values().items() if name in jax.config.values}
    with other_settings.everywhere(**others), jax.set_mesh(jax.make_mesh((2,), ("data",))):
        assert main.main(words) == 0
    assert_same_end(tmp_path / "run", finished)


@pytest.mark.slow
def test_a_run_that_dies_between_saves_ends_like_one_that_did_not(finished, interfere, tmp_path):
    class PowerCutError(BaseException):
        pass

    def cut():
        raise PowerCutError

    words = ["main", *finished.words, f"--workdir={tmp_path / 'run'}"]
    often = "--config.train.checkpoint_seconds=1e-6"
    leave_alone = interfere(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert main.main(words) == 130
    leave_alone()
    leave_alone = interfere(5, cut)
    with pytest.raises(PowerCutError):
        main.main(words)  # two steps after the last save
    assert [line["step"] for line in logged(tmp_path / "run")] == [1, 2, 3]
    leave_alone()
    leave_alone = interfere(6, cut)
    with pytest.raises(PowerCutError):
        main.main([*words, often])
    leave_alone()
    assert main.main(words) == 0
    assert_same_end(tmp_path / "run", finished)


def test_a_finished_run_trains_no_further_unless_it_is_made_longer(finished, interfere, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    words = ["main", *finished.words, f"--workdir={folder}"]

    def forbidden():
        raise AssertionError("a step was taken")

    interfere(7, forbidden)
    assert main.main(words) == 0
    assert_same_end(folder, finished)
    with pytest.raises(AssertionError, match="a step was taken"):
        main.main([*words, "--config.train.train_steps=7"])
