# SPDX-License-Identifier: Apache-2.0
"""Imports run one way, and the code keeps to its dialect. Read from the source, nothing is run."""

import ast
import pathlib
import re

import pytest

import sparse_lavida_jax

PACKAGE = pathlib.Path(sparse_lavida_jax.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A module may import those of its own level and of lower ones. A folder stands for what is in it
# unless a file of it is named.
LEVELS = [
    {"config", "schema", "visibility", "markdown", "programs", "bench/record"},
    {"layout"},
    {"kernels", "orders", "choose", "prompts"},
    {"presets"},
    {"models"},
    {"prefixes"},
    {"diffusion", "losses", "sample", "parameters", "lora", "processes", "flops", "quantize"},
    {"data", "optimizer", "metrics", "checkpoint", "states", "runs", "pictures"},
    {"results", "codec", "convert", "sharding", "train_step"},
    {"drawings", "decoding", "sampling_options"},
    {"engine"},
    {"pipeline"},
    {"evals"},
    {"report", "bench", "train_vq", "train", "sources"},
    {"conversation", "doctor", "serving", "figures"},
    {"server", "demo"},
    {"main", "cli", "commands", "hosting"},
    {"__main__"},
]
FOREIGN = {"torch", "tensorflow", "transformers", "diffusers", "pickle", "yaml"}
MODULES_TAKEN_APART = re.compile(
    r"nnx\.(split|merge|state|to_pure_dict|replace_by_pure_dict|update|graphdef)\b"
)
LIFTED = re.compile(r"nnx\.(jit|grad|value_and_grad|scan|vmap|remat|split_rngs|cond|while_loop)\b")


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def level_of(name: str) -> int:
    """Level of a module by its path from the package, such as `models/vq`."""
    for level, members in enumerate(LEVELS):
        if name in members or name.split("/")[0] in members:
            return level
    raise AssertionError(f"{name} has no level: add it to LEVELS in {__file__}")


def imported(path: pathlib.Path) -> set[str]:
    """Dotted names of everything a file imports, wherever it stands in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(names: set[str]) -> set[str]:
    """Those of our own modules, as paths from the package."""
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] != PACKAGE.name:
            continue
        # A trailing part may be a function.
        while len(parts) > 1:
            path = PACKAGE.joinpath(*parts[1:])
            if path.with_suffix(".py").is_file():
                found.add("/".join(parts[1:]))
                break
            parts.pop()
    return found


def modules():
    return [path for path in SOURCES if path.name != "__init__.py"]


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_run_one_way(path):
    own = level_of(name_of(path))
    upward = {name for name in ours(imported(path)) if level_of(name) > own}
    assert not upward, f"{name_of(path)} imports {sorted(upward)} from above"


def test_no_two_modules_import_each_other():
    graph = {name_of(path): ours(imported(path)) for path in modules()}
    reached = {name: set(direct) for name, direct in graph.items()}
    for middle in graph:
        for seen in reached.values():
            if middle in seen:
                seen |= reached[middle]
    circular = [name for name, seen in reached.items() if name in seen]
    assert not circular


def test_config_imports_nothing_of_ours():
    assert not ours(imported(PACKAGE / "config.py"))


def test_data_needs_no_model():
    for path in (PACKAGE / "data").glob("*.py"):
        upward = {name for name in ours(imported(path)) if level_of(name) >= level_of("models")}
        assert upward <= {"diffusion", "pictures"} | {
            name_of(p) for p in (PACKAGE / "data").glob("*.py")
        }


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_foreign_framework_and_no_pickle(path):
    roots = {name.split(".")[0] for name in imported(path)}
    # Mixture files are YAML, read safely: the loaders that build objects are not used.
    allowed = {"yaml"} if name_of(path) == "data/recipe" else set()
    if "convert" not in path.parts:
        assert not roots & FOREIGN - allowed
    assert not re.search(r"yaml\.(?!safe_load|YAMLError)", path.read_text())
    assert not re.search(r"(?<![\w.])(eval|exec)\(", path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_are_plain_pytrees(path):
    text = path.read_text()
    assert not LIFTED.search(text)
    if name_of(path) != "checkpoint":
        assert not MODULES_TAKEN_APART.search(text)
    if name_of(path) not in ("checkpoint", "states"):
        assert not re.search(r"(import|from) orbax", text)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_file_names_its_licence(path):
    assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
