# SPDX-License-Identifier: Apache-2.0
"""Folders as the world makes them: the same records come out, or what is lost is named."""

import collections
import io
import json
import os
import pathlib
import tarfile
import unicodedata

import numpy as np
import pytest
import raw_data
from PIL import Image

from sparse_lavida_jax import main
from sparse_lavida_jax.data import files, leftovers
from sparse_lavida_jax.mixture import folders, ingest, input_tables, preparation_report, prepare
from sparse_lavida_jax.mixture.recipe import PrepareError

NAMES = ["0.png", "café 1.png", "sub/2.png", "3.JPG"]
CAPTIONS = [f"image {i}" for i in range(len(NAMES))]


def pixels(number):
    return Image.open(io.BytesIO(raw_data.png(number)))


def write_images(folder):
    for number, name in enumerate(NAMES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels(number).save(path, quality=100)


def rows(text="text"):
    return [{"file_name": name, text: said} for name, said in zip(NAMES, CAPTIONS, strict=True)]


def as_text_files(folder):
    for name, said in zip(NAMES, CAPTIONS, strict=True):
        (folder / name).with_suffix(".txt").write_text(said)


def as_jsonl(folder):
    raw_data.lines(folder / "metadata.jsonl", rows())


def as_csv(folder):
    lines = [",".join(row.values()) for row in rows()]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *lines]) + "\n")


def as_parquet(folder):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pa.Table.from_pylist(rows()), folder / "metadata.parquet")


def as_tar(folder):
    with tarfile.open(folder / "all.tar", "w") as archive:
        for number, (name, said) in enumerate(zip(NAMES, CAPTIONS, strict=True)):
            for suffix, data in (("png", raw_data.png(number)), ("txt", said.encode())):
                add(archive, f"{pathlib.PurePath(name).stem}.{suffix}", data)


def add(archive, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


FORMS = {
    "txt": as_text_files,
    "jsonl": as_jsonl,
    "csv": as_csv,
    "parquet": as_parquet,
    "tar": as_tar,
}


@pytest.fixture(params=FORMS)
def good(request, tmp_path):
    """A folder of four images with captions, in one form, and the name of the form."""
    folder = tmp_path / "photos"
    folder.mkdir()
    if request.param != "tar":
        write_images(folder)
    FORMS[request.param](folder)
    return folder, request.param


def read(folder, output="prepared"):
    return folders.read(folder, folder / output)


def captions(given):
    """Returns the captions of the records, with the sizes of their images."""
    made = prepare.drafts(given.recipe, ingest.Settings(32, 8, 1, 0))
    return collections.Counter((one.record.asked, one.record.size) for one in made)


EXPECTED = collections.Counter({((said,), (48, 40)): 1 for said in CAPTIONS})


def test_good_folders_are_read_whole(good):
    folder, _ = good
    given = read(folder)
    assert captions(given) == EXPECTED
    assert given.found == ({}, {})


# What is added to a folder; nothing of it may change the records, and all of it is named.
ADDED = {
    **{name: leftovers.BEHIND for name in (
        ".DS_Store", "._0.png", "._0.txt", "._metadata.csv", "._metadata.jsonl", "._all.tar",
        "__MACOSX/sub/._2.png", ".ipynb_checkpoints/metadata-checkpoint.jsonl", "Thumbs.db",
        ".thumbnails/0.png", "desktop.ini", "@eaDir/0.png", "#recycle/0.png", "0.png~", "#0.txt#",
        "metadata.jsonl~", "~$metadata.csv", "$RECYCLE.BIN/0.png", "0.png:Zone.Identifier",
        ".git/config", "Icon\r", ".nfs0001", "__pycache__/x.txt", "a.jsonl.swp", "9.png.part",
    )},
    "x.bmp": folders.OTHER_IMAGE, "x.GIF": folders.OTHER_IMAGE, "x.heic": folders.OTHER_IMAGE,
    "alone.txt": folders.NO_IMAGE, "sub/README.TXT": folders.NO_IMAGE, "x.zip": folders.OTHER_TABLE,
    "x.tar.gz": folders.OTHER_TABLE, "x.tsv": folders.OTHER_TABLE, "notes.md": folders.OTHER,
    "new.png": folders.NO_CAPTION, "empty.jsonl": folders.NO_ROWS, "empty.PARQUET": None,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, why in ADDED.items() if why])
