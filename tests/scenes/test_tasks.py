# SPDX-License-Identifier: Apache-2.0
"""Examples are the same everywhere, balanced, short, and keep the held-out pairs out."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json

import numpy as np
import pytest

from sparse_lavida_jax import old_names
from sparse_lavida_jax.scenes import dice, tasks, world
from sparse_lavida_jax.scenes.tasks import draw
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

PINNED = (
    "draw", "edit", "inpaint", "outpaint", "layout", "edit_layout", "answer", "arithmetic", "point",
    "detect", "locate", "name", "quiz", "caption", "constrained_caption", "infill", "reflect",
)  # fmt: skip
FIRST_THOUSAND = "6da3bc1d1b23505162a83c2cc4d61aa3914bc990b9695ff13146a0b446f68578"


@functools.cache
def examples(task, count, split="train", seed=0):
    return [tasks.sample(task, seed, index, split) for index in range(count)]


def texts(sample):
    return [words for words in (sample.prompt, sample.answer, sample.layout) if words is not None]


def images(sample):
    return [scene for scene in (sample.image, sample.target) if scene is not None]


def test_the_first_thousand_examples_are_pinned():
    digest = hashlib.sha256()
    for number in range(1000):
        task = PINNED[number % len(PINNED)]
        sample = tasks.sample(task, 0, number // len(PINNED))
        fields = {
            name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
            for name, value in sample._asdict().items()
        }
        # Their names when the digest was computed.
        fields["picture"], fields["plan"] = fields.pop("image"), fields.pop("layout")
        assert fields.pop("window") is fields.pop("sheet") is None  # there were none
        fields["task"] = old_names.stream_of(task)
        if task == "answer":
            fields["column"] = None  # questions had no kind then
        digest.update(json.dumps(fields, sort_keys=True).encode())
        for scene in images(sample):
            digest.update(world.render(scene).tobytes())
    assert digest.hexdigest() == FIRST_THOUSAND


@pytest.mark.parametrize("task", tasks.TASKS)
def test_access_is_random(task):
    forwards = examples(task, 20)
    backwards = [tasks.sample(task, 0, index) for index in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert tasks.sample(task, 0, 10**12) == tasks.sample(task, 0, 10**12)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_splits_and_seeds_are_different_streams(task):
    streams = [examples(task, 20, split, seed) for split in ("train", "test") for seed in (0, 1)]
    for one in range(4):
        for other in range(one):
            assert streams[one] != streams[other]


def pairs_named(words):
    """The expected pairs, read word by word; plurals count twice."""
    plain = words.replace(",", " ").replace("<", " ").replace("?", " ").split()
    named = []
    for colour, noun in itertools.pairwise(plain):
        for shape in world.SHAPES:
            if colour in world.COLOURS and noun.startswith(shape):
                named += [(shape, colour)] * (1 if noun == shape else 2)
    return named


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_held_out_pair_is_never_in_company_in_training(task, split):
    for sample in examples(task, 150, split):
        shown = [[thing.pair for _, thing in scene.objects()] for scene in images(sample)]
        mentioned = [pairs_named(words) for words in texts(sample)]
        everything = {pair for pairs in shown + mentioned for pair in pairs}
        if everything & {*dice.HELD_OUT}:
            assert max(map(len, shown + mentioned)) == 1
        assert not sample.held_out


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_held_out_pair_is_always_in_company_in_the_held_out_split(task):
    for sample in examples(task, 150, "held_out"):
        shown = [[thing.pair for _, thing in scene.objects()] for scene in images(sample)]
        mentioned = [pairs_named(words) for words in texts(sample)]
        everything = {pair for pairs in shown + mentioned for pair in pairs}
        assert everything & {*dice.HELD_OUT}
        assert max(map(len, shown + mentioned)) > 1
        assert sample.held_out


def test_held_out_pairs_share_no_shape_and_no_colour_and_are_learnt_alone():
    assert {shape for shape, _ in dice.HELD_OUT} == {*world.SHAPES}
    assert len({colour for _, colour in dice.HELD_OUT}) == len(dice.HELD_OUT)
    alone = [s for s in examples("draw", 600) if s.column in ("single", "colours")]
    drawn = {thing.pair for sample in alone for _, thing in sample.target.objects()}
    assert drawn == {*dice.PAIRS}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_texts_are_short_and_scenes_small(task):
    tokenizer = Tokenizer()
    for split in tasks.SPLITS:
        for sample in examples(task, 150, split):
            assert sample.task == task
            assert len(tokenizer.encode(sample.prompt)) <= 48
            for words in (sample.answer, sample.layout):
                assert words is None or len(tokenizer.encode(words)) < 40
            assert (sample.target is not None) == tasks.TABLE[task].is_image
            assert (sample.answer is None) == tasks.TABLE[task].is_image
            most = 6 if sample.known is None else 4
            low = 1 if sample.known is None else 0
            assert sample.image is None or low <= len(sample.image) <= most


def test_answers_are_balanced():
    counts = collections.defaultdict(collections.Counter)
    for sample in examples("answer", 1500):
        counts[sample.prompt.split()[0], sample.prompt.split()[1]][sample.answer] += 1
    assert {*counts} == {("how", "many"), ("what", "colour"), ("is", "there"), ("are", "there")}
    for answers in counts.values():
        # Held-out pairs remove some answers to "what colour is the triangle?".
        assert max(answers.values()) <= 2 * min(answers.values())
    assert {*counts["how", "many"]} == {" 0", " 1", " 2", " 3", " 4"}


def test_reflections_are_right_about_as_often_as_wrong():
    verdicts = collections.Counter(s.answer == " is correct" for s in examples("reflect", 500))
    assert 0.35 < verdicts[True] / 500 < 0.7
    answers = {sample.answer for sample in examples("reflect", 500)}
    for words in ("is missing", "is too many", "should be a", "is not "):
        assert any(words in answer for answer in answers)


def test_every_kind_of_request_and_edit_occurs():
    columns = collections.Counter(sample.column for sample in examples("draw", 600))
    assert {*columns} == {*draw.COLUMNS}
    assert min(columns.values()) > 60
    verbs = collections.Counter(sample.prompt.split()[0] for sample in examples("edit", 500))
    assert {*verbs} == {"add", "remove", "replace", "make", "move"}
    assert min(verbs.values()) > 60


def test_binding_prompts_share_neither_shape_nor_colour():
    for sample in examples("draw", 600):
        if sample.column == "binding":
            (first, second) = pairs_named(sample.prompt)
            assert first[0] != second[0] and first[1] != second[1]


@pytest.mark.parametrize("task", ["inpaint", "outpaint"])
def test_known_cells_are_shown_and_the_others_are_empty(task):
    for sample in examples(task, 150):
        known = np.array(sample.known)
        shown, whole = np.array(sample.image.cells), np.array(sample.target.cells)
        np.testing.assert_array_equal(shown, np.where(known, whole, 0))
        assert whole[~known].any()
        ys, xs = np.nonzero(sample.known_grid == (task == "outpaint"))
        assert len(ys) == (np.ptp(ys) + 1) * (np.ptp(xs) + 1)  # a rectangle


@pytest.mark.parametrize("task", ["constrained_caption", "infill"])
def test_given_spans_are_whole_tokens_and_leave_a_gap(task):
    tokenizer = Tokenizer()
    for sample in examples(task, 150):
        _, offsets = tokenizer.encode_with_offsets(sample.answer)
        inside = [any(a <= s and e <= b for a, b in sample.given) for s, e in offsets]
        apart = [all(e <= a or b <= s for a, b in sample.given) for s, e in offsets]
        assert all(one != other for one, other in zip(inside, apart, strict=True))
        assert not all(inside)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"no task 'paint'. Choose one of layout, answer"):
        tasks.sample("paint", 0, 0)
    with pytest.raises(ValueError, match=r"no split 'dev'. Choose one of train, test, held_out"):
        tasks.sample("draw", 0, 0, "dev")
    with pytest.raises(ValueError, match=r"index=-1"):
        tasks.sample("draw", 0, -1)
