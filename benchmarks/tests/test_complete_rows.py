# SPDX-License-Identifier: Apache-2.0
"""The table of all subsets is that of the committed rows, and chance is counted."""

import itertools
import pathlib

import pytest

from benchmarks import complete
from sparse_lavida_jax.inference.subsets import TABLE
from sparse_lavida_jax.scenes import tasks


def test_the_page_has_the_table_of_the_rows():
    page = pathlib.Path(__file__).parents[2] / complete.PAGE.default
    shown = complete.table()
    assert shown in page.read_text()
    lines = shown.splitlines()[2:]
    for held in itertools.product(("", "part", "whole"), repeat=3):
        start = "|" + "|".join(f" {one} " if one else " " for one in held) + "|"
        own = [line for line in lines if line.startswith(start)]
        assert own and ("refused" in own[0]) == (held not in {row[:3] for row in TABLE})
        assert all(" [" in line for line in own) or "refused" in own[0]


def test_repeating_the_thing_that_is_held_is_right_where_two_are_asked_for():
    guessed = 0
    for sample in filter(None, map(complete._several(complete._drawn), range(60))):
        cell, thing = complete._things(sample)[0]
        right = complete._guess(sample, cell, thing)
        assert not right or sample.prompt.startswith("two ")
        guessed += right
    assert guessed


def test_a_row_counts_its_items():
    items = [{"right": i < 3, "kept": True, "guess": i < 1} for i in range(4)]
    row = complete.row_of("words_first_thing", complete.CASES["words_first_thing"], items)
    assert (row["correct"], row["total"], row["share"]) == (3, 4, 0.75)
    assert (row["kept"], row["chance"]) == (4, 0.25)
    assert row["interval_95"] == pytest.approx([0.3006, 0.9544], abs=1e-3)
    assert complete.row_of("layout", complete.CASES["layout"], items)["chance"] == 0.0


def test_items_are_those_that_their_rows_are_about():
    assert {complete._holed(i).task for i in range(2 * complete.BATCH)} == {"inpaint", "outpaint"}
    assert all(len(one.image) > 1 for one in filter(None, map(complete._listed, range(20))))
    several = filter(None, map(complete._several(complete._holed), range(20)))
    assert all(len(complete._things(one)) > 1 for one in several)
    assert complete.CASES.keys() >= {"layout", "words_first_thing", "hole_first_thing"}
    assert {one.held for one in complete.CASES.values()} <= {row[:3] for row in TABLE}
    assert {task for row in TABLE for task in row.lessons} <= {*tasks.TABLE}