def test_what_is_added_to_a_folder_is_named(good, name):
    folder, _ = good
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\n" if name.startswith("empty") else b"\0\xff\xfe")
    given = read(folder)
    assert captions(given) == EXPECTED
    ((why, named),) = given.found.left_out.items()
    assert (why, len(named)) == (ADDED[name], 1)
    assert name == named[0] or name.startswith(f"{named[0]}/")


def decomposed(text):
    return unicodedata.normalize("NFD", text)


CHANGES = {
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "lone CR": lambda data: data.replace(b"\n", b"\r"),
    "no last line end": lambda data: data.rstrip(b"\n"),
    "empty lines": lambda data: data.replace(b"\n", b"\n\n"),
    "decomposed": lambda data: decomposed(data.decode()).encode(),
    "Windows": lambda data: data.replace(b"sub/2.png", rb"SUB\\2.PNG"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("form", ["txt", "jsonl", "csv"])
def test_texts_of_other_systems_are_read(tmp_path, form, what):
    write_images(tmp_path)
    FORMS[form](tmp_path)
    for path in [*tmp_path.rglob(f"*.{form}")]:
        changed = CHANGES[what](path.read_bytes())
        path.write_bytes(changed.replace(rb"\\", b"\\") if form == "csv" else changed)
    given = read(tmp_path)
    assert captions(given) == EXPECTED
    assert given.found.left_out == {}


def test_captions_are_composed(tmp_path):
    raw_data.images(tmp_path, 1)
    (tmp_path / "0.txt").write_text(decomposed("ein großer Bär"))
    assert [asked for asked, _ in captions(read(tmp_path))] == [("ein großer Bär",)]


def test_files_with_names_of_other_systems_are_found(good):
    folder, _ = good
    for path in [*folder.rglob("*")]:
        if path.is_file():
            path.rename(path.with_name(decomposed(path.stem) + path.suffix.upper()))
    given = read(folder)
    assert captions(given) == EXPECTED
    assert given.found.left_out == {}


BREAKS = "\u2028\x0b\x0c\x85\x1c\x1d\u2029"


@pytest.mark.parametrize("form", FORMS)
def test_other_breaks_than_line_ends_stand_inside_of_captions(tmp_path, form):
    name = f"a{BREAKS}b"
    raw_data.images(tmp_path, 1)
    if form == "txt":
        (tmp_path / "0.txt").write_text(name)
    elif form == "csv":
        (tmp_path / "a.csv").write_text(f"file_name,text\n0.png,{name}\n")
    elif form == "jsonl":
        row = json.dumps({"file_name": "0.png", "text": name}, ensure_ascii=False)
        (tmp_path / "a.jsonl").write_text(row + "\n")
    elif form == "parquet":
        parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        row = {"file_name": "0.png", "text": name}
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    else:
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            add(archive, "0.png", raw_data.png(0))
            add(archive, "0.txt", name.encode())
        (tmp_path / "0.png").unlink()
    assert [asked for asked, _ in captions(read(tmp_path))] == [(name,)]


# --- no sample decides ---------------------------------------------------------------------------


def late(kind):
    """Returns twelve rows of which the last three have what the others lack."""
    early, whole = {
        "image": ({"question": "q", "answer": "a"}, {"image": "0.png"}),
        "another name": (
            {"question": "q", "answer": "a", "image": "0.png"}, {"image": None, "path": "0.png"}
        ),
        "text": ({"file_name": "0.png"}, {"text": "a"}),
    }[kind]  # fmt: skip
    return [early] * 9 + [early | whole] * 3


def write_rows(path, given):
    if path.suffix == ".jsonl":
        raw_data.lines(path, given)
    elif path.suffix == ".parquet":
        parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        names = dict.fromkeys(name for row in given for name in row)
        parquet.write_table(pa.table({n: [row.get(n) for row in given] for n in names}), path)
    elif path.suffix == ".csv":
        names = [*dict.fromkeys(name for row in given for name in row)]
        cells = [",".join(row.get(name) or "" for name in names) for row in given]
        path.write_text("\n".join([",".join(names), *cells]) + "\n")
    else:
        with tarfile.open(path, "w") as archive:
            for number, row in enumerate(given):
                row = dict(row)
                if row.pop("image", None) or row.pop("path", None):
                    add(archive, f"{number}.png", raw_data.png(0))
                add(archive, f"{number}.json", json.dumps(row).encode())


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "tar"])
@pytest.mark.parametrize("kind", ["image", "another name"])
def test_images_of_late_rows_are_kept(tmp_path, suffix, kind):
    raw_data.images(tmp_path, 1)
    write_rows(tmp_path / f"q.{suffix}", late(kind))
    (dataset,) = read(tmp_path).recipe.datasets
    made = [*prepare.drafts(read(tmp_path).recipe, ingest.Settings(32, 8, 1, 0))]
    assert (dataset.kind, len(made)) == ("understanding", 12)
    assert sum(len(one.record.images) for one in made) == (3 if kind == "image" else 12)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_rows_that_lack_a_text_are_named(tmp_path, suffix):
    raw_data.images(tmp_path, 1)
    write_rows(tmp_path / f"m.{suffix}", late("text"))
    given = read(tmp_path)
    done = prepare.trial(given.recipe, main.config.Config(), given.found, lambda *_: None)
    assert (done.records, done.bad) == (3, 9)
    bad = [f"m.{suffix}:{number}" for number in range(1, 10)]
    line = preparation_report.ReportLine("left out", "text_to_image-1: bad rows", 9, bad)
    assert line in done.table


