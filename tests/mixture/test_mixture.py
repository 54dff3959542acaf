# SPDX-License-Identifier: Apache-2.0
"""Batches of prepared records: shares, epochs, processes, checkpoints, static shapes."""

import collections
import contextlib
import dataclasses
import json
import pickle
import shutil

import grain
import jax
import numpy as np
import pytest
import raw_data
import stand_ins
import tiny

from sparse_lavida_jax import config
from sparse_lavida_jax.data.batch import RowShape
from sparse_lavida_jax.data.feed import Feed
from sparse_lavida_jax.evals import held_out
from sparse_lavida_jax.mixture import batches as mixture_batches
from sparse_lavida_jax.mixture.batches import MixtureBatches
from sparse_lavida_jax.mixture.records import RecordError
from sparse_lavida_jax.training import step as training_step
from sparse_lavida_jax.visibility import PAD_BLOCK

RELEASED = {"corruption": "released", "attention": "full", "weighting": "mean"}
WEIGHTS = {"draw": 3, "understand": 2, "change": 1}
NO_WORDS = {"data": {"prompt_drop": 0.0, "text_block_len": 8}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return raw_data.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared folder: 10 captions and 7 layouts to draw, 12 texts, 5 edits."""
    folder = tmp_path_factory.mktemp("mixture")
    names = raw_data.images(folder / "pictures")
    tables = {
        "captions": [{"image": name, "caption": f"caption {name}"} for name in names],
        "layouts": [
            {"image": n, "caption": "x", "loc": f"robot <LOC_{i}>"} for i, n in enumerate(names[:7])
        ],
        "talk": [
            {"image": names[i % 10], "question": f"question {i}?", "answer": "yes " * (i + 1)}
            for i in range(9)
        ],
        "boxes": [{"image": n, "label": f"dog {n}", "box": [1, 2, 30, 40]} for n in names[:3]],
        "edits": [
            {"source_images": names[i], "target_image": names[i + 1], "instruction": f"change {i}"}
            for i in range(5)
        ],
    }  # fmt: skip
    how = {
        "captions": ("text_to_image", "draw"), "layouts": ("layout", "draw"),
        "talk": ("understanding", "understand"), "boxes": ("grounding", "understand"),
        "edits": ("edit", "change"),
    }  # fmt: skip
    datasets = []
    for name, rows in tables.items():
        raw_data.lines(folder / f"{name}.jsonl", rows)
        function, group = how[name]
        datasets.append(
            {"name": name, "json_path": f"{name}.jsonl", "image_root": "pictures",
             "preprocess_fn": function, "length_group": group}
        )  # fmt: skip
    source = raw_data.mixture(
        folder / "m.json", *datasets, weights=WEIGHTS, batch_sizes={"change": 0.5}
    )
    raw_data.prepared(source, folder / "out")
    return folder / "out"


def batches(folder, tokenizer, *, process=(0, 1), **sections):
    index, count = process
    return MixtureBatches(
        folder, raw_data.settings(tokenizer, **sections), tokenizer,
        process_index=index, process_count=count,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["step-causal", "released"])
def mixed(request, folder, tokenizer):
    more = {"diffusion": RELEASED} if request.param == "released" else {}
    return batches(folder, tokenizer, **more)


def rows_of(batch, stream="understanding"):
    """The tokens of each row as bytes, without padding."""
    part = getattr(batch, stream)
    return [
        row[block != PAD_BLOCK].tobytes()
        for row, block in zip(part.tokens, part.tags.block, strict=True)
    ]


def test_other_processes_make_the_same_batches(mixed):
    dataset = mixed.dataset()
    feed = Feed(dataset, 3, workers=2)
    with contextlib.closing(feed):
        for step in range(3, 7):
            stand_ins.assert_equal(next(feed), dataset[step])


def test_groups_have_their_shares_and_batches_their_sizes(mixed):
    data = mixed.dataset()
    sizes = collections.Counter()
    for i in range(12):
        sizes[len(data[i].understanding.tokens), data[i].predicts] += 1
    # Of 6 consecutive batches 3 draw, 2 understand, and 1 edits, with half the rows.
    assert [count for (rows, _), count in sizes.items() if rows == 2] == [2]
    assert sorted(sizes.values()) == [2, 4, 6]
    assert mixed.sizes == {"draw": 4, "understand": 4, "change": 2}


def test_all_batches_of_a_group_have_one_shape(mixed):
    for group in WEIGHTS:
        made = [mixed.batch(group, i) for i in range(3)]
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(batch)] for batch in made]
        seen = set(zip(map(str, shapes), map(jax.tree.structure, made), strict=True))
        assert len(seen) == 1


def test_every_record_comes_once_an_epoch_in_another_order(mixed):
    for group, found in mixed.records.items():
        size = len(found)
        epochs = [
            [int(mixed.orders[group][i]) for i in range(start, start + size)]
            for start in (0, size, 2 * size)
        ]
        for order in epochs:
            assert sorted(order) == [*range(size)]
        assert len(set(map(tuple, epochs))) > 1


def test_a_record_has_other_random_numbers_in_another_epoch(mixed):
    found, where = mixed.records["draw"], collections.defaultdict(list)
    for number in range(2 * len(found)):
        where[int(mixed.orders["draw"][number])].append(number)
    pairs = [[mixed.row("draw", number) for number in numbers] for numbers in where.values()]
    shape = mixed.shape_of("draw")
    stacked = [[row.batch([row], shape, mixed.settings) for row in pair] for pair in pairs]
    differ = [rows_of(a, "generation") != rows_of(b, "generation") for a, b in stacked]
    assert sum(differ) > len(differ) // 2


def test_batches_are_the_same_every_time(mixed, folder, tokenizer):
    again = MixtureBatches(folder, mixed.settings, tokenizer)
    sent = pickle.loads(pickle.dumps(mixed))  # as to a worker
    for group in WEIGHTS:
        expected = mixed.batch(group, 3)
        for other in (again, sent):
            stand_ins.assert_equal(other.batch(group, 3), expected)


def test_processes_share_a_batch_and_draw_what_one_would(mixed, folder, tokenizer):
    halves = [
        MixtureBatches(folder, mixed.settings, tokenizer, process_index=i, process_count=2)
        for i in range(2)
    ]
    for index in (0, 1, 2, 3, 4, 5):
        whole = mixed.dataset()[index]
        parts = [half.dataset()[index] for half in halves]
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        stand_ins.assert_equal(joined, whole)


def test_an_iterator_goes_on_where_it_was_saved(mixed):
    def leaves(batch):
        return dict(enumerate(jax.tree.leaves(batch)))

    data = mixed.dataset()[:7].to_iter_dataset(grain.ReadOptions(num_threads=0))
    grain.experimental.assert_equal_output_after_checkpoint(data.map(leaves))
    iterator = iter(data)
    for _ in range(3):
        next(iterator)
    state, expected = iterator.get_state(), next(iterator)
    fresh = iter(mixed.dataset()[:7].to_iter_dataset())
    fresh.set_state(json.loads(json.dumps(state)))
    stand_ins.assert_equal(next(fresh), expected)


def test_a_model_learns_from_the_batches(mixed):
    """From groups of images and texts, and of edits with the released objective."""
    group = "change" if mixed.released else "draw"
    batch = mixed.batch(group, 0)
    assert batch.predicts == "both"
    value, logged = tiny.quick_jit(training_step.loss)(tiny.denoiser(mixed.settings.model), batch)
    assert np.isfinite(value) and value > 0.5
    assert set(logged) == {"text_nll", "image_nll"}


def test_images_are_seen_where_they_stand(folder, tokenizer):
    """The tokens of an image refer to features of its own views, never of blank ones."""
    for more in ({}, {"diffusion": RELEASED}):
        mixed = batches(folder, tokenizer, **more, **NO_WORDS)
        batch, vision = mixed.batch("understand", 0), mixed.settings.model.vision
        assert batch.pixels.shape[:2] == (4, 3)
        features = 3 * vision.num_tokens
        for row, index in enumerate(batch.understanding.index):
            used = index[index >= 0]
            assert len(used) and used.max() == features  # the newline
            views = set((used[used < features] // vision.num_tokens).tolist())
            assert views == {0, 1, 2}
            assert all(batch.pixels[row, view].any() for view in views)


def test_what_is_too_long_gives_way_to_another_record(folder, tokenizer):
    mixed = batches(folder, tokenizer, diffusion=RELEASED, **NO_WORDS)
    found = mixed.records["understand"]
    lengths = [mixed.row_of(found[i], np.random.default_rng(0)).length for i in range(12)]
    limit = sorted(n.understanding for n in lengths)[6]
    whole = mixed.shape_of("understand")
    mixed.shapes["understand"] = dataclasses.replace(whole, example=RowShape(limit, 0))
    rows = [mixed.row("understand", i) for i in range(12)]
    assert all(row.length.understanding <= limit for row in rows)
    assert any(n.understanding > limit for n in lengths)
    mixed.shapes["understand"] = dataclasses.replace(whole, example=RowShape(8, 0))
    with pytest.raises(RecordError, match="64 records of group understand are too long"):
        mixed.row("understand", 0)


# --- records that are held back ----------------------------------------------------------------


@pytest.fixture
def with_held(folder, tokenizer, monkeypatch):
    """A quarter of the groups of at least ten records is held back: 4, 3 and none."""
    monkeypatch.setattr(mixture_batches, "FEWEST", 10)
    return batches(folder, tokenizer, data={"held_out": 0.25, "prompt_drop": 0.0})


def test_what_is_held_back_is_never_trained_on(with_held, monkeypatch):
    assert {group: len(held) for group, held in with_held.held.items()} == {
        "draw": 4, "understand": 3, "change": 0,
    }  # fmt: skip
    for group, found in with_held.records.items():
        held, taken = with_held.held[group], with_held.orders[group]
        size = len(found) - len(held)
        for epoch in range(2):
            drawn = [int(taken[epoch * size + i]) for i in range(size)]
            assert sorted([*drawn, *held]) == [*range(len(found))]
    used, row_of = [], with_held.row_of
    monkeypatch.setattr(
        with_held, "row_of", lambda record, rng: used.append(record.name) or row_of(record, rng)
    )
    for attempt in range(20):  # replacing rows that are too long
        with_held.made("draw", 0, attempt)
    records = with_held.records["draw"]
    assert len({*used}) > 5 and not {*used} & {records[i].name for i in with_held.held["draw"]}
    captioned = {one.name for one in with_held.captioned(100)}
    assert captioned and not captioned & {records[i].name for i in with_held.held["draw"]}


def test_a_loss_is_measured_on_whole_batches(with_held, monkeypatch):
    made = list(with_held.measured("understand", with_held.held["understand"]))
    assert [len(batch.understanding.tokens) for batch in made] == [4]
    again = list(with_held.measured("understand", with_held.held["understand"]))
    assert rows_of(made[0]) == rows_of(again[0])
    assert not list(with_held.measured("understand", []))

    seen = []
    monkeypatch.setattr(
        held_out,
        "_loss",
        lambda model, batch, chunk: seen.append(batch) or (0, {"image_nll": len(seen)}),
    )
    said = held_out.compare(tiny.denoiser(with_held.settings.model), with_held)
    assert "never trained on: 4 of 17 (draw), 3 of 12 (understand)" in said
    assert "| draw | held out | 4 |  | 1.0000 |" in said
    assert "| draw | trained on | 4 |  | 2.0000 |" in said
    assert len(seen) == 4


def test_nothing_is_held_back_of_few_records(folder, tokenizer):
    mixed = batches(folder, tokenizer, data={"held_out": 0.25})
    assert not any(mixed.held.values())
    said = held_out.compare(tiny.denoiser(mixed.settings.model), mixed)
    assert said == "No record was held out: that needs at least 100 records in a group."


# --- mistakes ----------------------------------------------------------------------------------


def test_a_folder_that_is_not_finished_is_reported(tmp_path, tokenizer):
    with pytest.raises(
        RecordError, match=r"mixture.json cannot be read .* finished\? Run it again"
    ):
        batches(tmp_path, tokenizer)
    (tmp_path / "mixture.json").write_text('{"format": "other"}')
    with pytest.raises(RecordError, match="has format 'other'"):
        batches(tmp_path, tokenizer)


def test_a_missing_shard_is_named(tmp_path, folder, tokenizer):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy/talk/00001-of-00003.arrayrecord").unlink()
    with pytest.raises(RecordError, match=r"talk/00001-of-00003.arrayrecord is missing: copy it"):
        batches(tmp_path / "copy", tokenizer)


def test_codes_of_another_tokenizer_are_reported(folder, tokenizer):
    given = raw_data.settings(tokenizer)
    larger = config.build(
        config.Config,
        config.to_dict(given) | {"model": {**config.to_dict(given.model), "grid_size": 3}},
    )
    with pytest.raises(
        config.ConfigError, match="records hold 4x4 codes of 64 kinds, and the model"
    ):
        MixtureBatches(folder, larger, tokenizer)


def test_batches_that_do_not_divide_are_reported(folder, tokenizer):
    told = r"group change \(train.batch_size=4 times 0.5\): 2 examples do not divide over 4"
    with pytest.raises(config.ConfigError, match=told):
        batches(folder, tokenizer, process=(0, 4))


def test_sequences_longer_than_allowed_are_reported(folder, tokenizer):
    with pytest.raises(RecordError, match=r"longer than data.max_sequence_len=10"):
        batches(folder, tokenizer, data={"max_sequence_len": 10}).batch("draw", 0)


def test_packed_rows_hold_the_records_that_rows_of_their_own_would(folder, tokenizer):
    """Token by token, and each record sees its own images."""
    words = {"prompt_drop": 0.0, "text_block_len": 8}
    alone = batches(folder, tokenizer, data=words)
    packed = batches(folder, tokenizer, data=words | {"packing": 2})

    def tokens(batch):
        text, layout = batch.understanding, batch.understanding.tags
        columns = (text.tokens, layout.position, layout.block, layout.horizon)
        real = layout.block != PAD_BLOCK
        targets = (batch.text_target, batch.text_weight)
        return sorted(zip(*(column[real].tolist() for column in (*columns, *targets)), strict=True))

    for group in ("understand", "draw"):
        one, other = (each.batch(group, 0) for each in (alone, packed))
        assert tokens(other) == tokens(one)
        np.testing.assert_allclose(other.text_total.sum(), one.text_total.sum())
        assert len(other.text_total) == 2 and other.predicts == one.predicts
    vision, views = packed.settings.model.vision, packed.shape_of("understand").views
    batch = packed.batch("understand", 0)
    assert batch.pixels.shape[:2] == (2, 2 * views)
    index, segment = batch.understanding.index, batch.understanding.tags.segment
    for row, owner in zip(index, segment, strict=True):
        seen = (row >= 0) & (row < 2 * views * vision.num_tokens)
        assert set(owner[seen]) == {0, 1}
        np.testing.assert_array_equal(row[seen] // vision.num_tokens // views, owner[seen])
        newline = row[row >= 2 * views * vision.num_tokens]
        assert len(newline) and set(newline) == {2 * views * vision.num_tokens}


def test_lengths_that_processes_would_choose_apart_are_refused(folder, tokenizer):
    two = {"length_buckets": 2}
    assert len(batches(folder, tokenizer, data=two).shape_of("understand").rows) <= 2
    with pytest.raises(config.ConfigError, match="a length of its own"):
        batches(folder, tokenizer, data=two, process=(0, 2))
    with pytest.raises(config.ConfigError, match=r"2 processes in rows of data.packing=4"):
        batches(folder, tokenizer, data={"packing": 4}, process=(0, 2))


@pytest.mark.parametrize("long", ["a circle and " * 1500, "\U0001f600 " * 900])
def test_captions_to_draw_are_cut_as_for_training_and_left_out_if_too_long(
    tmp_path, tokenizer, long
):
    names = raw_data.images(tmp_path / "images", 3)
    rows = [{"image": name, "caption": f"caption {name}"} for name in names]
    rows[1]["caption"] = long
    raw_data.lines(tmp_path / "a.jsonl", rows)
    told = {"name": "a", "json_path": "a.jsonl", "image_root": "images"}
    source = raw_data.mixture(tmp_path / "m.json", told | {"preprocess_fn": "text_to_image"})
    raw_data.prepared(source, tmp_path / "out")
    for most in (8192, 300):
        data = batches(tmp_path / "out", tokenizer, data={"max_sequence_len": most})
        short = {f"caption {names[0]}", f"caption {names[2]}"}
        fits = len(tokenizer.encode(long[:800])) + data.settings.model.num_cells <= most
        assert set(data.prompts(3)) == short | ({long[:800]} if fits else set())
