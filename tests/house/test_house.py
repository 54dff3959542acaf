# SPDX-License-Identifier: Apache-2.0
"""What a visitor finds: a small root, unique names. Nothing is run, only read."""

import ast
import collections
import pathlib

import sparse_lavida_jax

PACKAGE = pathlib.Path(sparse_lavida_jax.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_MODULES_IN_THE_ROOT = 16


def test_the_root_holds_what_a_visitor_opens():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_MODULES_IN_THE_ROOT


def test_no_two_dataclasses_share_a_name():
    names = collections.Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    )
    assert [name for name, count in names.items() if count > 1] == []
