# SPDX-License-Identifier: Apache-2.0
"""Markdown tables, and generated parts of a page."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; None becomes an empty cell.

    Raises:
        ValueError: the number of cells of a row differs from the number of columns.
    """
    lines = [_line(columns), _line(["---"] * len(columns))]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"a row of {len(row)} cells in a table of {len(columns)} columns: {list(row)} below"
                f" {list(columns)}. Give None for an empty cell."
            )
        lines.append(_line(row))
    return "\n".join(lines)


def with_part(page: str, begin: str, end: str, part: str) -> str:
    """Returns a page with the part between two of its lines replaced.

    Raises:
        ValueError: it has no such lines.
    """
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page has no lines {begin} and {end} to write between.")
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


def _line(cells: Sequence[object]) -> str:
    return f"|{'|'.join(' ' if cell is None else f' {cell} ' for cell in cells)}|"
