# SPDX-License-Identifier: Apache-2.0
"""The device-day script: runs every part, reports failures, and does not repeat finished parts."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "device_day.sh"
PARTS = """admission first_image image edit reasoning batch generate scenes attention profile
 tests_1 tests_2 lora scenes_gpu""".split()
# As on a GPU, where the compiler counts no operations.
NO_COSTS = """
import jax

jax.stages.Lowered.cost_analysis = jax.stages.Compiled.cost_analysis = lambda self: {}
"""


# A run that scores itself in its second piece.
TRAINED = """
folder=${!#}; folder=${folder#--workdir=}
case "$*" in *scenes_gpu*) mkdir -p "$folder"; [ ! -e "$folder/begun" ] || touch "$folder/report.md"
touch "$folder/begun" ;; esac
"""


def run(*words, **environment):
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, words)],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip


def parts(results):
    """The outcome of each part, in order."""
    lines = (results / "device_day" / "parts.tsv").read_text().splitlines()
    return {name: became for name, became, _ in (line.split("\t") for line in lines)}


@pytest.fixture
def python(tmp_path):
    """Returns a function that makes a fake interpreter, which logs its calls and runs `then`."""

    def made(then="true"):
        program = tmp_path / "python"
        program.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\n{then}\n')
        program.chmod(0o755)
        return str(program)

    return made


@pytest.mark.parametrize("dry", [True, False])
def test_every_part_runs_once_and_the_most_valuable_first(tmp_path, python, dry):
    results = tmp_path / "results"
    words = ["--dry-run"] * dry + [results]
    first, again = (run(*words, PYTHON=python(TRAINED)) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr
    assert list(parts(results)) == PARTS and set(parts(results).values()) == {"done"}
    calls = (tmp_path / "calls").read_text().splitlines()
    pieces = 1 if dry else 2  # of the long training
    assert len(calls) == len(PARTS) - 1 + pieces + 2  # the table, twice
    assert (results / "device_day" / "scenes_gpu.md").exists() != dry
    assert "doctor --kernels" in calls[0] and all((results / "device_day").glob("*.log"))


def test_the_budgets_of_all_parts_fit_the_day():
    """Nine minutes at most each, 40 in all; the training of a config gets what is left."""
    words = [line.split() for line in SCRIPT.read_text().splitlines()]
    calls = [word for word in words if word[:1] in (["part"], ["rows"])]
    budgets = [int(word[2]) for word in calls if word[2].isdigit()]
    assert len(budgets) == len(PARTS) - 1
    assert max(budgets) <= 540 and sum(budgets) + 240 <= 2400


def test_a_training_that_is_not_finished_goes_on_the_next_time(tmp_path, python):
    some = {"PARTS": "scenes_gpu", "PYTHON": python()}
    ended = run(tmp_path, **some, MINUTES="6")
    assert ended.returncode == 1 and parts(tmp_path) == {"scenes_gpu": "to go on"}
    assert (tmp_path / "calls").read_text().count("scenes_gpu.py --seconds=") == 5
    ended = run(tmp_path, **(some | {"PYTHON": python(TRAINED)}), MINUTES="6")
    assert ended.returncode == 0 and parts(tmp_path) == {"scenes_gpu": "done"}


def test_a_part_is_skipped_rather_than_cut(tmp_path, python):
    """Four minutes are enough for the check and the first image, but not for the tests."""
    some = {"PARTS": "admission first_image tests_1", "MINUTES": "4"}
    ended = run("--dry-run", tmp_path, PYTHON=python(), **some)
    assert ended.returncode == 1
    assert list(parts(tmp_path).values()) == ["done", "done", "skipped: no time"]
    assert "tests_1: skipped, since it may take 300 s" in ended.stdout
    ended = run("--dry-run", tmp_path, PYTHON=python(), **(some | {"MINUTES": "6"}))
    assert ended.returncode == 0 and set(parts(tmp_path).values()) == {"done"}


def test_what_failed_or_had_no_time_is_reported_and_gone_on_with(tmp_path, python):
    some = {"PARTS": "edit attention lora"}
    then = 'case "$*" in *attention*) exit 3 ;; *suite=edit*) echo "no time for edit64" ;; esac'
    ended = run("--dry-run", tmp_path, PYTHON=python(then), **some)
    assert ended.returncode == 1
    assert parts(tmp_path) == {"edit": "to go on", "attention": "failed (3)", "lora": "done"}
    assert "attention\tfailed (3)" in ended.stdout
    ended = run("--dry-run", tmp_path, PYTHON=python(), **some)
    assert ended.returncode == 0 and set(parts(tmp_path).values()) == {"done"}
    assert (tmp_path / "calls").read_text().count("config=configs/lavida_o_tiny.py:lora") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_goes_on_when_it_is_stopped(tmp_path, python, number):
    """Not even a process that the part started."""
    then = f"sleep 600 & echo $! > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/id; wait"
    words = ["env", "--default-signal", "bash", SCRIPT, "--dry-run", tmp_path]
    day = subprocess.Popen([*map(str, words)], env=os.environ | {"PYTHON": python(then)})
    until = time.monotonic() + 30
    while not (tmp_path / "id").exists() and time.monotonic() < until:
        time.sleep(0.05)
    started = int((tmp_path / "id").read_text())
    day.send_signal(number)
    assert day.wait(30) == 143
    while _runs(started) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(started) and parts(tmp_path) == {}


def _runs(process):
    """Whether a process exists and is not a zombie; a container may not reap zombies."""
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("words", [["--dry-run"], ["--help"], ["a", "b"]])
def test_a_mistake_is_answered_with_what_it_takes(words):
    done = run(*words)
    assert done.returncode == 2
    assert "launch/device_day.sh [--dry-run] [RESULTS]" in done.stderr
    assert "PARTS       the parts to run" in done.stderr and "set -e" not in done.stderr


@pytest.mark.slow
def test_a_dry_run_goes_through_every_part_and_ends_with_the_table(tmp_path):
    """Also where the compiler counts no operations."""
    site, results = tmp_path / "site", tmp_path / "results"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_COSTS)
    for _ in range(3):  # on a slow machine parts may time out; the next run continues
        done = run("--dry-run", results, PYTHON=sys.executable, PYTHONPATH=str(site))
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout[-4000:]
    assert parts(results).keys() == set(PARTS)  # one that is repeated comes last
    assert "| first image, cold, s | not measured | <= 20 |" in done.stdout
    rows = {path.parent.name for path in (results / "cpu").rglob("*.json")}
    assert rows >= {
        "first_image", "headline", "edit", "reasoning", "batch", "steps", "profile", "training",
    }  # fmt: skip
    assert (results / "device_day" / "table.md").read_text() in done.stdout
