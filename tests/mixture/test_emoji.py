# SPDX-License-Identifier: Apache-2.0
"""The emoji of docs/own_images.md: which ones are taken from the package, and the output."""

import hashlib
import importlib.util
import io
import json
import pathlib
import tarfile

import pytest
import raw_data

from sparse_lavida_jax.mixture import folders

SCRIPT = pathlib.Path(__file__).parents[2] / "docs" / "emoji.py"


@pytest.fixture
def emoji():
    spec = importlib.util.spec_from_file_location("emoji_of_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed(name, category, order, has=True):
    return {
        "name": name, "category": category, "sort_order": order, "has_img_google": has,
        "image": f"{name.lower()}.png",
    }  # fmt: skip


@pytest.fixture
def package(tmp_path, emoji, monkeypatch):
    """A package of five emoji; three qualify and two are taken."""
    found = [
        listed("BUG", "Animals & Nature", 3), listed("FLAG", "Flags", 0),
        listed("ONION", "Food & Drink", 7), listed("GRIN", "Smileys & Emotion", 1),
        listed("NEW", "Animals & Nature", 2, has=False),
    ]  # fmt: skip
    held = {"emoji.json": json.dumps(found).encode()}
    held |= {f"img/google/64/{one['image']}": raw_data.png(i) for i, one in enumerate(found)}
    path = tmp_path / "package.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in held.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    monkeypatch.setattr(emoji, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(emoji, "COUNT", 2)
    return path


def test_the_folder_is_a_plain_one_that_names_its_licence(tmp_path, emoji, package):
    folder = tmp_path / "emoji"
    assert emoji.write(package, folder) == 2
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert rows == [
        {"file_name": "grin.png", "text": "grin"}, {"file_name": "bug.png", "text": "bug"}
    ]  # fmt: skip
    assert "Apache License 2.0" in (folder / "README.md").read_text()
    (dataset,) = folders.read(folder, tmp_path / "prepared").recipe.datasets
    assert dataset.kind == "text_to_image"


def test_another_package_is_refused(tmp_path, emoji, package, monkeypatch):
    monkeypatch.setattr(emoji, "SHA256", "0" * 64)
    with pytest.raises(SystemExit, match="it is not emoji-datasource-google"):
        emoji.write(package, tmp_path / "emoji")


def test_npm_is_asked_and_its_absence_told(tmp_path, emoji, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="there is no npm: install it, or run `npm pack"):
        emoji.fetch(tmp_path)
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho file.tgz\n")
    npm.chmod(0o755)
    assert emoji.fetch(tmp_path) == tmp_path / "file.tgz"
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    with pytest.raises(SystemExit, match="failed: no network"):
        emoji.fetch(tmp_path)
