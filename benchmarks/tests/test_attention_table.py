# SPDX-License-Identifier: Apache-2.0
"""Ratios and bars of attention, from invented rows; no files are written."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from benchmarks import table
from sparse_lavida_jax.kernels import shapes

CHECKOUT = pathlib.Path(__file__).parents[2]
CALIBRATION = {"matmul_tflops": {"a": 400.0, "b": 800.0}, "copy_gbps": 4000.0}


def row(task, method, seconds, run="a", batch=1, **others):
    return {
        "run": run, "task": task, "batch": batch, "method": method, "median_s": seconds,
        "flops": {"useful": 1e9, "tile": 2e9, "dense": 4e9},
        "device": {"kind": "H200"},
        "bytes": {"least": 8_000_000}, "calibration": CALIBRATION, "id": f"{task}/{method}/{batch}",
    } | others  # fmt: skip


def measured(rows):
    """Whether each bar is met, by bar and rows."""
    lines = table.attention_bars(rows).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return {(name, batch): (value, held) for name, batch, _, value, held in cells if value}


@pytest.mark.parametrize("name", ["README.md", "docs/evaluation.md"])
def test_the_tables_of_a_page_are_those_of_the_committed_rows(name):
    page = (CHECKOUT / name).read_text()
    assert page == table.renewed(page), f"python -m benchmarks.table {name}"


def test_a_reader_that_has_enough_ends_it_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "benchmarks.table"]
    done = subprocess.run(command, cwd=CHECKOUT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def scored(model, method, task, correct, columns=None):
    return {
        "model": model, "method": method, "task": task, "correct": correct, "total": 100,
        "columns": columns or {},
    }  # fmt: skip


def test_the_bundled_model_stands_next_to_its_twins_where_there_is_a_bar():
    rows = [
        scored("scenes_long", "sparse", "draw", 98, {"position": [8, 10], "single": [9, 10]}),
        scored("scenes_dense", "dense", "draw", 80, {"position": [5, 10]}),
        scored("scenes_long", "dense", "edit", 99),
        scored("scenes_long", "sparse", "answer", 40),
    ]

    def lines(rows):
        return {line.split("|")[1].strip(): line for line in rows.splitlines()}

    told = lines(table.bundled_table(rows))
    assert "| 0.01 | 0.980 (0.930 to 0.994) | 0.800 (" in told["draw"]
    assert told["draw"].endswith("| 0.97 met |")
    assert "| 0.800 (" in told["draw: position"] and "| 0.500 (" in told["draw: position"]
    assert told["answer"].endswith(" | | 0.95 not met |")
    assert told["edit"] == "| edit | 0.00 | | | 0.90 not met |"
    assert "draw: single" not in told
    blind = scored("scenes_blind", "sparse", "answer", 36)
    told = lines(table.bundled_table([rows[3], blind]))
    assert told["task"] == "| task | chance | blind | sparse | bar |"
    assert told["answer"].startswith("| answer | 0.35 | 0.36 | 0.400 (")


def test_seconds_of_sampling_are_told_where_they_are_asked_for_alone():
    def sampled(method, seconds, tokens, run="a"):
        more = {"model": "scenes", "steps": 8, "tokens": {"useful": tokens}}
        return row("draw", method, seconds, run, **more)

    rows = [sampled("dense", 3.0, 376), sampled("sparse", 1.0, 107), sampled("sparse", 1, 107, "b")]
    case = "| scenes, draw, 1, 8"
    assert table.table("sampling", rows).splitlines()[2:] == [
        f"{case} | dense | 376 | 1.00 | H200 |",
        f"{case} | sparse | 107 | 3.00 | H200 |",
    ]
    told = table.table("sampling_seconds", rows).splitlines()
    assert "| preset | seconds | tokens | times faster than dense |" in told[0]
    assert told[2:] == [
        f"{case} | dense | 3.0000 | 376 | 1.00 | H200 |",
        f"{case} | sparse | 1.0000 | 107 | 3.00 | H200 |",
        f"{case} | sparse | 1.0000 | 107 | | H200 |",
    ]


def test_every_bar_of_the_suite_is_listed_even_if_nothing_was_measured():
    bars = table.bars()["attention"]
    lines = table.attention_bars([]).splitlines()[2:]
    assert len(lines) == sum(len(of_kind) for of_kind in bars.values()) == 16
    assert all(line.endswith("| not measured |") for line in lines)


def test_bars_name_shapes_and_methods_that_there_are():
    from benchmarks import methods

    known = {"tables_8192", "memory"}
    for name in shapes.names():
        case = methods.Case(name, 1, shapes.tags(name))
        for what in ("forward", "forward_backward"):
            known |= {f"{name}/{what}/{method}" for method in methods.methods(case)}
    for bars in table.bars()["attention"].values():
        for pattern in bars:
            assert any(table.fnmatch.fnmatchcase(name, pattern) for name in known), pattern


def test_times_are_compared_within_a_run_and_a_batch_size():
    rows = [
        row("t2i_1536/forward", "kernel", 1e-5),
        row("t2i_1536/forward", "cudnn", 1.2e-5),
        row("t2i_1536/forward", "cudnn", 2e-5, run="b"),
        row("t2i_1536/forward", "cudnn", 3e-5, batch=2),
    ]
    assert measured(rows) == {("times faster: t2i_1536/forward/cudnn", "1"): ("1.2", "met")}


def test_a_missed_bar_comes_with_what_the_work_takes_at_least():
    rows = [row("t2i_1536/forward", "kernel", 1e-5), row("t2i_1536/forward", "cudnn", 1.1e-5)]
    assert [held for _, held in measured(rows).values()] == ["not met"]
    told = table.attention_bars(rows).splitlines()[-1]
    # 1e9 and 2e9 at 800 TFLOP/s; 8 MB at 4,000 GB/s
    assert "ours 10.0 us" in told and "1.2 us for the pairs" in told
    assert "2.5 us for their tiles; 2.0 us to move" in told


@pytest.mark.parametrize(("seconds", "held"), [(1.7e-5, "not met"), (1.8e-5, "met")])
def test_the_rate_on_tiles_is_held_against_theirs_on_all_pairs(seconds, held):
    """Half of the tiles are active: at the same rate ours takes half the time."""
    rows = [row("x/forward", "kernel", 1e-5), row("x/forward", "tokamax", seconds)]
    share = 0.5 * seconds / 1e-5
    assert measured(rows) == {
        ("tile rate: x/forward/tokamax", "1"): (f"{share:.3g}", held)
    }  # fmt: skip


@pytest.mark.parametrize(("growth", "held"), [(2.0, "met"), (3.9, "not met")])
def test_memory_grows_with_the_length_and_not_with_its_square(growth, held):
    one = {
        "run": "a",
        "task": "memory",
        "method": "kernel",
        "batch": 1,
        "growth": growth,
        "id": "m",
    }
    assert measured([one]) == {("at most growth: memory", "1"): (f"{growth:.3g}", held)}


@pytest.mark.parametrize(("seconds", "held"), [(59e-6, "met"), (61e-6, "not met")])
def test_tables_take_microseconds(seconds, held):
    one = {"run": "a", "task": "tables_8192", "method": "kernel", "batch": 4, "id": "tables"}
    found = measured([one | {"median_s": seconds}])
    assert found == {("at most us: tables_8192", "4"): (f"{seconds * 1e6:.3g}", held)}


def test_the_table_has_every_row_with_its_rates():
    rows = [row("x/forward", "kernel", 1e-5), row("x/forward", "cudnn", 2e-5)]
    lines = table.table("attention", rows).splitlines()[2:]
    assert lines == [
        "| x/forward | 1 | kernel | 10.0 | 1.00 | 100 | 200 | H200 |",
        "| x/forward | 1 | cudnn | 20.0 | 2.00 | 50 | | H200 |",
    ]
