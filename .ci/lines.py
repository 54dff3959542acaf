# SPDX-License-Identifier: Apache-2.0
"""Prints the lines of code of each room of the package, without comments and docstrings."""

import ast
import collections
import io
import pathlib
import tokenize

PACKAGE = pathlib.Path(__file__).parents[1] / "sparse_lavida_jax"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def lines_of_code(source: str) -> int:
    """Counts the lines of code in a module."""
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


def main() -> None:
    counts: collections.Counter[str] = collections.Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        counts[parts[0] if len(parts) > 1 else "(root)"] += lines_of_code(
            path.read_text(encoding="utf-8")
        )
    for room, count in counts.most_common():
        print(f"{count:7,d}  {room}")
    print(f"{counts.total():7,d}  in all")
    for folder in ("benchmarks", "tests"):
        paths = (PACKAGE.parent / folder).rglob("*.py")
        count = sum(lines_of_code(path.read_text(encoding="utf-8")) for path in paths)
        print(f"{count:7,d}  {folder}/")


if __name__ == "__main__":
    main()
