# SPDX-License-Identifier: Apache-2.0
"""Plain folders as mixtures: the meaning of each kind of file, and what is refused."""

import io
import json
import tarfile

import numpy as np
import pytest
import raw_data
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.mixture import folders, prepare, record_examples
from sparse_lavida_jax.mixture.recipe import PrepareError
from sparse_lavida_jax.mixture.records import ShardedRecords

CAPTIONED = [{"file_name": f"{i}.png", "text": f"image {i}"} for i in range(4)]


def read(folder):
    return folders.read(folder, folder / "prepared")


def records(folder, **settings):
    """Prepares a plain folder; returns its records by kind."""
    given = read(folder)
    wanted = config.Config(prepare=config.Prepare(**settings))
    prepare.prepare(given.recipe, folder / "prepared", wanted, raw_data.Averages)
    index = json.loads((folder / "prepared/mixture.json").read_text())
    found = {}
    for dataset in index["datasets"]:
        shards = ShardedRecords(
            [(folder / "prepared" / s["file"], s["records"], s["bytes"]) for s in dataset["shards"]]
        )
        found.setdefault(dataset["kind"], []).extend(shards[i] for i in range(len(shards)))
    return found


def as_jsonl(folder):
    raw_data.lines(folder / "metadata.jsonl", CAPTIONED)


def as_csv(folder):
    rows = [f"{row['file_name']},{row['text']}" for row in CAPTIONED]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *rows]) + "\n")


def as_parquet(folder):
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").Table
    rows = [
        {"image": {"bytes": (folder / row["file_name"]).read_bytes(), "path": None}} | row
        for row in CAPTIONED
    ]
    parquet.write_table(table.from_pylist(rows), folder / "train.parquet")


def as_text_files(folder):
    for row in CAPTIONED:
        (folder / row["file_name"]).with_suffix(".txt").write_text(row["text"] + "\n")


def as_tar(folder):
    with tarfile.open(folder / "images.tar", "w") as archive:
        for row in CAPTIONED:
            path = folder / row["file_name"]
            for name, data in ((path.name, path.read_bytes()), (f"{path.stem}.txt", row["text"])):
                data = data.encode() if isinstance(data, str) else data
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("form", [as_jsonl, as_csv, as_parquet, as_text_files, as_tar])
def test_captions_are_found_whatever_holds_them(tmp_path, form):
    raw_data.images(tmp_path, 4)
    form(tmp_path)
    found = records(tmp_path)
    assert list(found) == ["text_to_image"]
    assert [one.asked for one in found["text_to_image"]] == [(f"image {i}",) for i in range(4)]
    assert all(one.size == (48, 40) for one in found["text_to_image"])


def test_a_folder_may_hold_every_kind_and_folders(tmp_path):
    raw_data.images(tmp_path / "photos [1]", 4)
    raw_data.lines(tmp_path / "photos [1]/metadata.jsonl", CAPTIONED)
    raw_data.images(tmp_path, 2)
    named = {"file_name": "0.png"}
    raw_data.lines(
        tmp_path / "edits.jsonl",
        [{"source": "0.png", "target": "1.png", "instruction": "brighter"}],
    )
    raw_data.lines(tmp_path / "empty.jsonl", [])
    (tmp_path / "questions").mkdir()
    raw_data.lines(tmp_path / "questions/q.jsonl", [{"question": "how many?", "answer": "two"}])
    (tmp_path / "boxes").mkdir()
    raw_data.images(tmp_path / "boxes", 1)
    raw_data.lines(tmp_path / "boxes/b.jsonl", [named | {"phrase": "a dog", "box": [0, 0, 9, 9]}])
    given = read(tmp_path).recipe
    weights = {"edit": 1, "understanding": 1, "grounding": 1, "text_to_image": 4}
    assert given.weights == weights
    found = records(tmp_path)
    assert {kind: len(of) for kind, of in found.items()} == weights
    assert found["understanding"][0].answered == ("two",)
    np.testing.assert_array_equal(found["grounding"][0].boxes, [[0, 0, 9, 9]])
    assert len(found["edit"][0].sources) == 1


