# SPDX-License-Identifier: Apache-2.0
"""The drawings of docs/own_images.md: which ones are taken from the package, and the output."""

import importlib.util
import io
import json
import pathlib
import tarfile

import numpy as np
import pytest
from PIL import Image

from sparse_lavida_jax.mixture import folders

SCRIPT = pathlib.Path(__file__).parents[2] / "docs" / "clipart.py"
PUBLIC, OTHER = "cc/PublicDomain", "licenses/GPL/2.0/"


@pytest.fixture
def clipart():
    spec = importlib.util.spec_from_file_location("clipart_of_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def svg(title, keywords, licence=PUBLIC, author="Jane Doe"):
    listed = "".join(f"<rdf:li>{one}</rdf:li>" for one in keywords)
    return (
        f'<svg><cc:license rdf:resource="http://x.org/{licence}"/><dc:creator><cc:Agent>'
        f"<dc:title>{author}</dc:title></cc:Agent></dc:creator><dc:title>{title}</dc:title>"
        f"<dc:subject>{listed}</dc:subject></svg>"
    )


DRAWINGS = {
    "animals/cat_01.svg": svg("Sleeping Cat 1", ["cat", "animal", "sleeping"]),
    "animals/cat_02.svg": svg("Gatto", ["cat", "animal"]),  # not of keywords
    "animals/cat_03.svg": svg("sleeping cat", ["cat"]),
    "animals/dog.svg": svg("dog", ["dog"], OTHER),
    "animals/jane.svg": svg("Jane Doe", ["jane", "doe"]),
    "animals/nothing.svg": svg("", ["cat"]),
    "food/pear.svg": svg("pear", ["fruit", "pear"]),
    "food/tart.svg": svg("fruit", ["tart"]),  # of keywords, but of none of its own
    "shapes/star.svg": svg("star", ["star"]),
    "tools/weapons/bomb.svg": svg("bomb", ["bomb"]),
}


def archived(files) -> bytes:
    """Returns a tar file as Debian's packages hold it."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"./usr/share/openclipart/svg/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return held.getvalue()


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Programs of Debian: one prints the package as it is, one always draws the same image."""
    folder = tmp_path / "bin"
    folder.mkdir()
    image = Image.new("RGBA", (256, 128))
    image.paste("red", (100, 20, 140, 40))
    image.save(tmp_path / "drawn.png")
    does = {"dpkg-deb": 'cat "$2"', "rsvg-convert": f"cat {tmp_path / 'drawn.png'}"}
    for name, what in does.items():
        (folder / name).write_text(f"#!/bin/sh\n{what}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    return folder


def test_titles_of_keywords_in_the_public_domain_are_taken(clipart):
    with tarfile.open(fileobj=io.BytesIO(archived(DRAWINGS))) as archive:
        drawings = clipart.read(archive)
    assert len(drawings) == len(DRAWINGS) - 1
    titles = [(one.path, one.title) for one in clipart.chosen(drawings)]
    assert titles == [
        ("animals/cat_01.svg", "sleeping cat"), ("animals/cat_03.svg", "sleeping cat"),
        ("food/pear.svg", "pear"),
    ]  # fmt: skip


def test_the_folder_is_a_plain_one_that_names_its_licence(tmp_path, clipart, commands):
    package, folder = tmp_path / "package.deb", tmp_path / "clipart"
    package.write_bytes(archived(DRAWINGS))
    assert clipart.write(package, folder) == 2
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert rows == [
        {"file_name": "000.png", "text": "sleeping cat"}, {"file_name": "001.png", "text": "pear"}
    ]  # fmt: skip
    drawn = np.asarray(Image.open(folder / "000.png"))
    assert drawn.shape == (64, 64, 3)
    np.testing.assert_array_equal(drawn[32, [0, 4, 32, 60, 63], 1], [255, 0, 0, 0, 255])
    np.testing.assert_array_equal(drawn[[0, 12, 32, 52, 63], 32, 1], [255, 255, 0, 255, 255])
    assert "public domain" in (folder / "README.md").read_text()
    (dataset,) = folders.read(folder, tmp_path / "prepared").recipe.datasets
    assert dataset.kind == "text_to_image"


def test_fine_lines_are_left_out(clipart):
    image = Image.new("RGB", (64, 64), "white")
    assert not clipart.is_bold(image)
    image.paste("yellow", (0, 0, 64, 12))
    assert not clipart.is_bold(image)
    image.paste("red", (0, 0, 64, 13))
    assert clipart.is_bold(image)


def test_another_package_is_refused(tmp_path, clipart, commands):
    package = tmp_path / "package.deb"
    package.write_bytes(archived({}))
    with pytest.raises(SystemExit, match="it is not openclipart-svg"):
        clipart.write(package, tmp_path / "clipart")
    assert not (tmp_path / "clipart").exists()


def test_missing_programs_are_named(tmp_path, clipart, commands, monkeypatch):
    apt = commands / "apt-get"
    apt.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    apt.chmod(0o755)
    with pytest.raises(SystemExit, match="openclipart-svg failed: no network"):
        clipart.fetch(tmp_path)
    apt.write_text("#!/bin/sh\ntouch found.deb\n")
    assert clipart.fetch(tmp_path) == tmp_path / "found.deb"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="there is no apt-get: download Debian's package"):
        clipart.fetch(tmp_path)
    with pytest.raises(SystemExit, match="there is no rsvg-convert: install"):
        clipart.write(tmp_path / "found.deb", tmp_path / "clipart")
