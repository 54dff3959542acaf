# SPDX-License-Identifier: Apache-2.0
"""Speculation has the sampler's codes, and keeping one step too many is counted as a difference."""

import dataclasses

import numpy as np
import pytest
import tiny

from benchmarks import aot_whole_plan, measurements, speculation
from sparse_lavida_jax import config
from sparse_lavida_jax.inference.engine import Engine

STEPS, BATCH, TURNS, MORE = 5, 2, 4, 24
MARGIN = 0.02  # logits; rounding moves scores by less than 1e-4


@pytest.fixture(scope="module")
def subject():
    """Images of 9 cells, of which some have given ones; draws depend on other cells."""
    model = tiny.model_settings()
    engine = Engine(tiny.denoiser(model), BATCH, tiny.TEXT_BLOCK_LEN)
    sampling = config.Sampling(num_steps=STEPS, schedule="linear", guidance=0.0, temperature=0.1)
    asked = [
        tiny.request("image", model, i, words=3, given=0.3 * (i > MORE)) for i in range(2 * MORE)
    ]
    empty = np.zeros((tiny.IMAGE_LEN, 1), np.int32)
    return speculation.Subject(engine, sampling, lambda i: asked[i], empty)


@pytest.fixture
def early(monkeypatch):
    """The step after the first whose draws changed is kept as well."""
    speculation.repeated.clear_cache()
    monkeypatch.setattr(speculation, "is_final", lambda step, last: step >= last - 1)
    yield
    speculation.repeated.clear_cache()


def test_all_images_are_the_samplers(subject):
    others = dataclasses.replace(subject, example=lambda i: subject.example(MORE + i))
    for _, row in speculation.compared(others, BATCH, TURNS):
        assert (row["images"], row["different"]) == (BATCH * TURNS, 0)
        assert 2 < row["passes_mean"] <= row["passes_max"] <= STEPS + 1


def test_a_step_too_many_is_counted_with_its_margin(subject, early):
    rows = dict(speculation.compared(subject, 1, MORE))
    margins = [x for row in rows.values() for x in row["margins"]]
    assert len(margins) == sum(row["different"] for row in rows.values()) > 0
    assert max(margins) > MARGIN


def test_a_pass_has_as_many_tokens_as_the_samplers_steps(subject):
    given = subject.rows(BATCH, 0)
    made = speculation.speculate(subject.engine, *given, subject.sampling, "empty", subject.empty)
    sampled = subject.engine.sample(*given, subject.sampling, stage="image")
    assert made.tokens == made.passes.max() * sum(sampled.tokens)


def test_what_is_predicted_has_a_pass_of_the_operations_of_the_loop():
    rows = dict(aot_whole_plan.predicted())
    one, many = rows["image_1024/b1"], rows["image_1024/b16"]
    rate = one["rates"]["matmul_tflops"] * 1e12
    assert one["pass_s"] == pytest.approx(one["operations"] / rate)  # not bound by bytes
    assert many["operations"] == pytest.approx(16 * one["operations"])
    assert many["break_even"] == pytest.approx(1.0)
    assert 1.01 < one["break_even"] < 2


def test_the_page_has_the_numbers_of_the_rows():
    text = (measurements.ROOT / "docs/log/2026-11-speculation.md").read_text()
    rows = [row for row in measurements.read_rows("speculation") if row["model"] != "lavida_o"]
    assert f"{sum(row['images'] for row in rows):,} results (" in text
    assert len(rows) >= 16
    for row in rows:
        guess = row["method"].removeprefix("first guess ")
        passes = f"{row['passes_mean']:.2f} ({row['passes_max']}) | {row['passes_of_a_batch']:.2f}"
        cells = (
            f"| {row['setting']} | {row['steps']} | {row['batch']} | {guess} | {row['images']}"
            f" | {row['different']} | {passes} | {row['tokens_x']:.2f} | {row['seconds_x']:.2f}"
        )
        assert cells in text


def test_the_page_has_what_is_predicted():
    text = (measurements.ROOT / "docs/log/2026-11-speculation.md").read_text()
    rows = [row for row in measurements.read_rows("speculation") if "break_even" in row]
    assert len(rows) == 3
    for row in rows:
        seconds = [row["loop_s"], *(n * row["pass_s"] for n in (1, *aot_whole_plan.PASSES[1:]))]
        told = " | ".join(f"{one:.3f}".replace("0.", ".", 1) for one in seconds)
        assert f"| {told} | {row['break_even']:.2f} |" in text
