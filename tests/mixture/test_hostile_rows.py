# SPDX-License-Identifier: Apache-2.0
"""One bad row is a bad row: whatever it holds, the others are prepared and it is named."""

import contextlib
import io
import json
import os
import socket
import tarfile

import numpy as np
import pytest
import raw_data

from sparse_lavida_jax import config
from sparse_lavida_jax.data import image_files, leftovers
from sparse_lavida_jax.mixture import folders, ingest, input_tables, preparation_report, prepare

GOOD = {"file_name": "0.png", "text": "image 0"}


def bad_rows(folder, good=1):
    """Prepares a plain folder; returns what the report says of its bad rows."""
    recipe = folders.read(folder, folder / "prepared").recipe
    wanted = config.Config(prepare=config.Prepare(max_bad_fraction=1.0))
    assert prepare.prepare(recipe, folder / "prepared", wanted, raw_data.Averages).records == good
    told = (folder / "prepared" / preparation_report.READABLE).read_text(encoding="utf-8")
    return [line for line in told.splitlines() if line.startswith("- ")]


def spoil(folder):
    """Puts things into a folder that look like images and must not be read."""
    (folder.parent / "secret.png").write_bytes(raw_data.png(1))
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "fifo.png")
    (folder / "large.png").touch()
    os.truncate(folder / "large.png", input_tables.MOST_BYTES + 1)


