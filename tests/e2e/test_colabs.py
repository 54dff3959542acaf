# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from the first cell to the last, and are committed with their outputs."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import tomllib

import pytest

COLABS = pathlib.Path(__file__).parents[2] / "colabs"
NAMES = sorted(path.stem for path in COLABS.glob("*.ipynb"))
QUICK = ("how_it_works",)
SECONDS = 300  # time limit of a cell
MOST_BYTES = 200_000  # of a notebook with its outputs


def cells(name, kind):
    book = json.loads((COLABS / f"{name}.ipynb").read_text())
    return [cell for cell in book["cells"] if cell["cell_type"] == kind]


def sources(name, kind="code"):
    return ["".join(cell["source"]) for cell in cells(name, kind)]


def test_all_are_here():
    assert NAMES == [
        "ask_ground_infill", "convert_lavida_o", "edit_and_inpaint", "generate_image",
        "how_it_works", "train_own_images", "train_small",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_keeps_the_outputs_of_a_whole_run(name):
    code = cells(name, "code")
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    for output in outputs:
        assert output["output_type"] != "error"
        assert output.get("name", "stdout") == "stdout"
    text = (COLABS / f"{name}.ipynb").read_text()
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
    assert len(text) < MOST_BYTES
    assert len(code) < 40
    assert "SPARSE_LAVIDA_SMALL=1" in sources(name, "markdown")[0]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "convert_lavida_o"])
def test_a_notebook_opens_with_its_result(name):
    first_output = next(cell["outputs"] for cell in cells(name, "code")[1:])
    drawn = any("image/png" in output.get("data", {}) for output in first_output)
    assert drawn or "![" in sources(name, "markdown")[0]


@pytest.mark.parametrize("name", NAMES)
def test_only_a_missing_package_is_installed(name):
    first, *rest = sources(name)
    assert first == sources(NAMES[0])[0]
    before, _, after = first.partition("if importlib.util.find_spec")
    assert not re.search(r"^\s*[%!]", before, re.MULTILINE)
    assert all(line.startswith("    ") for line in after.splitlines()[1:])
    for source in rest:
        tree = ast.parse(source)  # no magic, so plain Python
        assert not any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))


def test_a_missing_package_is_installed_from_the_clone_or_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    cell = re.sub(r"^(\s*)[%!].*", r"\1pass", sources(NAMES[0])[0], flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^Set INSTALL in this cell .*\.$"):
        exec(cell, {})
    monkeypatch.chdir(COLABS)  # where Jupyter runs it
    names = {}
    exec(cell, names)
    assert names["INSTALL"] == ".."
    assert (COLABS / names["INSTALL"] / "pyproject.toml").is_file()


def test_the_extra_brings_what_shows_and_runs_a_notebook():
    project = tomllib.loads((COLABS.parent / "pyproject.toml").read_text())["project"]
    brought = {re.match(r"[\w-]+", one)[0] for one in project["optional-dependencies"]["colabs"]}
    assert brought == {"jupyterlab", "nbconvert", "nbclient", "ipykernel"}
    page = (COLABS.parent / "README.md").read_text()
    assert "[notebooks](colabs) (`pip install -e '.[colabs]' && jupyter lab colabs`)" in page


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A compilation cache that the notebooks share."""
    return tmp_path_factory.mktemp("programs")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, programs, tmp_path, monkeypatch):
    why = "pip install 'sparse-lavida-jax[colabs]' to run the notebooks"
    nbclient = pytest.importorskip("nbclient", reason=why)
    nbformat = pytest.importorskip("nbformat", reason=why)
    pytest.importorskip("ipykernel", reason=why)
    if name not in QUICK and os.environ.get("SPARSE_LAVIDA_FULL_TESTS") != "1":
        pytest.skip("takes up to a minute: set SPARSE_LAVIDA_FULL_TESTS=1")
    for key, value in {
        "SPARSE_LAVIDA_SMALL": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "IPYTHONDIR": str(tmp_path),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }.items():
        monkeypatch.setenv(key, value)
    book = nbformat.read(COLABS / f"{name}.ipynb", as_version=4)
    runner = nbclient.NotebookClient(
        book, timeout=SECONDS, resources={"metadata": {"path": str(COLABS)}}
    )
    runner.execute()
    if folder := os.environ.get("COLABS_OUT"):
        nbformat.write(book, pathlib.Path(folder) / f"{name}.ipynb")
    results = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert results
    assert all(output.output_type != "error" for output in results)
    shown = [one.data for one in results if one.output_type in ("display_data", "execute_result")]
    said = [one["text/plain"] for one in shown]
    drawn = [one for one in shown if "image/png" in one]
    if name == "how_it_works":
        assert len(drawn) == 5
        assert "True" in said
    if name == "convert_lavida_o":
        assert "(0, 0)" in said
        assert "True" in said
    if name == "train_small":
        (report,) = [one["text/markdown"] for one in shown if "text/markdown" in one]
        assert "| step | minutes | attribute precision | single | draw |" in report
        (losses,) = [ast.literal_eval(one) for one in said if one.startswith("[(")]
        assert losses[-1][0] == 24
        assert losses[-1][1] < losses[0][1] - 1
        assert len(drawn) == 2
    if name == "train_own_images":
        assert "['purple', 'dragon']" in said
        (report,) = [one["text/markdown"] for one in shown if "text/markdown" in one]
        assert "never trained on: 7 of 150 (text_to_image)" in report
        assert len(drawn) == 3
