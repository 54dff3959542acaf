# SPDX-License-Identifier: Apache-2.0
"""A run directory is one experiment with one writer, and survives any interruption."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from sparse_lavida_jax import config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.training import runs


def with_train(**settings):
    return config.Config(train=dataclasses.replace(config.Train(), **settings))


def test_a_run_goes_on_where_it_stopped(tmp_path):
    with runs.Run(tmp_path / "a", config.Config()) as run:
        assert run.states.restore({"x": jnp.zeros(3)}) is None
        run.states.save(4, {"x": jnp.arange(3.0)})
        run.states.save(4, {"x": jnp.zeros(3)})  # already saved
    with runs.Run(tmp_path / "a", config.Config()) as run:
        step, state = run.states.restore({"x": jnp.zeros(3)})
    assert step == 4
    np.testing.assert_array_equal(state["x"], np.arange(3.0))


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path):
    with runs.Run(tmp_path, config.Config()):
        with pytest.raises(runs.RunError, match=f"by process {os.getpid()}"):
            runs.Run(tmp_path, config.Config()).__enter__()
    with runs.Run(tmp_path, config.Config()):
        pass


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text("999999")
    with runs.Run(tmp_path, config.Config()):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_another_config_is_refused_with_what_differs(tmp_path):
    with runs.Run(tmp_path, config.Config()) as run:
        run.metrics_path.write_text("")
    other = config.Config(seed=7, model=config.Model(width=160))
    with pytest.raises(runs.RunError, match=r"model\.width was 128 and is 160; seed was 0 and is"):
        runs.Run(tmp_path, other).__enter__()
    assert model_folder.read_config(tmp_path) == config.Config()


def test_a_run_that_never_saved_anything_may_change_its_config(tmp_path):
    with runs.Run(tmp_path, config.Config()):
        pass
    with runs.Run(tmp_path, config.Config(seed=7)):
        pass
    assert model_folder.read_config(tmp_path).seed == 7


def test_a_run_that_is_refused_leaves_nothing(tmp_path):
    """Unless something was saved, or the folder held something before."""
    for name in ("new", "saved", "older"):
        with pytest.raises(ValueError, match="refused"), runs.Run(tmp_path / name, config.Config()):
            if name == "saved":
                (tmp_path / name / "metrics.jsonl").write_text("")
            raise ValueError("refused")
        if name == "new":
            assert not (tmp_path / name).exists()
            with runs.Run(tmp_path / "older", config.Config()):
                pass
    for name in ("saved", "older"):
        assert model_folder.read_config(tmp_path / name) == config.Config()


def test_a_run_may_be_made_longer(tmp_path):
    with runs.Run(tmp_path, with_train(train_steps=10)):
        pass
    with runs.Run(tmp_path, with_train(train_steps=20, seconds=5.0)):
        pass
    assert model_folder.read_config(tmp_path).train.train_steps == 20


def test_everything_that_may_change_is_a_setting():
    given = config.to_dict(config.Config())
    assert runs.MAY_CHANGE <= set(traverse_util.flatten_dict(given, sep="."))


def test_a_setting_that_is_newer_than_the_run_has_its_default(tmp_path):
    with runs.Run(tmp_path, config.Config()):
        pass
    given = json.loads((tmp_path / "config.json").read_text())
    del given["model"]["cell_positions"]
    (tmp_path / "config.json").write_text(json.dumps(given))
    with runs.Run(tmp_path, config.Config()):
        pass


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(runs.RunError, match="no run directory"):
        runs.Run(tmp_path, config.Config()).__enter__()
    with pytest.raises(runs.RunError, match="is a file"):
        runs.Run(tmp_path / "thesis.txt", config.Config()).__enter__()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_run_at_the_end_of_the_step(tmp_path, number, code):
    before, state = signal.getsignal(number), {"x": np.arange(3)}
    with pytest.raises(runs.Interrupted, match="after step 5") as stopped:
        with runs.Run(tmp_path, config.Config()) as run:
            assert not run.is_asked_to_stop(4)
            os.kill(os.getpid(), number)
            assert run.stop_signal == number
            run.save_and_stop(5, state)
    assert stopped.value.exit_code == code
    assert signal.getsignal(number) == before
    with runs.Run(tmp_path, config.Config()) as run:
        assert run.states.steps == [5]


@pytest.fixture
def interruptible():
    """Makes interrupts work: a process started by a shell in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_second_interrupt_is_obeyed_at_once(tmp_path, interruptible):
    with runs.Run(tmp_path, config.Config()):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


KILLED_WHILE_SAVING = """
import os, signal, sys
import numpy as np
from sparse_lavida_jax import config
from sparse_lavida_jax.training import runs

run = runs.Run(sys.argv[1], config.Config()).__enter__()
run.states.save(1, {"x": np.full(2_000_000, 1.0)})
run.states.wait()
run.states.save(2, {"x": np.full(2_000_000, 2.0)})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_that_is_killed_leaves_whole_states_and_no_lock(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED_WHILE_SAVING), str(tmp_path / "a")]
    killed = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    with runs.Run(tmp_path / "a", config.Config()) as run:
        step, state = run.states.restore({"x": np.zeros(2_000_000)})
        assert step in (1, 2)
        assert (state["x"] == step).all()
        run.states.save(3, state)
        run.states.wait()
        assert run.states.steps[-1] == 3
