# SPDX-License-Identifier: Apache-2.0
"""Tiny trainings in processes of their own, to be killed, stopped, and put together.

A server that has imported everything forks them, so that one costs its work and no more. The
command line is run as it is, except for what costs time: the model has arbitrary parameters, images
are read exactly, and no report is written.
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
from sparse_lavida_jax.evals import report
from sparse_lavida_jax.scenes import batches
from sparse_lavida_jax.training import metrics, sources

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tiny_run"])
SECONDS = 300.0  # that a training may take


def settings(**sections) -> config.Config:
    """Returns a configuration of one joint and one split layer that draws."""
    return stand_ins.settings(**{"data": {"tasks": {"draw": 1.0}}, **sections})


def command(folder: pathlib.Path, given: config.Config) -> list[str]:
    """Writes a config file and returns the words that train it in `folder`."""
    path = folder / f"{given.name}.py"
    path.write_text(
        "import json, ml_collections\n\ndef get_config():\n"
        f"    return ml_collections.ConfigDict(json.loads({json.dumps(config.to_dict(given))!r}))\n"
    )
    return [f"--config={path}", f"--compilation_cache={folder / 'programs'}"]


def lines(run: pathlib.Path) -> list[dict]:
    """Returns the metrics of a run without what a clock measured; none where there is no file."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [
        {name: value for name, value in line.items() if name not in metrics.TIMED}
        for line in metrics.read_metrics(path)
    ]


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class Training:
    """A training that has been started.

    Attributes:
        process: where.
        said: a file with what it printed, and the number of every step it took.
    """

    process: multiprocessing.process.BaseProcess
    said: pathlib.Path

    @property
    def steps(self) -> list[int]:
        """The steps that it took, by what had been done before each."""
        words = self.said.read_text().splitlines() if self.said.exists() else []
        return [int(word.removeprefix("step ")) for word in words if word.startswith("step ")]

    def wait_for_step(self, step: int) -> None:
        """Waits until it has begun a step, or has ended."""
        end = time.monotonic() + SECONDS
        while self.process.is_alive() and step not in self.steps:
            assert time.monotonic() < end, self.said.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it as a power cut would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def ask_to_stop(self) -> None:
        """Does what a machine does that is wanted elsewhere."""
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
    """Starts a training.

    Args:
        words: of its command line.
        devices: that the process has.
        step_seconds: by which every step is slowed down.
    """
    _start_server()
    process = CONTEXT.Process(target=_run, args=(words, str(said), devices, step_seconds))
    process.start()
    return Training(process, said)


def _start_server() -> None:
    """Starts what forks the processes, with the paths that modules are found in here."""
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
    # Every small program is kept for the next process.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    real = train.train_step

    def step(state, *args, **more):
        os.write(file, f"step {int(state.step)}\n".encode())
        time.sleep(step_seconds)
        return real(state, *args, **more)

    train.train_step = step
    sources.ImageCodec = stand_ins.Codec
    train.Denoiser = lambda settings, rngs: tiny.denoiser(settings)
    batches.LENGTH_PROBE = 16
    report.write = lambda pipe, folder, **_: folder / "report.md"
    code = main.main(["main", *words])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
