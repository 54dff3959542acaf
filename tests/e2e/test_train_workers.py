# SPDX-License-Identifier: Apache-2.0
"""A training whose batches come from other processes ends as one with a thread, bit for bit."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny_run

from sparse_lavida_jax.checkpoints import model_folder

CHECKOUT = pathlib.Path(__file__).parents[2]
STEPS = 8
SECONDS = 60


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The command line of an undisturbed run with a thread, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    settings = tiny_run.settings(train={"train_steps": STEPS, "log_every": 1}, data={"workers": 0})
    words = tiny_run.command(folder, settings)
    run = tiny_run.start([*words, f"--workdir={folder / 'run'}"], folder / "said.txt")
    assert run.code() == 0, run.said.read_text()
    return words, folder / "run"


def workers_of(parent: int) -> list[int]:
    """The processes that a process has started to make batches."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        if int(words[1]) == parent and words[0] != "Z" and "spawn_main" in command:
            found.append(int(path.name))
    return found


def assert_gone(processes):
    end = time.monotonic() + SECONDS
    while left := [one for one in processes if pathlib.Path(f"/proc/{one}/cmdline").exists()
                   and pathlib.Path(f"/proc/{one}/cmdline").read_text()]:  # fmt: skip
        assert time.monotonic() < end, left
        time.sleep(0.05)


def assert_same_end(run, expected):
    assert tiny_run.lines(run) == tiny_run.lines(expected)
    ours, theirs = (model_folder.load_model(folder).model for folder in (run, expected))
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_lines_of_the_page_on_one_gpu_train_a_tiny_model(tmp_path):
    page = (CHECKOUT / "docs/training.md").read_text().partition("### On one GPU")[2]
    lines = re.findall(r"^\$ (.*)", page.partition("## (b)")[0], re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        line = line.replace("scenes_gpu.py ", "scenes_gpu.py:tiny ").replace("python ", "")
        *limit, module = line.partition("#")[0].rpartition("-m ")[::2]
        words = [*limit[0].split(), sys.executable, "-m", *module.split()]
        done = subprocess.run(
            [word.replace("configs/", f"{CHECKOUT}/configs/") for word in words],
            cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"SPARSE_LAVIDA_RESULTS": str(tmp_path / "results")},
        )  # fmt: skip
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    model = tmp_path / "runs/scenes_gpu_tiny/model"
    settings = model_folder.read_config(model)
    assert settings.data.packing == 4 and settings.train.model_dtype == "bfloat16"
    assert list((tmp_path / "results").rglob("*.json"))


@pytest.mark.slow
def test_a_run_stopped_with_its_workers_goes_on_with_another_number_of_them(whole, tmp_path):
    """As `timeout` and Ctrl-C do, the signal is sent to all processes of the run."""
    words, expected = whole
    run = tmp_path / "run"
    for number, (workers, sent) in enumerate(((2, signal.SIGTERM), (2, signal.SIGINT), (3, None))):
        more = [f"--workdir={run}", f"--config.data.workers={workers}"]
        training = tiny_run.start([*words, *more], tmp_path / f"{number}.txt", step_seconds=0.2)
        training.wait_for_step(2 * number + 1)
        made_by = workers_of(training.process.pid)
        assert len(made_by) == workers
        for process in [*made_by, training.process.pid] if sent else ():
            os.kill(process, sent)
        assert training.code() == {signal.SIGTERM: 0, signal.SIGINT: 130, None: 0}[sent]
        said = training.said.read_text()
        assert ("everything is saved" in said) == (sent is not None) and "Traceback" not in said
        assert_gone(made_by)
    assert_same_end(run, expected)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_a_sentence_after_saving(whole, tmp_path):
    words, expected = whole
    words = [*words, f"--workdir={tmp_path / 'run'}", "--config.data.workers=2"]
    training = tiny_run.start(words, tmp_path / "said.txt", step_seconds=0.2)
    training.wait_for_step(1)
    made_by = workers_of(training.process.pid)
    os.kill(made_by[0], signal.SIGKILL)
    assert training.code() == 2
    said = training.said.read_text()
    assert "a process that makes batches has died (exit code -9)" in said
    assert "Traceback" not in said
    assert_gone(made_by)
    again = tiny_run.start(words, tmp_path / "again.txt")
    assert again.code() == 0, again.said.read_text()
    assert again.steps[0] == training.steps[-1] + 1  # nothing was lost
    assert_same_end(tmp_path / "run", expected)


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed(whole, tmp_path):
    words, expected = whole
    words = [*words, f"--workdir={tmp_path / 'run'}", "--config.data.workers=2"]
    often = "--config.train.checkpoint_seconds=1e-9"
    training = tiny_run.start([*words, often], tmp_path / "said.txt", step_seconds=0.2)
    training.wait_for_step(3)
    made_by = workers_of(training.process.pid)
    assert len(made_by) == 2
    training.kill()
    assert_gone(made_by)
    again = tiny_run.start(words, tmp_path / "again.txt")
    assert again.code() == 0, again.said.read_text()
    assert again.steps[0] > 0
    assert_same_end(tmp_path / "run", expected)
