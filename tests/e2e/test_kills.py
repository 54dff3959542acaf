# SPDX-License-Identifier: Apache-2.0
"""A training killed at any moment continues from its last saved step, bit for bit.

KILLS sets how often it is killed: once, or 20 times in `.ci/run --full`.
"""

import os
import random
import time

import jax
import numpy as np
import pytest
import tiny_run

from sparse_lavida_jax.checkpoints import model_folder

KILLS = int(os.environ.get("KILLS", "1"))
STEPS = 12
EVERY_STEP = {"train_steps": STEPS, "log_every": 1, "checkpoint_seconds": 1e-9}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The command line of an undisturbed run, and its folder.

    The killed runs reuse its compiled programs.
    """
    folder = tmp_path_factory.mktemp("whole")
    words = tiny_run.command(folder, tiny_run.settings(train=EVERY_STEP))
    run = tiny_run.start([*words, f"--workdir={folder / 'run'}"], folder / "said.txt")
    assert run.code() == 0, run.said.read_text()
    return words, folder / "run"


def committed(run) -> int:
    """The newest saved step; 0 if there is none."""
    return max((int(p.name) for p in run.glob("state/*") if p.name.isdigit()), default=0)


def test_however_often_it_is_killed_it_ends_like_one_that_was_not(whole, tmp_path):
    words, expected = whole
    rng, run, killed, ended = random.Random(0), tmp_path / "run", 0, 0
    for attempt in range(KILLS):
        if attempt % 3 == 0:  # sometimes a new run: late kills of one find little to do
            run = tmp_path / f"run{attempt}"
        before = committed(run)
        training = tiny_run.start(
            [*words, f"--workdir={run}"], tmp_path / f"{attempt}.txt", step_seconds=0.05
        )
        if attempt % 3 < 2:
            training.wait_for_step(before)
        time.sleep(rng.uniform(0, 3 if attempt % 3 == 2 else 0.05 * STEPS / 2))
        if training.process.is_alive():
            training.kill()
            killed += training.process.exitcode == -9
        assert not training.steps or training.steps[0] == before
        # A state is deleted only after its successor is saved.
        assert committed(run) >= before
        if attempt % 3 == 2 or attempt == KILLS - 1:
            before = committed(run)
            (run / "state" / f"{STEPS + 1}.orbax-checkpoint-tmp").mkdir(parents=True)
            last = tiny_run.start([*words, f"--workdir={run}"], tmp_path / f"{attempt}-end.txt")
            assert last.code() == 0, last.said.read_text()
            assert last.steps == [*range(before, STEPS)]
            assert tiny_run.lines(run) == tiny_run.lines(expected)
            assert not list(run.glob("state/*tmp*"))
            ours, theirs = (model_folder.load_model(folder).model for folder in (run, expected))
            for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
                np.testing.assert_array_equal(one, other)
            ended += 1
    print(f"{KILLS} times begun, {killed} times killed; {ended} runs ended as one that was not.")
    assert killed > KILLS // 2
