# SPDX-License-Identifier: Apache-2.0
"""Preparing data: every kind of row, bad rows, restarts; only complete shards are left."""

import functools
import json
import os
import pathlib
import signal
import sys

import numpy as np
import pytest
import raw_data

from sparse_lavida_jax.data import image_files, images
from sparse_lavida_jax.mixture import prepare, records
from sparse_lavida_jax.mixture.prepare import PrepareError
from sparse_lavida_jax.mixture.records import ShardedRecords


def read(folder: pathlib.Path, dataset: int = 0) -> list[records.Record]:
    index = json.loads((folder / "mixture.json").read_text())
    shards = index["datasets"][dataset]["shards"]
    found = ShardedRecords([(folder / s["file"], s["records"], s["bytes"]) for s in shards])
    return [found[i] for i in range(len(found))]


def codes_of(squares) -> np.ndarray:
    return raw_data.Averages().encode(np.stack(squares))


# --- rows to records ---------------------------------------------------------------------------


def test_a_captioned_image_is_cropped_where_the_record_says(tmp_path):
    source = raw_data.captioned(tmp_path)
    assert raw_data.prepared(source, tmp_path / "out", crops=3).records == raw_data.ROWS
    places = set()
    for i, record in enumerate(read(tmp_path / "out")):
        image = image_files.read(tmp_path / f"pictures/{i}.png")
        assert record.asked == (f"image {i}.png",) and record.size == (48, 40)
        assert record.target.dtype == np.int32 and record.crops.shape == (3, 2)
        squares = [images.training_crop(image, 32, *at, 8) for at in record.crops.tolist()]
        np.testing.assert_array_equal(record.target, codes_of(squares))
        light = [images.luminance_and_contrast(square) for square in squares]
        np.testing.assert_allclose(record.light, light, rtol=1e-6)
        places |= {tuple(at) for at in record.crops.tolist()}
    # Shortest side 32: a crop moves 0..6 sideways, and not vertically.
    assert {top for top, _ in places} == {0}
    assert {left for _, left in places} == {*range(7)}


@pytest.fixture
def one_row(tmp_path):
    """Prepares one row; returns its record, or the reason why there is none."""
    raw_data.images(tmp_path / "pictures", 3)

    def made(function, row, **fields):
        raw_data.lines(tmp_path / "table.jsonl", [row])
        dataset = {"name": "a", "json_path": "table.jsonl", "image_root": "pictures"}
        source = raw_data.mixture(
            tmp_path / "m.json", dataset | {"preprocess_fn": function} | fields
        )
        raw_data.prepared(source, tmp_path / "out", max_bad_fraction=1.0)
        told = json.loads((tmp_path / "out/a/00000-of-00001.json").read_text())
        if told["left_out"]:
            return "".join(told["left_out"])
        return told["bad"][0][1] if told["bad"] else read(tmp_path / "out")[0]

    return made


def padded(tmp_path, number):
    image = image_files.read(tmp_path / f"pictures/{number}.png")
    return codes_of([images.source_view(image, 32, 8)])[0]


def contents(tmp_path, number):
    return (tmp_path / f"pictures/{number}.png").read_bytes()


def test_an_edit_has_its_sources_seen_and_as_codes(tmp_path, one_row):
    row = {
        "source_images": ["0.png", "1.png"], "target_image": "2.png", "instruction": "blue",
        "pixel_diff": 0.25, "edit_boxes": [[0, 0, 10, 10]],
    }  # fmt: skip
    record = one_row("process_gpt_edit", row)
    assert record.kind == "edit" and record.asked == ("blue",) and record.pixel_diff == 0.25
    assert record.images == (contents(tmp_path, 0), contents(tmp_path, 1))
    np.testing.assert_array_equal(record.sources, [padded(tmp_path, i) for i in (0, 1)])
    np.testing.assert_array_equal(record.target, [padded(tmp_path, 2)])
    np.testing.assert_array_equal(record.boxes, [[0, 0, 10, 10]])
    assert one_row("process_gpt_edit", row, max_enc_images=1) == "max_enc_images"


def test_an_edit_with_a_layout_says_what_it_does(tmp_path, one_row):
    row = {
        "source_images": "0.png", "target_image": "2.png", "instruction": "blue",
        "loc": "<LOC_1>", "operation": "remove",
    }  # fmt: skip
    record = one_row("process_gpt_edit_loc_gnd", row)
    assert (record.operation, record.layout, len(record.target)) == ("removing", "<LOC_1>", 1)
    alone = {name: value for name, value in row.items() if name != "target_image"}
    record = one_row("process_gpt_edit_loc_gnd", alone, process_fn_kwargs={"plan_only": True})
    assert record.form == "plan_only" and len(record.target) == 0
    assert "operation is 'paint'" in one_row("edit_layout", row | {"operation": "paint"})


