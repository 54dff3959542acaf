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
DRY = """admission tests attention tune headline ablation edit reasoning quant fastpath batch
 training lora""".split()


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
    first, again = (run(*words, PYTHON=python()) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr
    names = list(parts(results))
    assert set(parts(results).values()) == {"done"} and names[:3] == DRY[:3]
    assert set(names) >= set(DRY) and (names == DRY) == dry
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(names) + 2  # the bars, twice
    assert "doctor --kernels" in calls[0] and all((results / "device_day").glob("*.log"))


def test_what_failed_or_had_no_time_is_told_and_gone_on_with(tmp_path, python):
    some = {"PARTS": "tests attention lora"}
    then = 'case "$*" in *pytest*) exit 3 ;; *attention*) echo "no time for full_8192" ;; esac'
    ended = run("--dry-run", tmp_path, PYTHON=python(then), **some)
    assert ended.returncode == 1
    assert parts(tmp_path) == {"tests": "failed (3)", "attention": "to go on", "lora": "done"}
    assert "tests\tfailed (3)" in ended.stdout
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
    assert "PARTS   the parts to run" in done.stderr and "set -e" not in done.stderr


@pytest.mark.slow
def test_a_dry_run_goes_through_every_part_and_ends_with_the_bars(tmp_path):
    for _ in range(3):  # on a slow machine parts may time out; the next run continues
        done = run("--dry-run", tmp_path, PYTHON=sys.executable)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout[-4000:]
    assert list(parts(tmp_path)) == DRY
    assert "## Whole requests, compared with their bars" in done.stdout
    assert (tmp_path / "cpu" / "headline").is_dir() and (tmp_path / "cpu" / "training").is_dir()
