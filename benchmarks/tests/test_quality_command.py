# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.quality` refuses tasks and checkpoints that do not exist. Nothing is scored."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("--tasks=draw,drow", "scenes_long has no task drow; scored are layout, answer,"),
        ("--checkpoint=nowhere", "nowhere"),
    ],
)
def test_a_score_of_what_is_not_there_is_refused(word, part):
    command = [sys.executable, "-m", "benchmarks.quality", word]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("benchmarks.quality: ") and part in done.stderr
    assert "Traceback" not in done.stderr