NAMES = [
    "\0", "nul\ud800.png", "a" * 300, "a/" * 3000, "/etc/passwd", "../secret.png",
    "sub/../../x.png", "out.png", "zero.png", "loop.png", "folder.png", "fifo.png", "large.png",
    "file:///etc/passwd", "", ".", 7, 10**400, True, 1e308, [["0.png"]], {"a": 1},
    {"path": "../secret.png"}, ["0.png"] * 100, {"bytes": "/etc/passwd"},
]  # fmt: skip
TEXTS = [
    "\ud800", "a\0b", "a" * 10**7, "a " * 20_000, " " * 2000 + "a", "<<" * 600, 7, 10**400,
    {"a": 1}, [["x"]], ["a", "\udfff"], ["a", 3], "<|mdm_mask|>", "", [], True,
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_hostile_names_and_texts_in_tables(tmp_path, suffix):
    folder = tmp_path / "images"
    raw_data.images(folder, 1)
    spoil(folder)
    rows = [GOOD | {"file_name": name} for name in NAMES] + [GOOD | {"text": one} for one in TEXTS]
    if suffix == "parquet":
        parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")

        def cells(name):
            values = [row[name] if isinstance(row[name], str) else "" for row in [GOOD, *rows]]
            whole = [one.encode(errors="surrogatepass") for one in values]
            return pa.array(whole, pa.binary()).view(pa.string())

        parquet.write_table(
            pa.table({name: cells(name) for name in GOOD}), folder / "metadata.parquet"
        )
    else:
        raw_data.lines(folder / "metadata.jsonl", [GOOD, *rows])
    found = bad_rows(folder)
    assert len(found) == len(rows)
    assert all(len(line) < 2 * prepare.LONGEST_REASON for line in found)
    for told in ("is not a regular file", "lies outside", "more than 20000", "NUL"):
        assert any(told in line for line in found), told


LINES = [
    "[" * 10**5, '{"a":' * 10**5, "7", "null", "[]", "{", '{"text": 1' + "0" * 5000 + "}", "\x00",
    '{"file_name": "0.png", "text": "' + "x" * 10**6 + '"}', '{"file_name": NaN, "text": "x"}',
]  # fmt: skip


def test_hostile_lines(tmp_path):
    raw_data.images(tmp_path, 1)
    raw_data.lines(tmp_path / "metadata.jsonl", [GOOD, *LINES])
    with (tmp_path / "metadata.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"file_name": "0.png"}\n')
    assert len(bad_rows(tmp_path)) == len(LINES) + 1


def test_hostile_rows_of_csv(tmp_path):
    raw_data.images(tmp_path, 1)
    rows = [
        b"0.png,image 0", b"0.png,\xff", b"0.png", b"0.png,a,b", b"0.png,a\rb", b"0.png,a\x00b",
        b"0.png," + b"x" * 200_000, b"../0.png,x", b"0.png,<|mdm_mask|>", "0.png,a\u2028b".encode(),
        b'0.png,"never closed',
    ]  # fmt: skip
    (tmp_path / "metadata.csv").write_bytes(b"file_name,text\n" + b"\n".join(rows))
    # An end within quotes is not a mistake, and a lone CR ends a row.
    assert len(bad_rows(tmp_path, good=4)) == len(rows) - 3


NUMBERS = [10**400, -(10**400), "nan", [], {}, True, [10**400] * 4, "x" * 10**6, [[[1]]]]


@pytest.mark.parametrize(
    ("kind", "row", "fields"),
    [
        ("grounding", {"image": "0.png", "label": "a"}, ["box", "loc_string"]),
        ("dense_caption", {"image": "0.png", "phrases": ["a"]}, ["boxes", "loc_caption"]),
        ("understanding", {"image": "0.png"}, ["conversations", "question"]),
        ("edit_layout", {"source_images": "0.png", "instruction": "a", "target_image": "0.png",
                       "loc": "x"}, ["operation", "pixel_diff", "edit_boxes", "source_images"]),
        ("layout", {"image": "0.png", "caption": "a"}, ["loc", "hpsv2", "score", "feedback"]),
    ],
)  # fmt: skip
def test_hostile_fields_of_every_kind(tmp_path, kind, row, fields):
    """Some of them are taken, such as True for 1; none ends the preparation."""
    raw_data.images(tmp_path, 1)
    raw_data.lines(
        tmp_path / "a.jsonl", [row | {name: value} for name in fields for value in NUMBERS]
    )
    dataset = {"name": "a", "json_path": "a.jsonl", "preprocess_fn": kind, "aes_cutoff": -9.0}
    source = raw_data.mixture(tmp_path / "m.json", dataset)
    done = raw_data.prepared(source, tmp_path / "out", max_bad_fraction=1.0)
    assert done.bad + done.records + done.left_out == len(fields) * len(NUMBERS)
    assert done.bad > len(NUMBERS) / 2


def test_captions_in_files_that_are_none(tmp_path, monkeypatch):
    folder = tmp_path / "images"
    raw_data.images(folder, 9)
    (folder / "0.txt").write_text("image 0")
    (folder / "8.txt").write_text("größe", encoding="latin-1")
    (folder / "1.txt").symlink_to("/dev/zero")
    os.mkfifo(folder / "2.txt")
    (folder / "3.txt").touch()
    os.truncate(folder / "3.txt", 100_000_000)
    (tmp_path / "secret").write_text("secret")
    (folder / "4.txt").symlink_to(tmp_path / "secret")
    (folder / "5.txt").write_text("a" * 10**6)
    (folder / "6.txt").symlink_to("6.txt")
    monkeypatch.chdir(folder)  # the name of a socket is short
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind("7.txt")
        found = bad_rows(folder)
        left_out = folders.read(folder, folder / "prepared").found.left_out
    assert len(found) == 3
    assert not any("secret" in line for line in found)
    assert left_out[leftovers.SPECIAL] == ["1.txt", "2.txt", "7.txt"]
    assert (left_out[leftovers.OUTSIDE], left_out[leftovers.NOWHERE]) == (["4.txt"], ["6.txt"])
    assert left_out[folders.NO_CAPTION] == [f"{i}.png" for i in (1, 2, 4, 6, 7)]


def test_a_name_that_is_not_text_is_read(tmp_path):
    raw_data.images(tmp_path, 1)
    (tmp_path / "0.txt").write_text("image 0")
    for name in (b"\xff.png", b"\xff.txt"):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(raw_data.png(0) if name.endswith(b"png") else b"a")
    assert not bad_rows(tmp_path, good=2)


def test_a_table_outside_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "images"
    raw_data.images(folder, 1)
    raw_data.lines(tmp_path / "other.jsonl", [GOOD])
    (folder / "metadata.jsonl").symlink_to(tmp_path / "other.jsonl")
    with pytest.raises(
        prepare.PrepareError, match=r"a link to a file outside of .*metadata\.jsonl"
    ):
        folders.read(folder, folder / "prepared")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_table_that_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / "a.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(input_tables.TableError, match="no regular file has that name"):
        input_tables.find([str(path)])


def tar_of(path, *members, form=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=form) as archive:
        for name, data, changes in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in changes.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))