def test_rows_of_another_kind_are_named(tmp_path):
    raw_data.images(tmp_path, 1)
    caption, question = {"file_name": "0.png", "text": "a"}, {"question": "q", "answer": "a"}
    raw_data.lines(tmp_path / "m.jsonl", [question, *[caption] * 9])
    given = read(tmp_path)
    done = prepare.trial(given.recipe, main.config.Config(), given.found, lambda *_: None)
    assert (done.records, done.bad) == (9, 1)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_two_columns_of_one_meaning_are_named(tmp_path, suffix):
    raw_data.images(tmp_path, 1)
    row = {"file_name": "0.png", "text": "a", "caption": "b", "width": "7"}
    write_rows(tmp_path / f"m.{suffix}", [row])
    remarks = read(tmp_path).found.remarks
    assert remarks[folders.DOUBLED] == [f"caption or text of m.{suffix}"]
    assert remarks[folders.UNKNOWN] == [f"width of m.{suffix}"]


def test_a_missing_cell_is_left_out_however_it_is_written(tmp_path):
    rows = [{"question": "q", "answer": "a", "image": one} for one in (None, "", [], float("nan"))]
    raw_data.lines(tmp_path / "q.jsonl", rows)
    made = [*prepare.drafts(read(tmp_path).recipe, ingest.Settings(32, 8, 1, 0))]
    assert len(made) == 4 and not any(one.record.images for one in made)


def test_a_key_or_column_that_is_there_twice_is_not_chosen_from(tmp_path):
    raw_data.images(tmp_path, 2)
    twice = '{"file_name": "0.png", "text": "a", "text": "b"}'
    raw_data.lines(tmp_path / "a.jsonl", [twice, {"file_name": "0.png", "text": "c"}])
    assert [asked for asked, _ in captions(read(tmp_path))] == [("c",)]
    (tmp_path / "b.csv").write_text("file_name,text,text\n0.png,a,b\n")
    with pytest.raises(PrepareError, match="two columns text"):
        read(tmp_path)


def test_two_images_with_one_text_file_are_named(tmp_path):
    raw_data.images(tmp_path, 1)
    pixels(1).save(tmp_path / "0.jpg")
    (tmp_path / "0.txt").write_text("a")
    given = read(tmp_path)
    assert given.found.remarks == {folders.SHARED: ["0.jpg and 0.png"]}
    assert sum(captions(given).values()) == 2
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in (
            ("7.png", raw_data.png(0)),
            ("7.jpg", b"x"),
            ("7.txt", b"x"),
            ("8.png", raw_data.png(0)),
            ("8.txt", b"y"),
        ):
            add(archive, name, data)
    bad = []
    (tar, _) = read(tmp_path).recipe.datasets
    for shard in prepare.shards.plan(tar, 9, ingest.Settings(32, 8, 1, 0), ""):
        assert len([*prepare._drafts(ingest.Settings(32, 8, 1, 0), shard, {}, bad)]) == 1
    assert bad == [["a.tar:1", "it has two of the field image"]]


