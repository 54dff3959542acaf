# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.few_steps` on a tiny model with a style code."""

import dataclasses

import numpy as np
import pytest
import stand_ins
import tiny
from absl import flags
from absl.testing import flagsaver
from PIL import Image

from benchmarks import few_steps
from sparse_lavida_jax.pipeline import SparseLaViDa

STYLE = {"style_parts": 2, "style_groups": 1, "style_values": 3}


@pytest.fixture(scope="module")
def pipe():
    model = dataclasses.replace(stand_ins.settings().model, **STYLE)
    given = stand_ins.settings(
        model=model, diffusion={"blocks": "plan"}, data={"tasks": {"draw": 1.0}},
        sampling={"revisions": 2},
    )  # fmt: skip
    flags.FLAGS.mark_as_parsed()
    asked = {"images": 16, "steps": ["1", "3"], "schedules": ["cosine"], "orders": ["halton"]}
    with flagsaver.flagsaver(**asked, given=["words"]), stand_ins.quick_compilation():
        parts = tiny.denoiser(given.model), given, stand_ins.prompts(given), stand_ins.Codec()
        yield SparseLaViDa(*parts, 16)


def test_bits_without_a_code_are_those_of_one_pass_over_the_plan(pipe):
    coded = few_steps.coded_bits(pipe, "words", "halton", "cosine", 3)
    counted = few_steps._bits(pipe, "words", "halton", "cosine", 3)
    np.testing.assert_allclose(coded["without"], counted, rtol=1e-5)
    assert np.abs(coded["with"] - counted).min() > 1e-3
    assert (coded["code"] > 0).all()


def test_rows_say_what_fewer_registers_cost(pipe, tmp_path):
    with flagsaver.flagsaver(finished=str(tmp_path / "finished.jsonl")):
        rows = [*few_steps.register_rows(pipe)]
        assert [row["registers"] for row in rows] == [-1, 1, 0]
        assert rows[0]["gap"] == 0 < rows[0]["bits"]
        assert all(row["gap"] != 0 and row["gap_error"] > 0 for row in rows[1:])
        again = [*few_steps.register_rows(pipe)]  # from the file
    assert again == rows


def test_a_figure_shows_prompts_with_the_same_codes(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(few_steps, "STYLED", 2)
    few_steps.draw_styles(pipe, tmp_path / "styles.png")
    assert Image.open(tmp_path / "styles.png").size[0] > 2 * pipe.codec.image_size


def test_rows_say_what_a_code_costs_and_what_is_drawn_with_it(pipe, monkeypatch):
    rows = [*few_steps.code_rows(pipe)]
    assert [row["steps"] for row in rows] == [1, 3]
    for row in rows:
        assert row["gap"] - row["gap_without"] == pytest.approx(row["bits"] - row["bits_without"])
        assert 1 <= row["perplexity"] <= 3
    plans, task_run = [], pipe.task_run
    monkeypatch.setattr(pipe, "task_run", lambda how: plans.append(how) or task_run(how))
    drawn = [*few_steps.hole_rows(pipe)]
    assert [how.revisions for how in plans[1:]] == [0] * 4  # after the pass that reads codes
    assert [(row["steps"], row["codes"]) for row in drawn] == [
        (1, "prior"), (1, "posterior"), (3, "prior"), (3, "posterior"),
    ]  # fmt: skip
    assert all(row["prompts"] == 16 for row in drawn)
