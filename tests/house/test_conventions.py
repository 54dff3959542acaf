# SPDX-License-Identifier: Apache-2.0
"""The code follows its conventions. The source is only read; nothing is run.

Which module may import which is defined in pyproject.toml and checked by `lint-imports`.
"""

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

import sparse_lavida_jax

PACKAGE = pathlib.Path(sparse_lavida_jax.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
FOREIGN = {"torch", "tensorflow", "transformers", "diffusers", "pickle", "yaml"}
MODULES_TAKEN_APART = re.compile(
    r"nnx\.(split|merge|state|to_pure_dict|replace_by_pure_dict|update|graphdef)\b"
)
LIFTED = re.compile(r"nnx\.(jit|grad|value_and_grad|scan|vmap|remat|split_rngs|cond|while_loop)\b")


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imported(path: pathlib.Path) -> set[str]:
    """Dotted names of everything that a file imports, anywhere in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.skipif(not importlib.util.find_spec("importlinter"), reason="import-linter is missing")
def test_imports_run_one_way():
    command = [sys.executable, "-c", "from importlinter import cli; cli.lint_imports_command()"]
    done = subprocess.run(
        [*command, "--no-cache"], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_starts_without_what_it_does_not_need():
    heavy = ("orbax", "grain", "jax.experimental.pallas", "sparse_lavida_jax.train", "sklearn")
    code = "import sys; from sparse_lavida_jax.cli import commands, program; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sparse_lavida_jax.pipeline" in done.stdout.split()
    assert not {*heavy} & {*done.stdout.split()}


def text_of(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def test_no_foreign_framework_and_no_pickle():
    # Mixture files are YAML, read safely without the loaders that build objects. Annotations of
    # RefCOCO are pickles, read by a class that cannot call anything. Executables are pickles, in a
    # folder of the user alone (`programs.executables`).
    allowed = {"mixture/recipe": {"yaml"}, "evals/benchmarks/refcoco": {"pickle"}}
    for path in SOURCES:
        name, text = name_of(path), text_of(path)
        if name == "programs/persistent_jit":
            continue
        roots = {module.split(".")[0] for module in imported(path)}
        if "convert" not in path.parts:
            assert not roots & FOREIGN - allowed.get(name, set()), name
        assert not re.search(r"pickle\.loads?\(", text), name
        assert not re.search(r"yaml\.(?!safe_load|YAMLError)", text), name
        assert not re.search(r"(?<![\w.])(eval|exec)\(", text), name


def test_modules_are_plain_pytrees():
    for path in SOURCES:
        name, text = name_of(path), text_of(path)
        assert not LIFTED.search(text), name
        if name != "checkpoints/named_arrays":
            assert not MODULES_TAKEN_APART.search(text), name
        if name not in ("checkpoints/stores", "training/states"):
            assert not re.search(r"(import|from) orbax", text), name


def test_every_file_names_its_licence():
    licence = "# SPDX-License-Identifier: Apache-2.0\n"
    assert [name_of(path) for path in SOURCES if not text_of(path).startswith(licence)] == []
