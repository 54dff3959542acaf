# SPDX-License-Identifier: Apache-2.0
"""What makes examples cheap changes nothing: words, generators and plans are kept, rows shared."""

import itertools
import json
import random

import numpy as np
import pytest
import stand_ins
from absl import flags
from absl.testing import flagsaver

from benchmarks import steps
from sparse_lavida_jax import diffusion
from sparse_lavida_jax.data.corrupted_rows import corrupt_together
from sparse_lavida_jax.scenes import scene_batches as scene_batches
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.scenes.dice import WORDS, Dice, PhiloxPool
from sparse_lavida_jax.scenes.tokenizer import SHIPPED, Tokenizer

ALL = {task: 1.0 for group in scene_batches.GROUPS.values() for task in group}
CUT = json.loads(SHIPPED.read_text())["pre_tokenizer"]
RELEASED = {"corruption": "released", "attention": "full", "weighting": "mean"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    stand_ins.without_waiting(monkeypatch)


def make_batches(**sections) -> scene_batches.SceneBatches:
    whole = {"data": {"tasks": ALL, "max_answer_len": 40, "given": 0.3}, "train": {"batch_size": 8}}
    return stand_ins.batches(stand_ins.settings(**(whole | sections)))


# ---------------------------------------------------------------------------------------------
# Words.


def texts() -> list[str]:
    """Texts of the language, and of arbitrary pieces and characters."""
    rng = random.Random(0)
    samples = [tasks.sample(task, 1, index) for task in ALL for index in range(20)]
    found = [text for s in samples for text in (s.prompt, s.answer, s.layout) if text is not None]
    pieces = ["red", " circle", "<LOC_3>", "<LOC_25>", "<|user|>", ",", "?", "12", " ", "  ", "\t"]
    characters = [*" abC09,:?<>_LOC'\t\n\0é🔺"]
    for alphabet in (pieces, characters):
        found += ["".join(rng.choices(alphabet, k=rng.randrange(9))) for _ in range(1500)]
    return found


def test_words_are_encoded_as_the_library_encodes_the_whole_text():
    tokenizer = Tokenizer()
    for _ in range(2):  # of new words, and of known ones
        for text in texts():
            whole = tokenizer._encode(text)
            assert tokenizer.encode(text) == whole.ids, repr(text)
            assert tokenizer.encode_with_offsets(text) == (whole.ids, whole.offsets), repr(text)
    assert {"", " red", "red"} <= tokenizer._known.keys()
    assert all(word.count(" ") <= 1 for word in tokenizer._known)


@pytest.mark.parametrize(
    "change",
    [
        {"post_processor": CUT},
        {"pre_tokenizer": CUT | {"add_prefix_space": True}},
    ],
)
def test_texts_are_encoded_as_a_whole_by_a_tokenizer_that_cuts_them_otherwise(tmp_path, change):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(SHIPPED.read_text()) | change))
    tokenizer = Tokenizer(path)
    for text in ("Red circle", "a red circle", " a<LOC_3>"):
        whole = tokenizer._encode(text)
        assert tokenizer.encode_with_offsets(text) == (whole.ids, whole.offsets)
    assert not tokenizer._known


def test_given_tokens_lie_inside_a_span():
    rng, encoder = np.random.default_rng(0), stand_ins.encoder(stand_ins.settings())
    answer = " a red circle<LOC_4>, two small squares"
    _, offsets = encoder.tokenizer.encode_with_offsets(answer)
    for _ in range(300):
        edges = np.sort(rng.integers(0, len(answer) + 1, (int(rng.integers(4)), 2)))
        spans = tuple((int(first), int(end)) for first, end in edges)
        made = encoder.text_example("p", answer, given_spans=spans)
        for token, (start, stop) in enumerate(offsets):
            inside = any(first <= start and stop <= end for first, end in spans)
            assert made.given[token] == inside
        assert not made.given[len(offsets) :].any()


# ---------------------------------------------------------------------------------------------
# Random numbers.


def test_a_generator_of_a_pool_draws_what_a_new_one_draws():
    pool = PhiloxPool()
    for place, key, index in itertools.product((0, 2), ((1, 2), (2**64 - 1, 7)), (0, 5)):
        again = np.random.Generator(pool.at(place, key, (0, 0, index, 3)))
        new = np.random.Generator(
            np.random.Philox(key=key[0] + (key[1] << 64), counter=[0, 0, index, 3])
        )
        for rng in (again, new):
            rng.integers(7)  # leaves half a word for the next one
        assert again.integers(9, size=3).tolist() == new.integers(9, size=3).tolist()
        assert again.random(5).tolist() == new.random(5).tolist()
        assert again.permutation(9).tolist() == new.permutation(9).tolist()
        again.integers(7)


