# SPDX-License-Identifier: Apache-2.0
"""Measured and compiled numbers of the log match the committed rows."""

import pathlib

import pytest

from benchmarks import measurements, table

LOG = pathlib.Path(__file__).parents[2] / "docs" / "log"
ROUNDING = (LOG / "2026-11-rounding.md").read_text()
TPUS = (LOG / "2026-11-described-tpus.md").read_text()


def test_the_table_of_8_bits_is_that_of_the_rows():
    assert table.table("quantized", measurements.read_rows("quant")) in ROUNDING


@pytest.mark.parametrize("row", measurements.read_rows("vq"), ids=lambda row: row["model"])
def test_grey_levels_are_those_of_the_rows(row):
    assert row["codes_agreement"] == 1
    assert (
        f"| {row['model']} | {row['largest_difference']:.0f} | {row['mean_difference']:.2f} |"
        f" {100 * row['pixels_moved']:.0f} % | all |\n"
    ) in ROUNDING


def compiled_for_tpus():
    return [row for row in measurements.read_rows("aot") if row["task"] in ("prefill", "phase")]


@pytest.mark.parametrize("row", compiled_for_tpus(), ids=lambda row: row["id"])
def test_programs_for_tpus_that_are_not_there_are_those_of_the_rows(row):
    chip, mesh = row["device"]["topology"].split(":")
    name = "prefill" if row["task"] == "prefill" else f"{row['steps']} steps"
    of = f"{row['bytes']['total'] / 1e9:.1f} of {row['device']['memory_bytes'] / 1e9:.0f}"
    cells = (name, f"{chip} {mesh}", of, f"{row['compile_s']:.0f}")
    assert f"| {' | '.join(cells)} |\n" in TPUS
