# SPDX-License-Identifier: Apache-2.0
"""Which rows a suite of whole requests measures, and their run. Nothing is timed."""

import contextlib
import dataclasses
import json
import pathlib
import sys
import types

import jax
import pytest
from flax import nnx

from benchmarks import command, measurements, requests, suites, timing
from sparse_lavida_jax import config
from sparse_lavida_jax.models.denoiser import Denoiser

SMALL = config.read(pathlib.Path(__file__).parents[2] / "configs" / "speed_cpu.py")
MODEL = jax.eval_shape(lambda: Denoiser(SMALL.model, rngs=nnx.Rngs(0)))
IDS = [f"t2i256/{name}/b1" for name in ("sparse", "dense_lean", "dense_released")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs the suite and returns the measured rows."""
    monkeypatch.setattr(measurements, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(timing, "calibrate", dict)
    row = {"median_s": 1.0, "split_s": {"loop": 1.0}, "floor_s": 0.5, "compile_s": 9.0}

    clock = [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    def suite(settings=SMALL, *, breaks_off_after=99, cases=None, **options):
        measured = []

        def measure(subject, cases, **_):
            if len(measured) == breaks_off_after:
                raise KeyboardInterrupt
            measured.extend(case.id for case in cases)
            clock[0] += 240
            return [row for _ in cases]

        monkeypatch.setattr(requests, "measure", measure)
        dtype = options.pop("vq_dtype", "bfloat16")
        subject = requests.Subject(MODEL, settings, None, dtype, random_weights=True)
        cases = cases or suites.cases("headline", settings)
        with contextlib.suppress(KeyboardInterrupt):
            requests.run_suite(subject, "headline", cases, **{"runs": 5} | options)
        return measured

    return suite


def rows():
    return {row["id"]: row for row in measurements.read_rows("headline")}


def test_a_benchmark_says_that_it_starts_and_that_it_was_stopped(monkeypatch, capsys):
    def main(argv):
        assert (
            argv == ["benchmarks/steps.py"]
            and "benchmarks.steps: started" in capsys.readouterr().err
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["benchmarks/steps.py"])
    monkeypatch.setattr(command.app, "run", lambda begin: begin(sys.argv))
    with pytest.raises(SystemExit) as ended:
        command.run(main)
    assert ended.value.code == 130
    assert "benchmarks.steps: stopped. Rows that are written are kept." in capsys.readouterr().err


def test_what_is_missing_is_measured_in_the_same_run(run):
    assert run(breaks_off_after=2) == IDS[:2]
    assert run(missing=True) == IDS[2:]
    assert len({row["run"] for row in rows().values()}) == 1
    assert run(missing=True) == []


def test_rows_of_other_code_are_measured_again(run, monkeypatch, capsys):
    run()
    monkeypatch.setattr(measurements, "code", lambda: "other")
    assert run(missing=True) == IDS
    assert "t2i256/sparse/b1 is measured again: other code" in capsys.readouterr().out
    assert len({row["run"] for row in rows().values()}) == 1


def test_rows_of_two_runs_are_not_taken_for_one(run):
    """The newer run is continued: rows are compared only within a run."""
    run()
    assert run(breaks_off_after=1) == IDS[:1]
    for row in rows().values():  # so that one run is newer even if both were fast
        year = "2002" if row["id"] == IDS[0] else "2001"
        path = measurements.path_of("headline", f"speed_cpu/{row['id']}")
        path.write_text(json.dumps(row | {"created": year}))
    assert run(missing=True) == IDS[1:]
    assert len({row["run"] for row in rows().values()}) == 1


def test_models_of_one_shape_of_request_have_rows_of_their_own(run):
    other = dataclasses.replace(SMALL, name="other")
    run()
    assert run(other, missing=True) == IDS
    assert sorted(row["model"] for row in measurements.read_rows("headline")) == (
        ["other"] * 3 + ["speed_cpu"] * 3
    )
    # Another size under the same name is a different model.
    changed = dataclasses.replace(SMALL, sampling=dataclasses.replace(SMALL.sampling, num_steps=8))
    assert run(changed, missing=True) == IDS


@pytest.mark.parametrize("missing", [False, True])
def test_rows_measured_in_another_way_are_not_lost(run, monkeypatch, missing):
    run()
    before = rows()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    with pytest.raises(config.ConfigError, match="name this way, such as --variant"):
        run(missing=missing)
    run(missing=missing, variant="slow")
    assert {row_id: rows()[row_id] for row_id in IDS} == before
    assert rows()["t2i256/sparse/b1/slow"]["variant"] == "slow"
    monkeypatch.delenv("XLA_FLAGS")
    with pytest.raises(config.ConfigError, match="vq-dtype"):
        run(missing=missing, vq_dtype="float32")


def test_rows_in_turn_are_measured_with_all_of_their_task(run, monkeypatch):
    monkeypatch.setattr(suites, "in_turn", lambda suite: True)
    sparse, lean, released = suites.cases("headline", SMALL)
    lean = dataclasses.replace(lean, task="edit256")
    assert run(cases=[sparse, lean, released]) == [sparse.id, released.id, lean.id]


def test_no_row_is_begun_that_would_end_later(run, capsys):
    """Two rows of four minutes each fit into nine."""
    assert run(minutes=9.0) == IDS[:2]
    told = "no time for t2i256/dense_released/b1 (--minutes): --missing measures the rest."
    assert told in capsys.readouterr().out
    assert run(minutes=1.0, missing=True) == IDS[2:]  # the first row always
    assert len({row["run"] for row in rows().values()}) == 1