def test_members_of_a_tar_file_that_are_not_used_are_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("._7.jpg", "__MACOSX/7.png", "7.PNG", "7.TXT", "7.cls", "x/.DS_Store"):
            add(archive, name, raw_data.png(0) if name == "7.PNG" else b"a")
    given = read(tmp_path)
    assert sum(captions(given).values()) == 1
    assert given.found.left_out == {
        leftovers.BEHIND: ["a.tar/._7.jpg", "a.tar/__MACOSX/7.png", "a.tar/x/.DS_Store"],
        "a member of another kind": ["a.tar/7.cls"],
    }


# --- links ---------------------------------------------------------------------------------------


def test_links_to_folders_are_followed_once(good):
    folder, _ = good
    outside = folder.parent / "pets"
    raw_data.images(outside, 2)
    for i in range(2):
        (outside / f"{i}.txt").write_text(f"pet {i}")
    (outside / "again").symlink_to(outside)
    (folder / "pets").symlink_to(outside)
    (folder / "same").symlink_to(outside)
    (folder / "up").symlink_to(folder.parent)
    (folder / "nowhere").symlink_to("missing")
    given = read(folder)
    pets = {((f"pet {i}",), (48, 40)): 1 for i in range(2)}
    assert captions(given) == EXPECTED + collections.Counter(pets)
    left = {"nowhere", "up", "pets/again", "same"}
    assert {why: {*names} for why, names in given.found.left_out.items()} == {
        leftovers.NOWHERE: left
    }


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_links_to_files_are_followed_within_the_folder(tmp_path, place):
    folder = tmp_path / "photos"
    raw_data.images(folder, 1)
    (folder / "0.txt").write_text("a")
    to = folder / "sub" if place == "inside" else tmp_path / "other"
    raw_data.images(to, 1)
    (to / "0.txt").write_text("b")
    for name in ("png", "txt"):
        (folder / f"link.{name}").symlink_to(to / f"0.{name}")
    given = read(folder)
    if place == "inside":
        assert sum(captions(given).values()) == 3
    else:
        assert sum(captions(given).values()) == 1
        assert given.found.left_out == {leftovers.OUTSIDE: ["link.png", "link.txt"]}


@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_names_may_be_absolute(tmp_path, form):
    raw_data.images(tmp_path, 2)
    rows = [{"file_name": str(tmp_path / f"{i}.png"), "text": f"{i}"} for i in range(2)]
    raw_data.lines(tmp_path / "metadata.jsonl", rows)
    assert sum(captions(read(tmp_path)).values()) == 2
    assert read(tmp_path).found.left_out == {}


# --- our own output ------------------------------------------------------------------------------


def test_our_own_output_inside_of_the_input_is_left_out(good, monkeypatch):
    folder, _ = good
    given = read(folder)
    wanted = main.config.Config(prepare=main.config.Prepare(max_bad_fraction=1.0))
    monkeypatch.chdir(folder)
    for output in ("prepared", str(folder / "p2"), "../photos/sub/p3"):
        given = folders.read(pathlib.Path("."), pathlib.Path(output))
        prepare.prepare(given.recipe, output, wanted, raw_data.Averages)
        assert captions(given) == EXPECTED
    run = folder / "runs/mine"
    files.write_json(run / "config.json", {})
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    model = folder / "model"
    files.write_json(model / "config.json", {})
    (model / "MANIFEST.sha256").write_text("")
    given = read(folder, "p4")
    assert captions(given) == EXPECTED
    named = {"prepared", "p2", "sub/p3", "runs/mine", "model"}
    assert {why: {*names} for why, names in given.found.left_out.items()} == {
        leftovers.WRITTEN: named
    }


# --- the command ---------------------------------------------------------------------------------


def run(capsys, *words):
    code = main.main(["main", "--mode=prepare", "--compilation_cache=", *map(str, words)])
    return code, capsys.readouterr()


