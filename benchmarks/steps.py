# SPDX-License-Identifier: Apache-2.0
r"""Training steps a second of a config, as a person starts it, with everything that a run does.

    python -m benchmarks.steps --config=configs/scenes.py --seconds=60
    python -m benchmarks.steps --config=configs/scenes.py --workdir=runs/scenes
    python -m benchmarks.steps --config=configs/scenes.py --examples=512

Counts from the first step that is reported, so without compiling. The run ends as SIGTERM ends it;
with `--workdir` it is kept, and continued if it is there. With `--examples` nothing is trained: it
counts the seconds of CPU in which one process makes so many examples, in batches after all lessons.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags
from flax import nnx

from benchmarks import command, measurements
from benchmarks.timing import times
from sparse_lavida_jax import config
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.training import sources
from sparse_lavida_jax.training.metrics import read_metrics

CONFIG = flags.DEFINE_string("config", "configs/scenes.py", "What to train.")
SECONDS = flags.DEFINE_integer("seconds", 60, "Most seconds for the process.", lower_bound=1)
REPORTS = flags.DEFINE_integer(
    "reports", 0, "End after so many reports of metrics; 0: when the time is over.", lower_bound=0
)
WORKDIR = flags.DEFINE_string("workdir", "", "Run directory; by default one that is deleted.")
EXAMPLES = flags.DEFINE_integer(
    "examples", 0, "Make so many instead of training: 5 timed turns after 3 others.", lower_bound=0
)
POLL_S = 0.1
WARM_UPS, TURNS = 3, 5  # orders and words are cached from the first turns on
END_S = 60  # to save a run and to end


def main(_: list[str]) -> None:
    """Trains, and writes a row."""
    settings = config.read(pathlib.Path(CONFIG.value))
    if EXAMPLES.value:
        row = {"task": "make_examples", "method": settings.name, **_made(settings)}
        path = measurements.Bench("steps").write(f"{settings.name}/examples", row)
        print(f"{path.name}: {row['median_s']:.3f} s of CPU for {row['examples']} examples")
        return
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(WORKDIR.value or pathlib.Path(folder, "run"))
        steps, seconds = _trained(workdir)
    rate = steps / seconds
    row = {
        "task": "train",
        "method": settings.name,
        "model": settings.name,
        "batch": settings.train.batch_size,
        "steps": steps,
        "seconds": seconds,
        "steps_a_second": rate,
        "note": "of a whole run, from its first reported step",
    }
    path = measurements.Bench("steps").write(settings.name, row)
    print(f"{path.name}: {rate:.2f} steps a second ({steps} in {seconds:.0f} s)", flush=True)


def _made(settings: config.Config) -> dict[str, Any]:
    """Returns the seconds of CPU of making examples, for a row."""
    shapes = nnx.eval_shape(lambda: Denoiser(settings.model, rngs=nnx.Rngs(0)))
    dataset = sources.open_source(settings, shapes).batches.dataset()
    first = max((lesson.until for lesson in settings.data.lessons.values()), default=0)
    number, taken = -(-EXAMPLES.value // settings.train.batch_size), []
    for turn in range(WARM_UPS + TURNS):
        begun = time.process_time()
        for step in range(number):
            dataset[first + turn * number + step]
        taken.append(time.process_time() - begun)
    examples = number * settings.train.batch_size
    return {"batch": settings.train.batch_size, "examples": examples} | times(taken[WARM_UPS:])


def _trained(workdir: pathlib.Path) -> tuple[int, float]:
    """Trains for a while; returns the steps after the first that is reported, and their seconds."""
    end = time.monotonic() + SECONDS.value
    words = [f"--config={CONFIG.value}", f"--workdir={workdir}"]
    run = subprocess.Popen([sys.executable, "-m", "sparse_lavida_jax.main", *words], env=os.environ)
    reports: list[tuple[float, int]] = []
    before = _step(workdir)
    while run.poll() is None and time.monotonic() < end:
        if REPORTS.value and len(reports) >= max(REPORTS.value, 2):
            break
        if _step(workdir) > (reports[-1][1] if reports else before):
            reports.append((time.monotonic(), _step(workdir)))
        time.sleep(POLL_S)
    if run.poll() is None:
        run.send_signal(signal.SIGTERM)
    try:
        status = run.wait(END_S)
    except subprocess.TimeoutExpired:
        run.kill()
        status = run.wait()
    if status:
        sys.exit(status)
    if len(reports) < 2:
        sys.exit(
            f"benchmarks.steps: --seconds={SECONDS.value} is too short for two reports: take more."
        )
    (begun, first), (ended, last) = reports[0], reports[-1]
    return last - first, ended - begun


def _step(workdir: pathlib.Path) -> int:
    """Returns the last step that a run has reported; 0: none."""
    path = workdir / "metrics.jsonl"
    lines = [line for line in read_metrics(path) if "loss" in line] if path.exists() else []
    return lines[-1]["step"] if lines else 0


if __name__ == "__main__":
    command.run(main)
