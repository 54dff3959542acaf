# SPDX-License-Identifier: Apache-2.0
"""Markdown tables, and a check that no module writes its own."""

import pathlib
import re

import pytest

import sparse_lavida_jax
from sparse_lavida_jax.data import markdown


def test_a_table_has_its_columns_a_rule_and_its_rows():
    assert markdown.table(["task", "of", "right"], [("draw", 3, None), ("edit", 12, "0.50")]) == (
        "| task | of | right |\n| --- | --- | --- |\n| draw | 3 | |\n| edit | 12 | 0.50 |"
    )


def test_a_table_of_no_rows_is_its_head():
    assert markdown.table(["a"], []) == "| a |\n| --- |"


@pytest.mark.parametrize("row", [(1,), (1, 2, 3)])
def test_a_row_of_another_length_is_refused(row):
    with pytest.raises(ValueError, match=r"2 columns.*\['a', 'b'\].*None for an empty cell"):
        markdown.table(["a", "b"], [row])


def test_a_part_of_a_page_is_replaced_between_its_lines():
    page = "before\n<!-- a -->\nold\n<!-- b -->\nafter\n"
    new = markdown.with_part(page, "<!-- a -->", "<!-- b -->", "new")
    assert new == "before\n<!-- a -->\n\nnew\n\n<!-- b -->\nafter\n"
    assert markdown.with_part(new, "<!-- a -->", "<!-- b -->", "new") == new
    for lines in (("<!-- c -->", "<!-- b -->"), ("<!-- b -->", "<!-- a -->")):
        with pytest.raises(ValueError, match=r"has no lines <!-- .* to write between"):
            markdown.with_part(page, *lines, "new")


def test_nobody_else_writes_the_rule_below_a_head():
    package = pathlib.Path(sparse_lavida_jax.__file__).parent
    written = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        # Docstrings contain tables too: their lines start with a bar.
        if re.search(r"\| *-{3}", line) and not line.startswith("|")
    }
    assert not written
