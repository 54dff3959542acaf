# SPDX-License-Identifier: Apache-2.0
"""Records are read back unchanged in any order, or an error names the damaged shard."""

import contextlib
import dataclasses
import pickle
import resource

import flax.serialization
import numpy as np
import pytest

from sparse_lavida_jax.mixture import records
from sparse_lavida_jax.mixture.records import Record, RecordError, ShardedRecords


def record(number=0, **changes):
    full = Record(
        kind="edit_layout",
        source="edits",
        name=f"edits.parquet:{number}",
        asked=("make it blue", "und grün, 青"),
        answered=("a", ""),
        layout="<LOC_1>",
        operation="adding",
        form="plan_only",
        feedback=("no",),
        images=(b"\x89PNG\x00", b""),
        target=np.arange(12, dtype=np.int32).reshape(1, 3, 4) + number,
        crops=np.array([[3, 4]], np.int32),
        light=np.array([[0.25, 0.5]], np.float32),
        sources=np.arange(8, dtype=np.int32).reshape(2, 2, 2),
        size=(640, 480),
        score=5.5,
        hps=2.5,
        pixel_diff=0.125,
        phrases=("a dog",),
        boxes=np.array([[0, 1, 2.5, 3]], np.float32),
    )
    return dataclasses.replace(full, **changes)


def assert_same(one, other):
    for field in dataclasses.fields(Record):
        values = getattr(one, field.name), getattr(other, field.name)
        np.testing.assert_array_equal(*values)
        assert type(values[0]) is type(values[1])
        if isinstance(values[0], np.ndarray):
            assert values[0].dtype == values[1].dtype


@pytest.mark.parametrize("made", [record(), Record("text_to_image", "a", "a:1", ("x",))])
def test_a_record_comes_back_as_it_was(made):
    assert_same(records.decode(records.encode(made)), made)
    assert records.encode(made) == records.encode(records.decode(records.encode(made)))


def test_a_record_of_another_version_is_refused():
    flat = flax.serialization.msgpack_restore(records.encode(record()))
    other = flax.serialization.msgpack_serialize({**flat, "version": 99})
    with pytest.raises(RecordError, match="of version 99, and this program reads version 2"):
        records.decode(other)


@pytest.mark.parametrize("data", [b"", b"\x00", b"no record", records.encode(record())[:-7]])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(RecordError, match="it is no record"):
        records.decode(data)


@pytest.fixture
def shards(tmp_path):
    """Opened shards of 2, 1 and 3 records."""
    found, number = [], 0
    for i, count in enumerate((2, 1, 3)):
        path = tmp_path / f"{i}.arrayrecord"
        written, size, _ = records.write_shard(path, [record(number + j) for j in range(count)])
        assert (written, size) == (count, path.stat().st_size)
        found.append((path, count, size))
        number += count
    return found


def test_records_of_several_shards_are_read_in_any_order(shards):
    whole = ShardedRecords(shards)
    assert len(whole) == 6
    for number in (5, 0, 2, 1, 4, 3, 3):
        assert_same(whole[number], record(number))
    with pytest.raises(IndexError, match=r"there are records 0..5, not 6"):
        whole[6]


def test_another_process_opens_the_files_itself(shards):
    whole = ShardedRecords(shards)
    assert_same(whole[4], record(4))
    assert_same(pickle.loads(pickle.dumps(whole))[4], record(4))


def test_the_same_records_are_the_same_bytes(tmp_path, shards):
    again = records.write_shard(tmp_path / "again", [record(0), record(1)])
    assert (tmp_path / "again").read_bytes() == shards[0][0].read_bytes()
    other = records.write_shard(tmp_path / "other", [record(0), record(2)])
    assert other[-1] != again[-1]


def test_a_shard_that_is_missing_or_cut_short_is_named(shards):
    path = shards[1][0]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RecordError, match=r"1.arrayrecord has 1000 bytes, not \d+: copy it again"):
        ShardedRecords(shards)
    path.unlink()
    with pytest.raises(RecordError, match=r"1.arrayrecord is missing: copy it again"):
        ShardedRecords(shards)


def test_a_damaged_shard_is_named(shards):
    path, _, size = shards[2]
    path.write_bytes(bytes(size))
    whole = ShardedRecords(shards)
    assert_same(whole[0], record(0))
    with pytest.raises(RecordError, match=r"record 4 cannot be read from .*2.arrayrecord: "):
        whole[4]


@contextlib.contextmanager
def files_no_larger_than(num_bytes):
    """Simulates a full disk for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_shard_that_the_disk_cannot_hold_is_not_there(tmp_path):
    noise = np.random.default_rng(0)
    large = [record(images=(noise.bytes(40_000),)) for _ in range(6)]
    path = tmp_path / "a.arrayrecord"
    records.write_shard(path, [record()])
    before = path.read_bytes()
    with files_no_larger_than(100_000), pytest.raises(OSError, match=f"{tmp_path} cannot be writ"):
        records.write_shard(path, large)
    assert [p.name for p in tmp_path.iterdir()] == ["a.arrayrecord"]
    assert path.read_bytes() == before


def test_a_shard_whose_records_fail_is_not_there(tmp_path):
    def broken():
        yield record()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.write_shard(tmp_path / "a.arrayrecord", broken())
    assert not [*tmp_path.iterdir()]
