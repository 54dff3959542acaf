# SPDX-License-Identifier: Apache-2.0
"""`bench.commits`: what it reads about a commit and a process."""

import pathlib
import subprocess
import sys

from sparse_lavida_jax.bench import commits

ROOT = pathlib.Path(__file__).parents[2]


def test_the_seconds_of_a_config_are_read_from_its_file():
    assert float(commits._setting(ROOT / commits.CONFIG, "seconds")) == 620.0


def test_cpu_time_is_that_of_the_process():
    code = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", f"{code}\ninput()"], stdin=subprocess.PIPE)
    try:
        while commits.cpu_seconds(process) < 0.25:  # only whole ticks are counted
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