def test_dice_continue_where_they_were_whatever_others_draw():
    philox = np.random.Philox(key=[3, 0x7C9F8CE1], counter=[0, 0, 4, 0])
    words = philox.random_raw(3 * WORDS).reshape(3, WORDS)[:, ::-1].reshape(-1).tolist()
    dice = Dice(3, "train/draw", 4)
    dice._key = (3, 0x7C9F8CE1)
    for word in words:
        assert dice.below(10**6) == word % 10**6
        Dice(1, "other", 2).below(3)


# ---------------------------------------------------------------------------------------------
# Rows.


@pytest.mark.parametrize("diffusion_", [{"blocks": "plan", "text_masked_blocks": 8}, RELEASED])
def test_rows_made_together_are_those_made_alone(diffusion_):
    batches = make_batches(diffusion=diffusion_)
    for group, attempt in itertools.product(batches.groups, (0, 3)):
        numbers = [5, 2, 9]
        together = batches.made_together(group, numbers, attempt)
        alone = [batches.made(group, number, attempt) for number in numbers]
        shape = batches.shape_of(group)
        stand_ins.assert_equal(
            *(rows[0].batch(rows, shape, batches.settings) for rows in (together, alone))
        )


@pytest.mark.parametrize("kind", [{"blocks": "plan"}, {"blocks": "uniform"}, {"attention": "full"}])
def test_rows_are_laid_out_together_as_alone(kind):
    batches = make_batches(diffusion=kind)
    rows = [batches.made(group, number, 0).tokens for group in batches.groups for number in (0, 1)]
    together = corrupt_together(rows)
    for i, row in enumerate(rows):
        assert row.lengths == (len(row.understanding.block), len(row.generation.block))
        for side, stream in zip((row.understanding, row.generation), together, strict=True):
            mine = stream.example == i
            order = np.argsort(side.block, kind="stable")
            for name, values in vars(side).items():
                found = getattr(stream.tokens, name)[mine]
                np.testing.assert_array_equal(found, values, err_msg=name)
            assert len(order) == mine.sum()


def test_a_plan_that_is_kept_is_not_changed_by_its_rows():
    given = np.zeros(36, bool)
    first = diffusion.plan_blocks(np.arange(36), np.full(6, 6), given, 4)
    first.block[:], first.weight[:] = 99, 7.0
    second = diffusion.plan_blocks(np.arange(36), np.full(6, 6), given, 4)
    assert second.block.max() < 99 and set(second.weight) == {0.0, 1.0}


def test_a_scene_is_drawn_from_the_stamps_of_its_cells():
    rng, stamps = np.random.default_rng(0), world.stamps_of(16)
    cells = (rng.integers(0, 49, 36) * (rng.random(36) < 0.4)).tolist()
    drawn = world.render(world.Scene(tuple(cells)))
    for cell, appearance in enumerate(cells):
        y, x = divmod(cell, world.GRID)
        part = drawn[16 * y : 16 * (y + 1), 16 * x : 16 * (x + 1)]
        np.testing.assert_array_equal(part, stamps[appearance])
    np.testing.assert_array_equal(world.render(np.array(cells).reshape(6, 6)), drawn)


# ---------------------------------------------------------------------------------------------
# The benchmark.


def test_the_benchmark_makes_as_many_examples_after_the_lessons(monkeypatch):
    asked = []
    lesson = {"first": {"until": 3, "tasks": {"point": 1.0}}}
    given = stand_ins.settings(data={"tasks": ALL, "lessons": lesson}, train={"batch_size": 4})
    real = scene_batches.SceneBatches.batch
    monkeypatch.setattr(
        scene_batches.SceneBatches,
        "batch",
        lambda self, group, index: asked.append(group) or real(self, group, index),
    )
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(examples=10):
        row = steps._made(given)
    assert (row["batch"], row["examples"], len(row["times_s"])) == (4, 12, steps.TURNS)
    assert len(asked) == 3 * (steps.WARM_UPS + steps.TURNS)
    assert row["median_s"] > 0
