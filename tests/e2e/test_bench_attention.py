# SPDX-License-Identifier: Apache-2.0
"""The attention bench without a device for it: methods agree, and nothing is timed."""

import os
import subprocess
import sys

from sparse_lavida_jax.bench import table


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


def row(method, seconds, run="a", task="t2i_1536/forward"):
    return {
        "run": run, "task": task, "batch": 1, "method": method, "median_s": seconds,
        "flops": {"tile": 2e9}, "device": {"kind": "H200"},
    }  # fmt: skip


def test_ratios_are_formed_within_a_run_and_held_against_the_bars():
    rows = [row("kernel", 1e-5), row("cudnn", 1.2e-5), row("tokamax", 2e-5, run="b")]
    lines = table.attention_table(rows).splitlines()[2:]
    assert lines == ["| t2i_1536/forward | 1 | cudnn | 1.20 | 200 | 1.15 met | H200 |"]