def test_a_trial_writes_nothing_and_says_the_same(tmp_path, capsys):
    folder, output = tmp_path / "photos", tmp_path / "prepared"
    raw_data.images(folder, 3)
    for i in range(2):
        (folder / f"{i}.txt").write_text(f"image {i}")
    words = (f"--src={folder}", f"--dst={output}", "--image_tokenizer=scenes")
    code, said = run(capsys, *words, "--dry_run", "--json")
    assert code == 0 and not output.exists()
    tried = json.loads(said.out)
    assert (tried["dry_run"], tried["records"], tried["shards"]) == (True, 2, 1)
    code, said = run(capsys, *words)
    assert code == 0
    assert (
        "left out  1  an image that no table names and no text file describes  (2.png)" in said.out
    )
    told = (output / preparation_report.READABLE).read_text()
    for line in tried["table"]:
        assert f"| {line['state']} | {line['count']} | {line['what']} |" in told
    code, said = run(capsys, *words, "--json")
    assert json.loads(said.out)["table"] == tried["table"]


@pytest.mark.parametrize("how", ["--image_tokenizer=scenes", "--config.data.image_codec=scenes"])
def test_data_without_an_image_to_draw_are_prepared_with_a_named_tokenizer(tmp_path, capsys, how):
    folder = tmp_path / "boxes"
    raw_data.images(folder, 1)
    row = {"file_name": "0.png", "phrase": "a dog", "box": [0, 0, 9, 9]}
    raw_data.lines(folder / "b.jsonl", [row])
    raw_data.lines(folder / "q.jsonl", [{"question": "how many?", "answer": "two"}])
    words = (f"--src={folder}", f"--dst={tmp_path / 'p'}")
    code, said = run(capsys, *words)
    assert code == 2 and "no image to draw" in said.err
    assert not (tmp_path / "p").exists()
    code, said = run(capsys, *words, how)
    assert code == 0 and "2 records" in said.out


def test_a_second_preparation_takes_nothing_from_the_first(tmp_path, capsys):
    folder = tmp_path / "photos"
    raw_data.images(folder, 1)
    (folder / "0.txt").write_text("a")
    with prepare.reserved(tmp_path / "p"):
        (tmp_path / "p/half").write_text("")
        (tmp_path / "p/half").rename(tmp_path / "p/tokenizer.json")
        code, said = run(capsys, f"--src={folder}", f"--dst={tmp_path / 'p'}")
        assert code == 2 and "is being prepared by another process" in said.err
        assert (tmp_path / "p/tokenizer.json").exists()


def test_a_name_of_any_bytes_is_read_and_reported(tmp_path):
    raw_data.images(tmp_path, 1)
    for name, data in ((b"\xff.png", raw_data.png(0)), (b"\xff.txt", b"a"), (b"\xfe.bmp", b"")):
        (tmp_path / os.fsdecode(name)).write_bytes(data)
    given = read(tmp_path)
    assert sum(captions(given).values()) == 1
    lines = [
        preparation_report.ReportLine("left out", why, 1, names)
        for why, names in given.found.left_out.items()
    ]
    assert r"\udcfe.bmp" in preparation_report.as_text(lines)
    prepare.fill(given.recipe, tmp_path / "p", main.config.Config(), raw_data.Averages,
                 found=given.found)  # fmt: skip
    assert r"\udcfe.bmp" in (tmp_path / "p" / preparation_report.READABLE).read_text()


def test_late_images_of_benchmarks_tables_are_seen(tmp_path):
    write_rows(tmp_path / "q.jsonl", late("image"))
    input_tables.check_columns([tmp_path / "q.jsonl"], [["question"], ["path", "image"]])
    with pytest.raises(input_tables.TableError, match="names path or picture, and the columns of"):
        input_tables.check_columns([tmp_path / "q.jsonl"], [["path", "picture"]])


def test_walks_do_not_depend_on_the_order_of_links(tmp_path):
    for name in ("a", "m/deep", "z"):
        raw_data.images(tmp_path / name, 1)
    (tmp_path / "a/to").symlink_to(tmp_path / "z")
    (tmp_path / "m/to").symlink_to(tmp_path / "a")
    found = leftovers.walk(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found.files] == [
        "a/0.png", "m/deep/0.png", "z/0.png"
    ]  # fmt: skip
    assert found.left_out == {leftovers.NOWHERE: ["a/to", "m/to"]}
    assert np.all([path.is_file() for path in found.files])
