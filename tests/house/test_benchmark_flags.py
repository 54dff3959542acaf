# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' tests run in one process, in which every flag is defined once."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_all_tests_of_benchmarks_can_be_collected_together():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "benchmarks/tests"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout[-4000:]