def test_an_image_with_a_layout_is_padded_and_may_have_feedback(tmp_path, one_row):
    row = {"image": "0.png", "caption": "x", "loc": "<LOC_1>", "fltLaionAesthScore": 6,
           "hpsv2": 0.25, "feedback": ["bad"], "feedback_images": ["1.png"]}  # fmt: skip
    record = one_row("preproces_text_to_image_generation_s3_loc", row)
    assert (record.score, record.hps) == (6.0, 2.5)
    assert record.feedback == ("bad",) and record.images == (contents(tmp_path, 1),)
    np.testing.assert_array_equal(record.target, [padded(tmp_path, 0)])
    assert "1 feedback and 0 feedback_images" in one_row("layout", row | {"feedback_images": []})


def test_a_conversation_has_turns_and_images(tmp_path, one_row):
    said = [
        {"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a dog"},
        {"from": "human", "value": "sure?"}, {"from": "gpt", "value": "yes"},
    ]  # fmt: skip
    record = one_row("vw_instruct", {"image": "0.png", "conversations": said})
    assert record.asked == ("<image>\nwhat?", "sure?") and record.answered == ("a dog", "yes")
    assert record.images == (contents(tmp_path, 0),) and record.size == (48, 40)
    asked = {"image": ["0.png", "1.png"], "question": "which?", "answer": "both"}
    assert one_row("understanding", asked).asked == ("<image> <image>\nwhich?",)
    assert one_row("understanding", {"question": "why?", "answer": "x"}).images == ()
    for turns, why in (
        (said[:3], "do not end with an answer"),
        (said[1:], "turn 0 of its conversations is not of the user"),
        ([{"from": "human", "value": "<image><image>"}, said[1]], "speaks of 2 images"),
    ):
        assert why in one_row("vw_instruct", {"image": "0.png", "conversations": turns})


def test_boxes_come_in_pixels_or_in_words(one_row):
    record = one_row("refcoco_rec", {"image": "0.png", "label": "dog", "box": [1, 2, 30, 40]})
    np.testing.assert_array_equal(record.boxes, [[1, 2, 30, 40]])
    record = one_row("refcoco_rec", {"image": "0.png", "label": "dog", "loc_string": "<LOC_1>"})
    assert record.answered == ("<LOC_1>",) and len(record.boxes) == 0
    dense = {"image": "0.png", "phrases": ["a", "b"], "boxes": [[0, 0, 1, 1], [1, 1, 2, 2]]}
    assert one_row("grandf", dense).phrases == ("a", "b")
    assert one_row("grandf", {"image": "0.png", "loc_caption": "x"}).answered == ("x",)
    said = one_row("refcoco_rec", {"image": "0.png", "label": "dog", "box": [1, 2, 300, 40]})
    assert said == "a box leaves the image of 48x40 pixels"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"caption": "x"}, "it has no image"),
        ({"image": "0.png"}, "it has no caption"),
        ({"image": "0.png", "caption": 7}, "caption is 7"),
        ({"image": "9.png", "caption": "x"}, "9.png cannot be read"),
        ({"image": "0.png", "caption": "x <|eot_id|>"}, "holds the control token <|eot_id|>"),
        ({"image": "0.png", "caption": "an <image>"}, "holds the control token <image>"),
        ({"image": ["0.png", "1.png"], "caption": "x"}, "2 images as image, where one is"),
        ({"image": "0.png", "caption": "x", "hpsv2": "nan"}, "hpsv2 is 'nan', which is no number"),
    ],
)
def test_a_bad_row_says_why(one_row, row, said):
    assert said in one_row("text_to_image", row)


def test_a_damaged_image_is_bad(tmp_path, one_row):
    (tmp_path / "pictures/0.png").write_bytes(raw_data.png(0)[:500])
    assert "image that can be read" in one_row("piat_hash", {"image": "0.png", "caption": "x"})


def test_rows_are_left_out_by_the_rules_of_their_dataset(one_row):
    row = {"image": "0.png", "caption": "x", "fltLaionAesthScore": 4.9}
    assert one_row("piat_hash", row) == "aes_cutoff"
    assert one_row("piat_hash", row, aes_cutoff=4).score == 4.9
    assert one_row("piat_hash", {"image": "0.png", "caption": "x"}, min_size=41) == "min_size"