def test_tables_that_are_alike_are_one_dataset(tmp_path):
    raw_data.images(tmp_path, 4)
    raw_data.lines(tmp_path / "a.jsonl", CAPTIONED[:2])
    raw_data.lines(tmp_path / "b.jsonl", CAPTIONED[2:])
    (dataset,) = read(tmp_path).recipe.datasets
    assert dataset.patterns == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    raw_data.lines(tmp_path / "b.jsonl", [{"question": "how many?", "answer": "two"}])
    kinds = [one.kind for one in read(tmp_path).recipe.datasets]
    assert kinds == ["text_to_image", "understanding"]


def test_several_captions_are_kept_and_drawn_from(tmp_path):
    raw_data.images(tmp_path, 2)
    (tmp_path / "0.txt").write_text("a cat\n\n eine Katze \n猫\n", encoding="utf-8")
    given = read(tmp_path)
    assert given.found.left_out == {folders.NO_CAPTION: ["1.png"]}
    (record,) = records(tmp_path)["text_to_image"]
    assert record.asked == ("a cat", "eine Katze", "猫")
    drawn = {record_examples.caption_of(record, np.random.default_rng(i)) for i in range(40)}
    assert drawn == {*record.asked}


def test_images_of_all_sorts_are_read_upright_and_over_white(tmp_path):
    names = {}
    red = Image.new("RGB", (60, 30), (255, 0, 0))
    exif = red.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    for name, image, more in (
        ("turned.jpg", red, {"exif": exif}),
        ("clear.png", Image.new("RGBA", (40, 40), (0, 0, 0, 0)), {}),
        ("grey.png", Image.new("L", (40, 50), 100), {}),
        ("wide.webp", Image.new("RGB", (90, 40), (0, 0, 255)), {}),
    ):
        image.save(tmp_path / name, **more)
        (tmp_path / name).with_suffix(".txt").write_text(name)
        names[name] = image.size
    found = {one.asked[0]: one for one in records(tmp_path)["text_to_image"]}
    assert {name: one.size for name, one in found.items()} == names | {"turned.jpg": (30, 60)}
    assert (found["clear.png"].light[0] == [1, 0]).all()
    np.testing.assert_allclose(found["grey.png"].light[0], [100 / 255, 0], atol=1e-6)


def test_a_broken_image_is_named_and_left_out(tmp_path):
    raw_data.images(tmp_path, 4)
    as_jsonl(tmp_path)
    (tmp_path / "2.png").write_bytes(b"broken")
    found = records(tmp_path, max_bad_fraction=0.5)["text_to_image"]
    assert [one.asked[0] for one in found] == ["image 0", "image 1", "image 3"]
    told = (tmp_path / "prepared/report.md").read_text()
    assert "- metadata.jsonl:3: its image 2.png is not an image that can be read" in told


def test_what_is_not_understood_is_reported(tmp_path):
    raw_data.images(tmp_path, 1)
    with pytest.raises(PrepareError, match=r"add metadata\.jsonl with file_name and text"):
        read(tmp_path)
    raw_data.lines(tmp_path / "metadata.jsonl", [{"file_name": "0.png", "label": "cat"}])
    with pytest.raises(PrepareError, match="has the columns file_name, label, which do not say"):
        read(tmp_path)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_text_file_in_another_encoding_is_not_passed_over(tmp_path, encoding):
    raw_data.images(tmp_path, 2)
    (tmp_path / "0.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "1.txt").write_text("grün", encoding=encoding)
    read(tmp_path)
    told = (tmp_path / "prepared" / folders.WRITTEN).read_text()
    assert "1.txt cannot be read: it is not text in UTF-8" in told


def test_the_table_of_text_files_is_not_written_again_in_vain(tmp_path):
    raw_data.images(tmp_path, 4)
    as_text_files(tmp_path)
    read(tmp_path)
    written = tmp_path / "prepared" / folders.WRITTEN
    before = written.stat().st_mtime_ns
    read(tmp_path)
    assert written.stat().st_mtime_ns == before
    (tmp_path / "0.txt").write_text("another")
    read(tmp_path)
    assert written.stat().st_mtime_ns != before
