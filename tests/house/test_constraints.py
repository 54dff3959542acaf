# SPDX-License-Identifier: Apache-2.0
"""CI installs one version per package, allowed by pyproject.toml, from any index."""

import pathlib
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted((ROOT / ".ci" / "constraints").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_versions_are_pinned_without_an_address_and_allowed(path):
    lines = path.read_text().splitlines()
    assert lines == [line for line in lines if re.fullmatch(r"[\w.-]+==[\w.+!]+", line)]
    pinned = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}
    assert len(pinned) == len(lines)
    extras = PROJECT["optional-dependencies"].values()
    environment = {"python_version": path.stem, "sys_platform": "linux", "extra": ""}
    for text in (*PROJECT["dependencies"], *(one for extra in extras for one in extra)):
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate(environment):
            version = pinned.get(canonicalize_name(wanted.name))
            assert version is None or wanted.specifier.contains(version), text


def test_there_is_a_file_for_each_python():
    assert [path.stem for path in FILES] == ["3.11", "3.13"]
