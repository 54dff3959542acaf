# SPDX-License-Identifier: Apache-2.0
"""Metrics survive kills and resumes; progress is readable with and without a terminal."""

import io

import jax.numpy as jnp
import rich.console

from sparse_lavida_jax import metrics


def test_numbers_of_any_kind_become_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsFile(path) as file:
        file.write(1, {"loss": jnp.float32(0.5), "task": "draw", "rows": 16})
        file.write(2, {"loss": float("nan")})
    assert metrics.read_metrics(path) == [
        {"step": 1, "loss": 0.5, "task": "draw", "rows": 16},
        {"step": 2, "loss": None},
    ]


def test_resuming_drops_the_lines_that_will_be_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsFile(path) as file:
        for step in (10, 20, 30):
            file.write(step, {"loss": 1.0})
    with metrics.MetricsFile(path, resume_at=20) as file:
        file.write(30, {"loss": 2.0})
    losses = [(line["step"], line["loss"]) for line in metrics.read_metrics(path)]
    assert losses == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    with metrics.MetricsFile(path, resume_at=5) as file:
        file.write(6, {"loss": 0.5})
    assert [line["step"] for line in metrics.read_metrics(path)] == [1, 6]


def test_a_new_run_starts_with_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7, "loss": 1.0}\n')
    metrics.MetricsFile(path).close()
    assert path.read_text() == ""


def console(**settings):
    return rich.console.Console(file=io.StringIO(), width=100, **settings)


def log_of_two_writes(tmp_path, monkeypatch, where, seconds=0.0):
    """Half of the run takes from the first write at 10 s to the second at 40 s."""
    clock = iter((10.0, 40.0))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    log = metrics.Log(tmp_path, 100, seconds, console=where)
    log.write(0, {"loss": 3.0}, progress=0.0)
    log.write(50, {"loss": 2.0}, progress=0.5)
    return where.file.getvalue().splitlines()


def test_without_a_terminal_progress_is_plain_lines(tmp_path, monkeypatch):
    lines = log_of_two_writes(tmp_path, monkeypatch, console(force_terminal=False))
    assert lines == ["step 0/100, loss 3.0000", "step 50/100, loss 2.0000, 0:30 left"]


def test_time_left_does_not_exceed_what_the_run_may_take(tmp_path, monkeypatch):
    lines = log_of_two_writes(tmp_path, monkeypatch, console(force_terminal=False), seconds=50.0)
    assert lines[0].endswith("0:50 left")
    assert lines[1].endswith("0:25 left")


def test_on_a_terminal_progress_is_a_bar(tmp_path):
    where = console(force_terminal=True)
    with metrics.Log(tmp_path, 10, console=where) as log:
        log.write(5, {"loss": 2.0}, progress=0.5)
        log.say("a grid of pictures is in pictures/000005.png")
    shown = where.file.getvalue()
    assert "step 5/10, loss 2.0000" in shown
    assert "a grid of pictures" in shown


def test_log_resumes_its_file(tmp_path):
    where = console(force_terminal=False)
    with metrics.Log(tmp_path, 10, console=where) as log:
        log.write(4, {"loss": 1.0}, progress=0.4)
        log.write(8, {"loss": 1.0}, progress=0.8)
    with metrics.Log(tmp_path, 10, 0.0, 4, console=where) as log:
        log.write(5, {"loss": 1.0}, progress=0.5)
    steps = [line["step"] for line in metrics.read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [4, 5]
