# SPDX-License-Identifier: Apache-2.0
"""The code stays small: sizes of files and folders, unique names. Nothing is run, only read."""

import ast
import collections
import io
import pathlib
import tokenize

import sparse_lavida_jax

PACKAGE = pathlib.Path(sparse_lavida_jax.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES_OF_CODE = 28_021  # of the package, including planned features
MOST_MODULES_IN_THE_ROOT = 16
MOST_LINES = 600  # per file
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def lines_of_code(path: pathlib.Path) -> int:
    """Counts lines of code, without blank lines, comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            found -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(found)


def test_the_package_is_no_larger_than_it_has_to_be():
    assert sum(map(lines_of_code, SOURCES)) <= MOST_LINES_OF_CODE


def test_the_root_holds_what_a_visitor_opens():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_MODULES_IN_THE_ROOT


def test_no_file_is_too_long_to_read():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path.name: n for path, n in lengths.items() if n > MOST_LINES} == {}


def test_no_two_dataclasses_share_a_name():
    names = collections.Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    )
    assert [name for name, count in names.items() if count > 1] == []
