# SPDX-License-Identifier: Apache-2.0
"""The attention bench without a device for it: methods agree, and nothing is timed."""

import os
import subprocess
import sys

from sparse_lavida_jax.kernels import sizes


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "sparse_lavida_jax.bench.attention", *words],
        capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_a_dry_run_says_how_far_the_kernel_is_off():
    done = run("--dry-run", "--shapes=decode_mid", "--batches=1")
    assert done.returncode == 0, done.stderr
    off = {line.split("/")[1]: float(line.split()[-1]) for line in done.stdout.splitlines()}
    assert set(off) == {"kernel", "xla_mask"} and max(off.values()) < 0.01


def test_without_a_kernel_there_is_nothing_to_measure():
    done = run()
    assert done.returncode == 1 and "nothing to measure" in done.stderr


def test_tiles_go_the_whole_way_dry_and_nothing_is_written():
    before = sizes.TABLE.read_bytes()
    done = run("--tune", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert sum(line.endswith(": runs") for line in done.stdout.splitlines()) >= 2
    assert "nothing is written" in done.stdout
    assert sizes.TABLE.read_bytes() == before


def test_without_a_kernel_there_are_no_tiles_to_measure():
    done = run("--tune")
    assert done.returncode == 1 and "there are no tiles" in done.stderr
