# SPDX-License-Identifier: Apache-2.0
r"""Compares two commits in training: CPU time per step, and image scores for the CPU time spent.

    python -m sparse_lavida_jax.bench.commits --before=13c59e4 -- \
        --config.diffusion.blocks=schedule --config.diffusion.text_masked_blocks=1
    python -m sparse_lavida_jax.bench.commits --before=13c59e4 --score

Both are exported with `git archive` and run `main --config=configs/scenes.py`; options after `--`
go to both. By default both share one core for `--seconds`, so that other load on the machine slows
both alike, and the CPU time per step is compared, including batches but not compilation. With
`--score` each has its own core; the later commit trains for half the seconds of the config, and
both are scored on the same prompts. Writes one row to `bench/results/<device>/commits`.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags, logging

from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.training import metrics

BEFORE = flags.DEFINE_string("before", None, "Earlier commit.", required=True)
AFTER = flags.DEFINE_string("after", "HEAD", "Later commit.")
SECONDS = flags.DEFINE_float("seconds", 300.0, "Seconds that both train; not with --score.")
SCORE = flags.DEFINE_boolean("score", False, "Compare drawn images instead of steps.")
PROMPTS = flags.DEFINE_integer("prompts", 500, "Prompts for --score.", lower_bound=1)

CONFIG = "configs/scenes.py"
WARM = 200  # first steps, not timed: every program is compiled by then
SAME = 20  # the number of first steps whose losses are compared
# Without sheets of images, by the name of the option that commits of any age take.
ENDLESS = ("train_steps=1000000", "seconds=0", "log_every=1", "eval_prompts=0", "picture_seconds=0")


@dataclasses.dataclass
class Trainer:
    """A commit that trains in its own process.

    Args:
        commit: its name in git.
        root: the folder for its code, run and log.
        options: for `main`, the same for both commits.
    """

    commit: str
    root: pathlib.Path
    options: list[str]

    def __post_init__(self):
        self.code, self.run = self.root / "code", self.root / "run"
        self.code.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", self.commit], check=True, capture_output=True)
        subprocess.run(["tar", "-x"], cwd=self.code, input=archive.stdout, check=True)
        found = subprocess.run(
            ["git", "rev-parse", self.commit], check=True, capture_output=True, text=True
        )
        self.commit = found.stdout.strip()

    def start(self, core: int, *options: str) -> subprocess.Popen:
        """Starts `main` on one core."""
        how = (f"--config={CONFIG}", f"--workdir={self.run}", *options, *self.options)
        return self._python("sparse_lavida_jax.main", *how, core=core)

    def _python(self, module: str, *options: str, core: int) -> subprocess.Popen:
        log = (self.root / "log").open("a")
        return subprocess.Popen(
            [sys.executable, "-m", module, *options],
            cwd=self.code,
            env=os.environ | {"PYTHONPATH": str(self.code)},
            stdout=log,
            stderr=log,
            preexec_fn=functools.partial(os.sched_setaffinity, 0, {core}),
        )

    def logged(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return metrics.read_metrics(path) if path.exists() else []

    def score(self, core: int) -> subprocess.Popen:
        """Starts scoring the trained model."""
        how = (f"--checkpoint={self.run}", f"--prompts={PROMPTS.value}", "--tasks=draw")
        return self._python("sparse_lavida_jax.bench.quality", *how, core=core)

    def scored(self) -> dict[str, Any]:
        """Returns the newest row of scores of the trained model."""
        found = self.code.glob("sparse_lavida_jax/bench/results/*/quality/scenes.sparse.draw.json")
        return max((json.loads(path.read_text()) for path in found), key=lambda row: row["created"])


def cpu_seconds(process: subprocess.Popen) -> float:
    """Returns the CPU seconds that a process has used (Linux)."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steps(trainers: dict[str, Trainer], seconds: float) -> dict[str, Any]:
    """Returns the CPU time per step of each commit, and how far apart their losses are."""
    core = min(os.sched_getaffinity(0))
    started = {name: one.start(core, *_train(*ENDLESS)) for name, one in trainers.items()}
    seen: dict[str, list[tuple[int, float]]] = {name: [] for name in trainers}
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(1.0)
            for name, process in started.items():
                if process.poll() is not None:
                    sys.exit(f"bench.commits: {name} ended; see {trainers[name].root}/log.")
                if (lines := trainers[name].logged()) and lines[-1]["step"] >= WARM:
                    seen[name].append((lines[-1]["step"], cpu_seconds(process)))
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    if not all(seen.values()):
        sys.exit(f"bench.commits: {WARM} steps took longer than --seconds={seconds:g}: give more.")
    each = {
        name: (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
        for name, points in seen.items()
    }
    losses = ([line["loss"] for line in one.logged()[:SAME]] for one in trainers.values())
    apart = [abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)]
    return {
        "cpu_s_a_step": each,
        "steps": {name: points[-1][0] - points[0][0] for name, points in seen.items()},
        "times_faster": each["before"] / each["after"],
        "losses_apart": max(apart),
    }


def scores(trainers: dict[str, Trainer]) -> dict[str, Any]:
    """Returns scores: "before" trains for the seconds of the config, "after" for half of them."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(trainers):
        sys.exit(f"bench.commits: --score needs {len(trainers)} cores, this process has 1.")
    rows = {}
    whole = float(_setting(trainers["before"].code / CONFIG, "seconds"))
    shares = {"before": whole, "after": whole / 2}
    started = {
        name: one.start(core, *_train(f"seconds={shares[name]}", "eval_prompts=0"))
        for core, (name, one) in zip(cores, trainers.items(), strict=False)
    }
    spent = dict.fromkeys(trainers, 0.0)
    while any(process.poll() is None for process in started.values()):
        time.sleep(1.0)
        for name, process in started.items():
            if process.poll() is None:
                spent[name] = cpu_seconds(process)
    for core, (name, one) in zip(cores, trainers.items(), strict=False):
        one.score(core).wait()
        row = one.scored()
        rows[name] = {
            "share": row["share"],
            "interval_95": row["interval_95"],
            "seconds": shares[name],
            "cpu_s": spent[name],
            "train_steps": one.logged()[-1]["step"],
        }
    return {"prompts": PROMPTS.value, "draw": rows}


def _train(*options: str) -> list[str]:
    return [f"--config.train.{option}" for option in options]


def _setting(path: pathlib.Path, name: str) -> str:
    """Returns the number that a config file sets for a name."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return next(line for line in lines if line.startswith(f"{name}=")).split("=")[1].rstrip(",")


def main(argv: list[str]) -> None:
    """Compares two commits."""
    options = argv[1:]
    logging.set_verbosity(logging.WARNING)
    bench = Bench("commits")
    with tempfile.TemporaryDirectory() as folder:
        made = {"before": BEFORE.value, "after": AFTER.value}
        trainers = {
            name: Trainer(commit, pathlib.Path(folder) / name, options)
            for name, commit in made.items()
        }
        found = scores(trainers) if SCORE.value else steps(trainers, SECONDS.value)
        row = {name: one.commit for name, one in trainers.items()} | found
        row |= {"config": CONFIG, "options": options}
        path = bench.write("scores" if SCORE.value else "steps", row)
    print(json.dumps(found, indent=1), path, sep="\n")


if __name__ == "__main__":
    app.run(main)