def test_members_of_a_tar_file_that_are_none(tmp_path):
    """Links, devices and names that lead out of it are no images, and nothing is unpacked."""
    image = raw_data.png(0)
    members = [("0.png", image, {}), ("0.txt", b"image 0", {})]
    for number, (kind, to) in enumerate(
        [(tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "0.png"), (tarfile.CHRTYPE, ""),
         (tarfile.FIFOTYPE, ""), (tarfile.DIRTYPE, "")], 1,
    ):  # fmt: skip
        members += [
            (f"{number}.png", b"", {"type": kind, "linkname": to}), (f"{number}.txt", b"x", {})
        ]  # fmt: skip
    members += [("../../9.png", image, {}), ("../../9.txt", b"\xff\x00", {})]
    tar_of(tmp_path / "a.tar", *members)
    assert len(bad_rows(tmp_path)) == 6
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar", "prepared"}


@pytest.mark.parametrize("size", ["-1", "99999999999999999999999", "100000000000", "1e9", "x"])
def test_sizes_in_a_tar_file(tmp_path, size):
    tar_of(tmp_path / "a.tar", ("0.png", b"x", {"pax_headers": {"size": size}}))
    with contextlib.suppress(input_tables.TableError), input_tables.Reader() as reader:
        for number in range(input_tables.num_rows(tmp_path / "a.tar")):
            with contextlib.suppress(input_tables.RecordError):
                reader.row(tmp_path / "a.tar", number)


@pytest.mark.parametrize("headers", ["large", "deep"])
def test_descriptions_in_a_tar_file(tmp_path, headers):
    path = tmp_path / "a.tar"
    if headers == "large":
        info = tarfile.TarInfo("a")
        info.type, info.size = tarfile.XHDTYPE, 8 * 2**30
        path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
        os.truncate(path, 9 * 2**30)
    else:
        info = tarfile.TarInfo("a")
        info.type = tarfile.XHDTYPE
        path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) * 5000)
    with pytest.raises(input_tables.TableError, match="cannot be read"):
        input_tables.num_rows(path)


def test_a_json_table_larger_than_memory_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.touch()
    os.truncate(path, 100 * 2**30)
    with pytest.raises(input_tables.TableError, match="write it as JSON lines"):
        input_tables.num_rows(path)


def test_a_column_of_another_row_group_is_not_unpacked_as_a_whole(tmp_path, monkeypatch):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pa.table({"image": [bytes(10**6)]}), tmp_path / "a.parquet")
    monkeypatch.setattr(input_tables, "MOST_GROUP", 10**5)
    with input_tables.Reader() as reader, pytest.raises(input_tables.TableError, match="row group"):
        reader.row(tmp_path / "a.parquet", 0)


def test_limits_leave_room_for_real_captions():
    assert ingest.MOST_CHARACTERS >= 10_000 and ingest.LONGEST_WORD >= 200
    layout = "a red circle" + "<LOC_1000>" * 400
    chinese, address = "一只红色的猫坐在沙发上。" * 300, "https://a.com/" + "photos/7?x=1&" * 120
    for text in (layout, chinese, address, "हिन्दी" * 300):
        assert ingest._checked_words("text", text) == text
    for word in ("猫", "a", "7", "-", "_", " "):
        with pytest.raises(ingest.RecordError, match="a word of more than"):
            ingest._checked_words("text", f"a{word * 1002}b")
    assert json.loads(json.dumps(layout)) == layout


def test_images_beside_the_tables_of_a_folder(tmp_path):
    folder = tmp_path / "photos"
    (folder / "images").mkdir(parents=True)
    (folder / "tables").mkdir()
    for path in (folder / "images/a.png", tmp_path / "b.png"):
        image_files.write(path, np.zeros((8, 8, 3), np.uint8))
    rows = [{"file_name": f"../{name}", "text": "a"} for name in ("images/a.png", "../b.png")]
    table = folder / "tables/metadata.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (dataset,) = folders.read(folder, tmp_path / "prepared").recipe.datasets
    with input_tables.Reader(dataset.image_root, (), dataset.within) as reader:
        assert reader.image(reader.row(table, 0)["file_name"])
        with pytest.raises(ingest.RecordError, match=f"lies outside {folder}"):
            reader.image(reader.row(table, 1)["file_name"])