def test_columns_may_have_other_names(one_row):
    row = {"file": "0.png", "text": "x"}
    columns = {"image": "file", "caption": "text"}
    assert one_row("piat_hash", row, columns=columns).asked == ("x",)


# --- shards ------------------------------------------------------------------------------------


def test_the_same_input_gives_the_same_bytes_however_many_processes(tmp_path):
    source = raw_data.captioned(tmp_path)
    one = raw_data.prepared(source, tmp_path / "one")
    two = raw_data.prepared(source, tmp_path / "two", workers=2)
    assert one == two and (one.shards, one.made) == (3, 3)
    assert raw_data.contents(tmp_path / "one") == raw_data.contents(tmp_path / "two")
    assert raw_data.prepared(source, tmp_path / "two", workers=2).made == 0  # all is there


def test_a_ray_cluster_makes_the_same_shards(tmp_path):
    ray = pytest.importorskip("ray", reason="Ray Data needs pip install '.[ray]'")
    source = raw_data.captioned(tmp_path)
    raw_data.prepared(source, tmp_path / "one")
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=here)
    try:
        raw_data.prepared(source, tmp_path / "two", engine="ray")
    finally:
        ray.shutdown()
    assert raw_data.contents(tmp_path / "one") == raw_data.contents(tmp_path / "two")


class Stops(raw_data.Averages):
    """Fails after encoding a number of batches."""

    def __init__(self, error, batches):
        self.error, self.left = error, batches

    def encode(self, pixels):
        if not self.left:
            raise self.error
        self.left -= 1
        return super().encode(pixels)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("No space left on device")])
def test_an_interrupted_preparation_goes_on_where_it_was(tmp_path, error):
    source = raw_data.captioned(tmp_path)
    raw_data.prepared(source, tmp_path / "whole")
    with pytest.raises(type(error)):
        raw_data.prepared(source, tmp_path / "out", functools.partial(Stops, error, 2))
    left = raw_data.contents(tmp_path / "out")
    shards = {f"captions/{i:05d}-of-00003.{s}" for i in (0, 1) for s in ("arrayrecord", "json")}
    assert set(left) == {*shards, "report.md"}
    assert "| captions | 2 of 3 | 10 | 8 | 0 | 0 |" in left["report.md"].decode()
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in shards}
    assert raw_data.prepared(source, tmp_path / "out").made == 1
    assert raw_data.contents(tmp_path / "out") == raw_data.contents(tmp_path / "whole")
    for name, time in before.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == time


class DiesOnce(raw_data.Averages):
    """Kills its process, as the system does when it is out of memory."""

    def __init__(self, path):
        self.path = path

    def encode(self, pixels):
        if not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(pixels)


def test_a_worker_that_dies_leaves_whole_shards(tmp_path):
    source = raw_data.captioned(tmp_path)
    load = functools.partial(DiesOnce, tmp_path / "died")
    with pytest.raises(PrepareError, match="a worker process died, perhaps for want of memory"):
        raw_data.prepared(source, tmp_path / "out", load, workers=1)
    assert not [path for path in (tmp_path / "out").rglob("*.tmp")]
    raw_data.prepared(source, tmp_path / "out", load)
    raw_data.prepared(source, tmp_path / "whole")
    assert raw_data.contents(tmp_path / "out") == raw_data.contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["truncated", "missing", "no outcome", "broken outcome"])
def test_a_shard_that_is_not_whole_is_made_again(tmp_path, damage):
    source = raw_data.captioned(tmp_path)
    raw_data.prepared(source, tmp_path / "out")
    whole = raw_data.contents(tmp_path / "out")
    shard = tmp_path / "out/captions/00001-of-00003.arrayrecord"
    outcome = shard.with_suffix(".json")
    match damage:
        case "truncated":
            shard.write_bytes(shard.read_bytes()[:100])
        case "missing":
            shard.unlink()
        case "no outcome":
            outcome.unlink()
        case _:
            outcome.write_text("{")
    assert raw_data.prepared(source, tmp_path / "out").made == 1
    assert raw_data.contents(tmp_path / "out") == whole


def test_only_what_changed_is_made_again(tmp_path):
    source = raw_data.captioned(tmp_path)
    raw_data.prepared(source, tmp_path / "out")
    moved = json.loads(source.read_text())
    moved["datasets"][0]["length_group"] = "other"
    source.write_text(json.dumps(moved))
    assert raw_data.prepared(source, tmp_path / "out").made == 0
    index = json.loads((tmp_path / "out/mixture.json").read_text())
    assert index["datasets"][0]["group"] == "other"
    assert raw_data.prepared(source, tmp_path / "out", crops=2).made == 3
    os.utime(tmp_path / "captions.jsonl", ns=(1, 1))
    assert raw_data.prepared(source, tmp_path / "out", crops=2).made == 3


