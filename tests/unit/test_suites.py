# SPDX-License-Identifier: Apache-2.0
"""What the suites of whole requests ask for, and the work it is held against. Nothing is run."""

import dataclasses
import fnmatch
import pathlib
import tomllib

import pytest

from sparse_lavida_jax import config_files, presets
from sparse_lavida_jax.bench import suites, table, work

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
FULL = config_files.read(CONFIGS / "lavida_o.py")
SMALL = config_files.read(CONFIGS / "speed_cpu.py")


def case_of(suite, row_id, settings=FULL):
    return next(case for case in suites.cases(suite, settings) if case.id == row_id)


def work_of(case, settings=FULL):
    how = dataclasses.replace(
        presets.step_settings(
            case.sampling, settings.model, case.example.kind, has_source=case.picture is not None
        ),
        discards=case.discards,
    )
    plan = suites._plan(case, how, range(case.batch), settings.model)
    return work.of_request(settings.model, how, plan, suites._prompt(case, how, settings.model))


def test_every_bar_is_of_a_row_that_some_suite_has():
    bars = tomllib.loads(table.BARS.read_text())
    for section, settings in (("speed", FULL), ("speed_cpu", SMALL)):
        ids = {case.id for suite in suites.SUITES for case in suites.cases(suite, settings)}
        patterns = [p for of in bars[section].values() if isinstance(of, dict) for p in of]
        for pattern in " ".join(patterns).split():
            assert any(fnmatch.fnmatchcase(row_id, pattern) for row_id in ids), pattern


def test_the_suites_have_the_rows_that_are_asked_for():
    def methods(suite):
        return [case.method for case in suites.cases(suite, FULL)]

    assert methods("headline") == ["sparse", "dense_lean", "dense_released"]
    assert methods("ablation") == ["none", "p", "r", "t", "pr", "pt", "rt", "sparse"]
    assert methods("edit") == methods("headline")
    assert [case.batch for case in suites.cases("batch", FULL)] == [1, 1, 2, 2, 4, 4, 8, 8]
    steps = [case.sampling.text_steps for case in suites.cases("reasoning", FULL)]
    assert steps == [4] * 4 + [8] * 4 + [32] * 4
    assert set(methods("quant")) == {"sparse", "int8", "w8a8", "fp8"}
    for suite in suites.SUITES:
        for case in suites.cases(suite, FULL):
            # Only rows whose steps cost the same are timed in part.
            dense = case.method.startswith("dense") or case.method == "none"
            assert bool(case.steps_timed) == dense, case.id
    edit = suites.cases("edit", FULL)[0]
    vision, source, *_ = edit.example.parts
    assert (vision.num_tokens, len(source.codes)) == (871, 1024)


def test_work_of_the_release_is_what_its_sizes_make():
    """A step reads 2.684 B parameters and the image head; operations from the paper's sizes."""
    sparse, dense = (
        work_of(case_of("headline", f"t2i1024/{name}/b1")) for name in ("sparse", "dense_lean")
    )
    layers = 2 * 32 * (4 * 2048 * 4096 + 3 * 2048 * 8192)
    assert layers == pytest.approx(5.37e9, rel=1e-3)
    assert {one.weights - layers for one in sparse.steps} == {
        2 * (4 * 2048**2 + 4 * (2 * 2048**2 + 2048 * 8192))
    }
    assert sum(one.useful for one in sparse.steps) == pytest.approx(68.6e12, rel=0.01)
    assert sum(one.useful for one in dense.steps) == pytest.approx(907e12, rel=0.01)
    assert sparse.floor_s(790.0, 4300.0) == pytest.approx(0.098, rel=0.02)
    assert work_of(case_of("edit", "edit1024/sparse/b1")).floor_s(790.0, 4300.0) == pytest.approx(
        0.152, rel=0.02
    )
    assert sparse.prefills and not dense.prefills


def test_little_is_padding():
    """Of pictures at most 15 %; a dense step, and one of text, has none."""
    assert work.padding(work_of(case_of("headline", "t2i1024/sparse/b1"))) < 0.15
    assert work.padding(work_of(case_of("headline", "t2i1024/dense_lean/b1"))) == 0
    assert work.padding(work_of(case_of("reasoning", "reasoning/sparse/b1/k8"))) < 0.01
    text = presets.step_settings(
        case_of("reasoning", "reasoning/sparse/b1/k8").sampling, FULL.model, "text"
    )
    plan = suites._plan(case_of("reasoning", "reasoning/sparse/b1/k8"), text, [0], FULL.model)
    # 32 tokens of the block and 64 registers; a block's first step passes the block before.
    assert {part.decode.shape[-1] + part.rest.shape[-1] for part in plan} == {32}
    assert {part.clean.shape[-1] for part in plan if part.num_steps > 1} == {0}
    assert text.num_registers == 64


def test_throwing_work_away_costs_work():
    lean, released = (
        work_of(case_of("headline", f"t2i1024/dense_{name}/b1")) for name in ("lean", "released")
    )
    assert released.total("useful") > 1.1 * lean.total("useful")
    assert released.total("tokens") == lean.total("tokens")
