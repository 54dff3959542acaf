# SPDX-License-Identifier: Apache-2.0
"""The attention benchmark without its device: methods agree, and nothing is timed."""

import os
import subprocess
import sys

import pytest

from benchmarks import attention, measurements, methods, timing
from sparse_lavida_jax.evals import circumstances
from sparse_lavida_jax.kernels import attention as kernel_entry
from sparse_lavida_jax.kernels import devices, shapes


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.attention", *words],
        capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_a_dry_run_says_how_far_the_kernel_is_off():
    done = run("--dry-run", "--shapes=decode_mid", "--batches=1")
    assert done.returncode == 0, done.stderr
    off = {line.split("/")[1]: float(line.split()[-1]) for line in done.stdout.splitlines()}
    assert set(off) == {"kernel", "blockwise", "xla_mask"} and max(off.values()) < 0.01


def test_without_a_kernel_there_is_nothing_to_measure():
    done = run()
    assert done.returncode == 1 and "this device has no kernel to measure" in done.stderr


@pytest.mark.slow
def test_tiles_go_the_whole_way_dry_and_nothing_is_written():
    before = devices.TABLE.read_bytes()
    done = run("--tune", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert sum(line.endswith(": runs") for line in done.stdout.splitlines()) >= 2
    assert "nothing is written" in done.stdout
    assert devices.TABLE.read_bytes() == before


def test_without_a_kernel_there_are_no_tiles_to_measure():
    done = run("--tune")
    assert done.returncode == 1 and "no kernel, and so no tiles" in done.stderr


@pytest.mark.slow
def test_a_run_writes_every_row_as_it_is_measured_and_ends_with_the_bars(
    tmp_path, monkeypatch, capsys
):
    """Times this machine, in a temporary folder; a method that fails is left out."""

    def fails(numbers):
        raise RuntimeError("no such device")

    everywhere, results = methods.methods, tmp_path / "package" / "bench" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(kernel_entry, "device_kernel", lambda: "pallas_tpu")
    monkeypatch.setattr(measurements, "RESULTS", results)
    monkeypatch.setattr(methods, "HEADS", 1)
    monkeypatch.setattr(methods, "CALLS", 2)
    monkeypatch.setattr(methods, "IN_FLIGHT", 2)
    monkeypatch.setattr(timing, "CPU_MATMULS", ((8, 8, 8),))
    monkeypatch.setattr(timing, "CPU_COPIED_BYTES", 1024)
    monkeypatch.setattr(attention, "MEMORY_LENS", (128, 256))
    monkeypatch.setattr(
        methods, "methods", lambda case: everywhere(case, dry=True) | {"cudnn": fails}
    )
    attention.FLAGS(["bench", "--runs=5", "--shapes=decode_mid", "--batches=1"])
    attention.main([])
    rows = {(row["task"], row["method"]): row for row in measurements.read_rows("attention")}
    task, told = "decode_mid/forward", capsys.readouterr().out
    kernel = rows[task, "kernel"]
    measured = {method for of, method in rows if of == task}
    assert measured == {"kernel", "blockwise", "xla_mask"}
    assert f"| {task} | 1 | xla_mask |" in told and "cudnn: left out, RuntimeError" in told
    for row in (kernel, rows[task, "xla_mask"], rows["tables_8192", "kernel"]):
        assert len(row["times_s"]) == 5 and 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["run"] == kernel["run"] and min(row["calibration"]["matmul_tflops"].values()) > 0
    assert kernel["ids_sha256"] == shapes.tags("decode_mid").sha256 and kernel["compile_s"] > 0
    assert kernel["flops"]["useful"] < kernel["flops"]["tile"] < kernel["flops"]["dense"]
    assert kernel["software"]["tokamax"] == circumstances.version("tokamax")
    assert (
        f"| at most growth: memory | 1 | <= 2.1 | {rows['memory', 'kernel']['growth']:.3g}" in told
    )
    assert "| at most us: tables_8192 | 4 | <= 60 |" in told
