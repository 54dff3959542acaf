# SPDX-License-Identifier: Apache-2.0
"""Tiny training runs in separate processes, for tests that kill, stop or combine them.

A server that has imported everything forks them, so that they start fast. The command line is run
unchanged except for slow parts: the model has arbitrary parameters, images are encoded exactly, and
no report is written.
"""

import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import time
from multiprocessing import forkserver

import jax
import stand_ins
import tiny

from sparse_lavida_jax import config, main, train
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.scenes import scene_batches
from sparse_lavida_jax.training import metrics, sources

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tiny_run"])
SECONDS = 300.0  # time limit of a training run


def settings(**sections) -> config.Config:
    """Returns a configuration for drawing with one joint and one split layer."""
    return stand_ins.settings(**{"data": {"tasks": {"draw": 1.0}}, **sections})


def command(folder: pathlib.Path, given: config.Config) -> list[str]:
    """Writes a config file and returns the command line that trains it in `folder`."""
    path = folder / f"{given.name}.py"
    path.write_text(
        "import json, ml_collections\n\ndef get_config():\n"
        f"    return ml_collections.ConfigDict(json.loads({json.dumps(config.to_dict(given))!r}))\n"
    )
    return [f"--config={path}", f"--compilation_cache={folder / 'programs'}"]


def lines(run: pathlib.Path) -> list[dict]:
    """Returns the metrics of a run without measured times; empty if there is no file."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [
        {name: value for name, value in line.items() if name not in metrics.TIMED}
        for line in metrics.read_metrics(path)
    ]


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class Training:
    """A started training run.

    Attributes:
        process: its process.
        said: a file with its output, and the number of every step.
    """

    process: multiprocessing.process.BaseProcess
    said: pathlib.Path

    @property
    def steps(self) -> list[int]:
        """The steps that it took, as numbers of steps done before each."""
        words = self.said.read_text().splitlines() if self.said.exists() else []
        return [int(word.removeprefix("step ")) for word in words if word.startswith("step ")]

    def wait_for_step(self, step: int) -> None:
        """Waits until it has started a step, or has ended."""
        end = time.monotonic() + SECONDS
        while self.process.is_alive() and step not in self.steps:
            assert time.monotonic() < end, self.said.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        """Kills it, like a power cut."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def ask_to_stop(self) -> None:
        """Sends the signal of a machine that is being preempted."""
        os.kill(self.process.pid, signal.SIGTERM)

    def code(self) -> int:
        """Waits for its end and returns its exit code."""
        self.process.join(SECONDS)
        if self.process.is_alive():
            self.kill()
            raise AssertionError(f"it did not end: {self.said.read_text()}")
        return self.process.exitcode


def start(
    words: list[str], said: pathlib.Path, *, devices: int = 1, step_seconds: float = 0.0
) -> Training:
    """Starts a training run.

    Args:
        words: of its command line.
        devices: number of devices of the process.
        step_seconds: additional time of every step.
    """
    _start_server()
    process = CONTEXT.Process(target=_run, args=(words, str(said), devices, step_seconds))
    process.start()
    return Training(process, said)


def _start_server() -> None:
    """Starts the fork server, with the module search paths of this process."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(words: list[str], said: str, devices: int, step_seconds: float) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_disable_most_optimizations", True)
    # Even small programs are cached for the next process.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    real = train.train_step

    def step(state, *args, **more):
        os.write(file, f"step {int(state.state.step)}\n".encode())
        time.sleep(step_seconds)
        return real(state, *args, **more)

    train.train_step = step
    sources.ImageCodec = stand_ins.Codec
    train.Denoiser = lambda settings, rngs: tiny.denoiser(settings)
    scene_batches.LENGTH_PROBE = 16
    training_report.write = lambda pipe, folder, **_: folder / "report.md"
    code = main.main(["main", *words])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