# --- bad records -------------------------------------------------------------------------------


@pytest.fixture
def two_bad(tmp_path):
    names = raw_data.images(tmp_path / "pictures")
    rows = [{"image": name, "caption": "x"} for name in names]
    return raw_data.captioned(tmp_path, [rows[0], "{broken", *rows[1:5], {"caption": "x"}])


def test_bad_records_are_counted_named_and_skipped(tmp_path, two_bad):
    done = raw_data.prepared(two_bad, tmp_path / "out", max_bad_fraction=0.3)
    assert (done.records, done.bad) == (5, 2)
    assert [r.name for r in read(tmp_path / "out")] == [
        f"captions.jsonl:{i}" for i in (1, 3, 4, 5, 6)
    ]
    readable = (tmp_path / "out/report.md").read_text()
    assert "| captions | 2 of 2 | 7 | 5 | 0 | 2 |" in readable
    assert "- captions.jsonl:2: it is no JSON" in readable
    assert "- captions.jsonl:7: it has no image" in readable


def test_too_many_bad_records_end_it_and_nothing_is_lost(tmp_path, two_bad):
    with pytest.raises(PrepareError, match=r"1 of 7 records of captions are bad, .* 0: .*report"):
        raw_data.prepared(two_bad, tmp_path / "out", max_bad_fraction=0.1)
    left = raw_data.contents(tmp_path / "out")
    assert "captions/00000-of-00002.arrayrecord" in left and "mixture.json" not in left
    assert b"captions.jsonl:2" in left["report.md"]
    assert raw_data.prepared(two_bad, tmp_path / "out", max_bad_fraction=0.3).made == 1


def test_images_that_were_repaired_are_read_again(tmp_path):
    source = raw_data.captioned(tmp_path)
    image = sorted(source.parent.rglob("*.png"))[-1]
    held = image.read_bytes()
    image.unlink()
    with pytest.raises(PrepareError, match="Repair them"):
        raw_data.prepared(source, tmp_path / "out", max_bad_fraction=0.0)
    image.write_bytes(held)
    done = raw_data.prepared(source, tmp_path / "out", max_bad_fraction=0.0)
    assert (done.bad, done.made) == (0, 1) and done.shards > 1  # the good ones are kept


def test_a_shard_of_bad_records_alone_has_no_file(tmp_path):
    source = raw_data.captioned(tmp_path, ["{", "{", "{", "{", {"image": "0.png", "caption": "x"}])
    done = raw_data.prepared(source, tmp_path / "out", max_bad_fraction=0.8)
    assert (done.records, done.bad, done.shards) == (1, 4, 2)
    assert not (tmp_path / "out/captions/00000-of-00002.arrayrecord").exists()
    assert raw_data.prepared(source, tmp_path / "out", max_bad_fraction=0.8).made == 0


# --- mistakes ----------------------------------------------------------------------------------


def test_a_folder_with_something_else_is_not_touched(tmp_path):
    source = raw_data.captioned(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("x")
    with pytest.raises(PrepareError, match="holds something else: name another folder"):
        raw_data.prepared(source, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    with pytest.raises(PrepareError, match="is a file: name another folder"):
        raw_data.prepared(source, tmp_path / "out/thesis.tex")
    prepare.check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_columns_that_do_not_exist_are_refused(tmp_path):
    source = raw_data.captioned(tmp_path, columns={"image": "image", "caption": "txt"})
    with pytest.raises(PrepareError, match=r"names txt, and the .*captions.jsonl are caption, im"):
        raw_data.prepared(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_preparations_do_not_share_a_folder(tmp_path):
    source = raw_data.captioned(tmp_path)
    with prepare.reserved(tmp_path / "out"):
        with pytest.raises(PrepareError, match="is being prepared by another process"):
            raw_data.prepared(source, tmp_path / "out")


def test_a_dataset_without_rows_is_reported(tmp_path):
    source = raw_data.captioned(tmp_path, [])
    with pytest.raises(PrepareError, match="the dataset captions has no rows"):
        raw_data.prepared(source, tmp_path / "out")
    (tmp_path / "captions.jsonl").unlink()
    with pytest.raises(PrepareError, match=r"there is no table .*captions.jsonl"):
        raw_data.prepared(source, tmp_path / "out")
