# SPDX-License-Identifier: Apache-2.0
"""The installed package: fast to import, typed, complete in its wheel, citable."""

import json
import os
import pathlib
import subprocess
import sys
import tomllib
import zipfile

import pytest

CHECKOUT = pathlib.Path(__file__).parents[2]
HEAVY = ("torch", "tensorflow", "orbax", "grain", "gradio", "fastapi")
MOST_SECONDS = 0.3  # beyond what jax takes
MODEL_FILES = ("MANIFEST.sha256", "config.json", "model.safetensors", "vq/params.safetensors")
MOST_BYTES = 24_000_000  # of models, tokenizers and art in the wheel

TIMED = """
import sys, time
begin = time.perf_counter()
import sparse_lavida_jax
middle = time.perf_counter()
loaded = [name for name in {heavy} if name in sys.modules]
import jax
print([middle - begin, time.perf_counter() - middle, loaded])
"""


def run(*words, folder, **surroundings):
    """Runs Python in another folder; returns its output. It may print nothing to stderr."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **surroundings},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_is_silent_and_light(tmp_path):
    code = "import sparse_lavida_jax"
    assert run("-W", "error", "-c", code, folder=tmp_path, PYTHONPATH=str(CHECKOUT)) == ""
    printed = run("-c", TIMED.format(heavy=HEAVY), folder=tmp_path, PYTHONPATH=str(CHECKOUT))
    ours, jax, loaded = json.loads(printed.replace("'", '"'))
    assert loaded == []
    assert ours <= jax + MOST_SECONDS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    why = "pip install hatchling to build the wheel"
    builders = pytest.importorskip("hatchling.builders.wheel", reason=why)
    folder = tmp_path_factory.mktemp("dist")
    (path,) = builders.WheelBuilder(str(CHECKOUT)).build(directory=str(folder))
    return pathlib.Path(path)


def test_the_wheel_has_types_models_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "sparse_lavida_jax/py.typed" in names
    assert "sparse_lavida_jax/assets/models/scenes/MANIFEST.sha256" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sparse_lavida_jax"}
    sources = {path.relative_to(CHECKOUT).as_posix() for path in
               (CHECKOUT / "sparse_lavida_jax").rglob("*.py")}  # fmt: skip
    assert sources <= names


def test_the_art_and_its_model_come_with_their_notice(wheel):
    art, model = "sparse_lavida_jax/assets/art/", "sparse_lavida_jax/assets/models/art/"
    needed = {art + "NOTICE", *(f"{model}{one}" for one in MODEL_FILES)}
    with zipfile.ZipFile(wheel) as held:
        assert needed <= {*held.namelist()}
        (licensed,) = (one for one in held.namelist() if one.endswith(f"/licenses/{art}NOTICE"))
        notice = (CHECKOUT / art / "NOTICE").read_bytes()
        assert held.read(art + "NOTICE") == held.read(licensed) == notice
    # What goes into the source distribution; to write it takes many times as long.
    builders = pytest.importorskip("hatchling.builders.sdist")
    files = builders.SdistBuilder(str(CHECKOUT)).recurse_included_files()
    assert needed <= {one.distribution_path for one in files}


def test_what_the_wheel_holds_besides_programs_is_small(wheel):
    sizes = {one.filename: one.file_size for one in zipfile.ZipFile(wheel).infolist()}
    held = [size for name, size in sizes.items() if not name.endswith(".py")]
    assert 4_000_000 < sum(held) <= MOST_BYTES


def test_the_command_of_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import sparse_lavida_jax as package; print(package.__file__);"
        "from sparse_lavida_jax.cli import program;"
        "program.main(['sparse-lavida', 'verify', 'scenes'])"
    )
    said = run("-P", "-c", code, folder=tmp_path, PYTHONPATH=str(site)).splitlines()
    assert pathlib.Path(said[0]).is_relative_to(site)
    assert said[1].endswith("files, all as they were written")


def test_extras_name_packages_that_are_said_where_they_are_needed():
    from sparse_lavida_jax.cli import hosting

    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {word.split(">")[0].replace("-", "_") for word in extras["serve"]}
    assert set(hosting.PACKAGES["serve"]) <= named
    assert extras["demo"][0] == "sparse-lavida-jax[serve]"
    assert {"serve", "demo", "colabs"} <= set(extras)


def test_the_citation_is_whole():
    yaml = pytest.importorskip("yaml", reason="pip install 'sparse-lavida-jax[data]'")
    cited = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    paper = cited["preferred-citation"]
    for entry in (cited, paper):
        assert entry["title"]
        assert entry["authors"]
        assert all(author.keys() <= {"name", "family-names", "given-names"} for author in
                   entry["authors"])  # fmt: skip
    assert {"message", "license"} <= cited.keys()
    assert {"type", "year", "collection-title"} <= paper.keys()
