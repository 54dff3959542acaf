# SPDX-License-Identifier: Apache-2.0
"""Metrics survive kills and resumes; progress is readable with and without a terminal."""

import io

import jax.numpy as jnp
import pytest
import rich.console

from sparse_lavida_jax import config
from sparse_lavida_jax.training import flops, metrics


def test_numbers_of_any_kind_become_lines(tmp_path):
    with metrics.Reporter(config.Config(), tmp_path, 0) as file:
        file.write(1, {"loss": jnp.float32(0.5), "task": "draw", "rows": 16})
        file.write(2, {"loss": float("nan")})
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.5, "task": "draw", "rows": 16},
        {"step": 2, "loss": None},
    ]


def test_resuming_drops_the_lines_that_will_be_written_again(tmp_path):
    with metrics.Reporter(config.Config(), tmp_path, 0) as file:
        for step in (10, 20, 30):
            file.write(step, {"loss": 1.0})
    with metrics.Reporter(config.Config(), tmp_path, 20) as file:
        file.write(30, {"loss": 2.0})
    lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
    losses = [(line["step"], line["loss"]) for line in lines]
    assert losses == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    with metrics.Reporter(config.Config(), tmp_path, 5) as file:
        file.write(6, {"loss": 0.5})
    assert [line["step"] for line in metrics.read_metrics(path)] == [1, 6]


def test_a_new_run_starts_with_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7, "loss": 1.0}\n')
    metrics.Reporter(config.Config(), tmp_path, 0).close()
    assert path.read_text() == ""


def console(**settings):
    return rich.console.Console(file=io.StringIO(), width=100, **settings)


@pytest.fixture
def clock(monkeypatch):
    """The time, in a list of one number."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_progress_is_plain_lines_with_the_time_left(clock):
    """Compilation, before the first line, does not count; the finished share of the run does."""
    where = console(force_terminal=False)
    bar = metrics.ProgressBar("toy", 100, console=where)
    for step, share, seconds in ((10, 0.1, 10), (55, 0.55, 30), (60, 0.8, 15)):
        clock[0] += seconds
        bar.reach(step, share, loss=3.0)
    assert where.file.getvalue().splitlines() == [
        "toy: step 10/100, loss 3",
        "toy: step 55/100, loss 3, 0:00:30 left",
        "toy: step 60/100, loss 3, 0:00:13 left",
    ]


def test_plain_lines_are_ten_seconds_apart(clock):
    where = console(force_terminal=False)
    bar = metrics.ProgressBar("toy", 100, console=where)
    for step in range(1, 8):
        bar.reach(step, step / 100)
        clock[0] += 4.0
    shown = [line.split(",")[0] for line in where.file.getvalue().splitlines()]
    assert shown == ["toy: step 1/100", "toy: step 4/100", "toy: step 7/100"]


def test_without_a_terminal_a_line_says_what_the_first_step_waits_for():
    where = console(force_terminal=False)
    with metrics.ProgressBar("toy", 10, console=where):
        assert where.file.getvalue() == "toy: the first step compiles\n"


def test_on_a_terminal_progress_is_a_bar():
    where = console(force_terminal=True)
    with metrics.ProgressBar("toy", 10, console=where) as bar:
        bar.reach(5, 0.5, loss=2.0)
        bar.say("a sheet of images is in images/000005.png")
    shown = where.file.getvalue()
    assert "step 5/10, loss 2" in shown
    assert "a sheet of images" in shown


def test_a_meter_tells_how_fast_a_run_is(clock):
    meter = metrics.Meter(peak=1000.0)
    work = flops.Work(tokens=60, slots=100, with_loss=25, flops=800.0)
    meter.count(work)
    assert meter.values() == {"loss_fraction": 0.25}  # the first step compiles
    for _ in range(2):
        with meter.waiting():
            clock[0] += 1.0
        clock[0] += 3.0
        meter.count(work)
    assert meter.values() == {
        "loss_fraction": 0.25, "tokens_per_second": 15.0, "data_wait": 0.25, "mfu": 0.2,
    }  # fmt: skip
    unknown = metrics.Meter()
    unknown.values()
    clock[0] += 1.0
    unknown.count(work)
    assert "mfu" not in unknown.values()
    assert set(metrics.TIMED) <= {"tokens_per_second", "data_wait", "mfu"}


def test_tensorboard_gets_the_numbers_and_forgets_what_is_written_again(tmp_path):
    pytest.importorskip("tensorboardX", reason="it comes with pip install '.[log]'")
    from tensorboardX.proto import event_pb2

    board = tmp_path / "tensorboard"
    for resume_at in (0, 1):
        with metrics.Reporter(config.Config(), tmp_path, resume_at) as file:
            for step in (resume_at + 1, resume_at + 2):
                file.write(step, {"loss": 0.5 * step, "task": "draw", "nothing": float("nan")})
    found = []
    for path in sorted(board.iterdir()):
        data, place = path.read_bytes(), 0
        while place < len(data):  # length, its checksum, an event, its checksum
            size = int.from_bytes(data[place : place + 8], "little")
            event = event_pb2.Event.FromString(data[place + 12 : place + 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            place += size + 16
    assert [(step, tag) for step, tag, _ in found] == [(s, "loss") for s in (1, 2, 2, 3)]
    assert [value for *_, value in found] == [0.5, 1.0, 1.0, 1.5]


def test_other_processes_write_no_metrics(monkeypatch, tmp_path):
    monkeypatch.setattr(metrics.runtime, "is_first", lambda: False)
    with metrics.Reporter(config.Config(), tmp_path, 0) as reporter:
        reporter.log_step(1, 0.5, {"loss": 1.0})
        reporter.say("nothing")
    assert not [*tmp_path.iterdir()]
