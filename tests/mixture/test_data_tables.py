# SPDX-License-Identifier: Apache-2.0
"""Tables of every format have the same rows, however few of them are read."""

import csv
import io
import json
import tarfile

import pytest

from sparse_lavida_jax.mixture import input_tables
from sparse_lavida_jax.mixture.records import RecordError

ROWS = [
    {"image": "a.png", "caption": 'a "red" robot,\nin two lines'},
    {"image": "b.png", "caption": "grün 青", "score": "5.5"},
    {"image": "c.png", "caption": "third"},
    {"image": "d.png", "caption": "fourth"},
]


def jsonl(path):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))


def as_json(path):
    path.write_text(json.dumps(ROWS))


def as_csv(path):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["image", "caption", "score"], restval="")
        writer.writeheader()
        writer.writerows(ROWS)


def parquet(path):
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pip install '.[data]'")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist([{"score": None} | r for r in ROWS]), path,
                                row_group_size=3)  # fmt: skip


def add(archive, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def tar(path):
    with tarfile.open(path, "w") as archive:
        for i, row in enumerate(ROWS):
            add(archive, f"part/{i:04d}.json", json.dumps(row).encode())


@pytest.mark.parametrize(
    ("suffix", "write"),
    [("jsonl", jsonl), ("json", as_json), ("csv", as_csv), ("parquet", parquet), ("tar", tar)],
)
def test_the_rows_are_those_that_were_written(tmp_path, suffix, write):
    path = tmp_path / f"table.{suffix}"
    write(path)
    assert input_tables.num_rows(path) == len(ROWS)
    with input_tables.Reader() as reader:
        assert [reader.row(path, i) for i in (3, 0, 1, 2)] == [ROWS[i] for i in (3, 0, 1, 2)]


def test_the_column_names_of_a_csv_file_are_read_once(tmp_path, monkeypatch):
    path, read = tmp_path / "table.csv", []
    as_csv(path)
    cells = input_tables._cells
    monkeypatch.setattr(input_tables, "_cells", lambda text: read.append(text) or cells(text))
    with input_tables.Reader() as reader:
        assert [reader.row(path, i) for i in range(4)] == ROWS
    assert sum(text.startswith("image,caption,score") for text in read) == 1


def test_a_table_that_changed_is_looked_through_again(tmp_path):
    path = tmp_path / "table.jsonl"
    jsonl(path)
    assert input_tables.num_rows(path) == 4
    path.write_text(json.dumps(ROWS[2]) + "\n")
    assert input_tables.num_rows(path) == 1
    with input_tables.Reader() as reader:
        assert reader.row(path, 0) == ROWS[2]


def test_the_columns_of_a_parquet_file_may_be_chosen(tmp_path):
    parquet(tmp_path / "a.parquet")
    with input_tables.Reader(columns=["caption", "other"]) as reader:
        assert reader.row(tmp_path / "a.parquet", 2) == {"caption": "third"}


@pytest.mark.parametrize(
    ("suffix", "write"), [("jsonl", jsonl), ("csv", as_csv), ("parquet", parquet), ("tar", tar)]
)
def test_a_column_exists_if_one_of_the_tables_has_it(tmp_path, suffix, write):
    paths = [tmp_path / f"a.{suffix}", tmp_path / "other.json"]
    write(paths[0])
    paths[1].write_text('[{"layout": "x"}]')
    input_tables.check_columns(
        paths, [["image"], ["score"], ["layout"]]
    )  # the second row has the score
    input_tables.check_columns(paths, [])
    with pytest.raises(
        input_tables.TableError, match=r"names a, b, and .* are caption, image, .*score"
    ):
        input_tables.check_columns(paths, [["image"], ["b"], ["a"]])


def test_a_sample_of_a_tar_file_is_what_shares_a_name(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "./x/1.jpg", b"one")
        add(archive, "./x/1.txt", b" a robot\n")
        add(archive, "./x/2.source_images.png", b"two")
        add(archive, "./x/1.cls", b"7")
        add(archive, "./y/1.jpg", b"three")
    path = tmp_path / "a.tar"
    with input_tables.Reader() as reader:
        found = [reader.row(path, i) for i in range(input_tables.num_rows(path))]
    assert found == [
        {"image": b"one", "caption": "a robot"}, {"source_images": b"two"}, {"image": b"three"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("a.jsonl", "{broken\n", "it is no JSON"),
        ("a.jsonl", "[1]\n", "it has no fields by name"),
        ("a.json", "[1]", "it has no fields by name"),
        ("a.csv", "a,b\n1\n", "it has 1 cells, and the table 2 columns"),
        ("a.jsonl", b"\xff\n", "it is no UTF-8"),
    ],
)
def test_a_damaged_row_is_reported(tmp_path, name, contents, said):
    path = tmp_path / name
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with input_tables.Reader() as reader, pytest.raises(RecordError, match=said):
        reader.row(path, 0)


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("a.json", "{}", "holds no list of rows"),
        ("a.csv", "", "no line of column names"),
        ("a.tar", "nothing", "cannot be read"),
    ],
)
def test_a_table_that_is_none_is_reported(tmp_path, name, contents, said):
    path = tmp_path / name
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(input_tables.TableError, match=said):
        input_tables.num_rows(path)


def test_a_parquet_file_that_is_none_is_reported(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet needs pip install '.[data]'")
    (tmp_path / "a.parquet").write_text("nothing")
    with pytest.raises(input_tables.TableError, match=r"a.parquet cannot be read"):
        input_tables.num_rows(tmp_path / "a.parquet")


def test_a_pattern_names_several_tables(tmp_path):
    for name in ("b.json", "a.json", "c.txt"):
        (tmp_path / name).write_text("[]")
    assert [p.name for p in input_tables.find([f"{tmp_path}/*.json"])] == ["a.json", "b.json"]
    with pytest.raises(input_tables.TableError, match=r"there is no table .*x.json"):
        input_tables.find([f"{tmp_path}/x.json"])
    with pytest.raises(
        input_tables.TableError, match=r"c.txt is not a table that is read: .parquet"
    ):
        input_tables.find([f"{tmp_path}/c*"])


# --- images ----------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"a")
    (tmp_path / "secret").write_bytes(b"secret")
    with tarfile.open(tmp_path / "pictures.tar", "w") as archive:
        add(archive, "./a.png", b"a")
    return tmp_path


@pytest.mark.parametrize("name", ["pictures", "pictures.tar"])
@pytest.mark.parametrize("value", ["a.png", "./a.png", {"path": "a.png", "bytes": None}])
def test_an_image_is_found_by_its_name(root, name, value):
    with input_tables.Reader(str(root / name)) as reader:
        assert reader.image(value) == b"a"


def test_an_image_may_lie_in_the_table():
    with input_tables.Reader() as reader:
        assert reader.image(b"a") == b"a"
        assert reader.image({"bytes": b"a", "path": "x"}) == b"a"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("pictures", "b.png", "b.png cannot be read: No such file"),
        ("pictures.tar", "b.png", "no image b.png in"),
        ("pictures", "../secret", "lies outside"),
        ("pictures", "/etc/hostname", "lies outside"),
        ("pictures", "https://x.org/a.png", "not on this machine: download it first"),
        ("pictures", 7, "7 is neither an image nor the name of one"),
    ],
)
def test_an_image_that_is_not_there_is_reported(root, name, value, said):
    with input_tables.Reader(str(root / name)) as reader, pytest.raises(RecordError, match=said):
        reader.image(value)
