# SPDX-License-Identifier: Apache-2.0
"""A batch depends only on its number, and its rows fit the loss and the kernels."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import subprocess
import sys

import grain
import jax
import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data import batch as making
from sparse_lavida_jax.data.batch import given_of
from sparse_lavida_jax.data.feed import Feed
from sparse_lavida_jax.scenes import scene_batches as scene_batches
from sparse_lavida_jax.scenes.task import IMAGE_GROUPS
from sparse_lavida_jax.sequence import prompt_row
from sparse_lavida_jax.tags import GIVEN_BLOCK, PROMPT_BLOCK
from sparse_lavida_jax.visibility import PAD_BLOCK

ALL = {task: 1.0 for group in scene_batches.GROUPS.values() for task in group}
SIZE = 6  # rows of a batch


def make_batches(**sections) -> scene_batches.SceneBatches:
    whole = {"data": {"tasks": ALL, "max_answer_len": 40}, "train": {"batch_size": SIZE}}
    return stand_ins.batches(stand_ins.settings(**(whole | sections)))


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        stand_ins.without_waiting(patch)
        yield


@pytest.fixture(scope="module")
def by_kind():
    """Batches for every way to assign blocks."""
    return {
        "schedule": make_batches(),
        "steps": make_batches(diffusion={"text_masked_blocks": 3}),
        "plan": make_batches(diffusion={"blocks": "plan", "text_masked_blocks": 16}),
        "uniform": make_batches(diffusion={"blocks": "uniform"}),
        "full": make_batches(diffusion={"attention": "full"}),
    }


class Row:
    """The stream of one row that holds its response, without padding.

    Attributes:
        codes, position, block, horizon, target, weight: of each token; ids are codes [s 1].
        place: of each token in the response, -1 for all others.
        mask_id, register_id: of the stream.
    """

    def __init__(self, batch, i, row, model):
        self.blocks, self.example = row.blocks, row.example
        example = row.example
        text = example.modality == "text"
        stream = batch.understanding if text else batch.generation
        real = stream.tags.block[i] != PAD_BLOCK
        count = real.sum()
        self.codes = stream.tokens[i][real].reshape(count, -1)
        self.index = stream.index[i][real]
        self.position = stream.tags.position[i][real]
        self.block = stream.tags.block[i][real]
        self.horizon = stream.tags.horizon[i][real]
        self.target = (batch.text_target if text else batch.image_target)[i][real].reshape(
            count, -1
        )
        self.weight = (batch.text_weight if text else batch.image_weight)[i][real]
        self.total = (batch.text_total if text else batch.image_total)[i]
        self.mask_id = model.text_mask_id if text else model.image_mask_id
        self.register_id = model.text_register_id if text else model.image_register_id
        start = prompt_row(
            self.example.parts, text_mask_id=1, codes_per_token=model.codes_per_token
        ).response_position
        place = self.position - start
        inside = (place >= 0) & (place < len(self.example.response))
        self.place = np.where(inside, place, -1)

    @property
    def is_masked(self):
        return (self.place >= 0) & (self.codes == self.mask_id).all(axis=1)

    @property
    def is_register(self):
        return (self.codes == self.register_id).all(axis=1)


def rows_of(batches, groups=scene_batches.GROUPS, count=3):
    """Returns the rows of the first `count` batches of each group."""
    model = batches.settings.model
    return [
        Row(batch, i, batches.row(group, number * SIZE + i), model)
        for group, number in itertools.product(groups, range(count))
        for batch in [batches.batch(group, number)]
        for i in range(SIZE)
    ]


@pytest.fixture(scope="module", params=["schedule", "steps", "plan", "uniform", "full"])
def batches(request, by_kind):
    return by_kind[request.param]


@pytest.fixture(scope="module")
def rows(batches):
    return rows_of(batches)


# ---------------------------------------------------------------------------------------------
# The same everywhere.


def digest(batch) -> str:
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(batch):
        total.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
import test_batches as tests
tests.scene_batches.LENGTH_PROBE = 16
dataset = tests.make_batches().dataset()
print(tests.digest(dataset[12]), tests.digest(dataset[7]))
"""


def test_a_batch_is_the_same_in_another_process_and_another_order(by_kind, tmp_path):
    dataset = by_kind["schedule"].dataset()
    here = [digest(dataset[index]) for index in (7, 12)]
    assert run_elsewhere(ELSEWHERE, tmp_path) == here[::-1]


def run_elsewhere(program, tmp_path) -> list[str]:
    """Runs a program in another process; returns the words of its output."""
    folder = pathlib.Path(__file__).parent
    paths = [str(folder.parent), str(folder.parents[1])]
    (tmp_path / "program.py").write_text(program)
    there = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(folder)],
        env={
            **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "5",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return there.stdout.split()


@pytest.mark.parametrize("start", [0, 5, 11])
def test_iterating_from_a_step_gives_the_batches_from_there_on(by_kind, start):
    dataset = by_kind["schedule"].dataset()
    resumed = Feed(dataset, start)
    for step in range(start, start + 4):
        stand_ins.assert_equal(next(resumed), dataset[step])


WORKERS = """
import json, sys
from absl import flags
sys.path.insert(0, sys.argv[1])
import test_batches as tests
if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    tests.scene_batches.LENGTH_PROBE = 16
    dataset = tests.make_batches().dataset()
    made = tests.Feed(dataset, 7, workers=2)
    print(*(tests.digest(next(made)) for _ in range(3)))
    saved = json.loads(json.dumps(made.position))
    made.close()
    assert (saved["begin"], saved["workers"]) == (7, 2)
    again = tests.Feed(dataset, 10, workers=2, saved=saved)
    assert again.position == saved
    print(*(tests.digest(next(again)) for _ in range(3)))
    again.close()
"""


@pytest.mark.slow
def test_worker_processes_make_the_same_batches_and_go_on_where_they_were(by_kind, tmp_path):
    dataset = by_kind["schedule"].dataset()
    here = [digest(dataset[index]) for index in range(7, 13)]
    assert run_elsewhere(WORKERS, tmp_path) == here


def test_a_feed_goes_on_where_it_was_saved(by_kind):
    """With the same number of workers its state is restored, otherwise it starts at that step."""
    dataset = by_kind["schedule"].dataset()
    feed = Feed(dataset, 3)
    for _ in range(4):
        next(feed)
    saved = json.loads(json.dumps(feed.position))
    assert (saved["begin"], saved["workers"]) == (3, 0)
    for kept in (saved, {**saved, "workers": 5}, None):
        resumed = Feed(dataset, 7, saved=kept)
        for step in (7, 8):
            stand_ins.assert_equal(next(resumed), dataset[step])
        assert resumed.position["begin"] == (3 if kept == saved else 7)


def test_an_iterator_gives_the_same_after_a_checkpoint(by_kind):
    def leaves(batch):
        return dict(enumerate(jax.tree.leaves(batch)))

    data = by_kind["schedule"].dataset()[:5]
    batches = data.to_iter_dataset(grain.ReadOptions(num_threads=0)).map(leaves)
    grain.experimental.assert_equal_output_after_checkpoint(batches)


def test_processes_share_a_batch_and_draw_what_one_would(by_kind):
    whole = by_kind["schedule"]
    halves = [
        scene_batches.SceneBatches(
            whole.settings, whole.encoder, process_index=index, process_count=2
        ).dataset()
        for index in range(2)
    ]
    for step in range(4):
        parts = [half[step] for half in halves]
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        stand_ins.assert_equal(joined, whole.dataset()[step])
    with pytest.raises(config.ConfigError, match=r"examples do not divide over 5 processes"):
        scene_batches.SceneBatches(whole.settings, whole.encoder, process_count=5)


def test_batches_differ_by_step_and_by_seed(by_kind):
    dataset = by_kind["schedule"].dataset()
    other = make_batches(seed=1).dataset()
    digests = [digest(batches[step]) for batches in (dataset, other) for step in range(10)]
    assert len({*digests}) == 20


def test_no_two_rows_share_random_numbers():
    """The random words of a row must not be a shifted copy of the next one's."""
    words = [
        scene_batches._generator(0, group, index, attempt).bit_generator.random_raw(200).tolist()
        for group, index, attempt in itertools.product(("draw", "edit"), range(4), range(2))
    ]
    assert len({word for row in words for word in row}) == 16 * 200


def test_tasks_come_in_their_proportions():
    weights = {"draw": 1.0, "answer": 2.0, "point": 5.0}
    batches = make_batches(data={"tasks": weights}, train={"batch_size": 1})
    assert batches.groups == {"answer": ["answer", "point"], "draw": ["draw"]}
    dataset = batches.dataset()
    draws = sum(dataset[step].predicts == "generation" for step in range(80))
    assert draws == 10
    asked = [batches.row("answer", index).example.response[0, 0] for index in range(200)]
    boxes = np.isin(asked, batches.encoder.tokenizer.location_ids).sum()
    assert 200 * 5 / 7 == pytest.approx(boxes, abs=25)


def test_tasks_and_steps_are_drawn_as_numpy_draws_them():
    """Batches of runs that started with `Generator.choice` must not change."""
    batches = make_batches(data={"tasks": {"answer": 0.3, "point": 0.1, "arithmetic": 0.7}})
    shares = np.array([0.3, 0.7, 0.1]) / np.sum([0.3, 0.7, 0.1])
    assert batches.groups["answer"] == ["answer", "arithmetic", "point"]
    for number in range(100):
        ours, theirs = (np.random.default_rng(number) for _ in range(2))
        at = batches._shares_up_to["answer"].searchsorted(ours.random(), "right")
        assert at == theirs.choice(3, p=shares)
        assert making._pick(ours, (6, 8, 12, 18)) == theirs.choice((6, 8, 12, 18))
        assert ours.random() == theirs.random()


def test_every_order_of_training_is_made_once():
    assert orders.order.cache_info().maxsize >= making.ORDER_SEEDS


def test_lessons_come_first_one_after_another():
    lessons = {
        "late": {"until": 3, "tasks": {"point": 1.0}},
        "early": {"until": 2, "tasks": {"answer": 1.0}},
    }
    batches = make_batches(data={"tasks": {"draw": 1.0}, "lessons": lessons}).dataset()
    predicted = [batches[step].predicts for step in range(6)]
    assert predicted == ["understanding"] * 3 + ["generation"] * 3
    for step, until, task in ((1, 2, "answer"), (2, 3, "point")):
        lesson = make_batches(data={"tasks": {task: 1.0}})
        lesson.stream = f"lesson until {until}/"
        stand_ins.assert_equal(batches[step], lesson.dataset()[step])
    alone = make_batches(data={"tasks": {"draw": 1.0}}).dataset()
    stand_ins.assert_equal(batches[3], alone[0])
    resumed = batches[2:]
    stand_ins.assert_equal(resumed[0], batches[2])
    stand_ins.assert_equal(resumed[1], batches[3])


def test_no_example_of_a_lesson_comes_again():
    """Rows of lessons and of the mixture have numbers of their own, though both count from 0."""
    tasks_ = {"draw": 1.0}
    lessons = {name: {"until": until, "tasks": tasks_} for name, until in (("a", 2), ("b", 4))}
    batches = make_batches(data={"tasks": tasks_, "lessons": lessons}).dataset()
    made = [batches[number] for number in range(8)]
    pairs = [
        pair
        for one in made
        for pair in zip(one.understanding.tokens, one.image_target, strict=True)
    ]
    rows = [words.tobytes() + codes.tobytes() for words, codes in pairs]
    assert len(rows) == len(set(rows)) == 48


def test_lessons_that_cannot_be_are_refused():
    one = config.Lesson(until=3, tasks={"point": 1.0})
    with pytest.raises(config.ConfigError, match="until=0 is out of range"):
        config.Lesson(until=0, tasks={"point": 1.0})
    with pytest.raises(config.ConfigError, match="at least one task"):
        config.Lesson(until=3, tasks={})
    with pytest.raises(config.ConfigError, match="end at different batches"):
        config.Data(lessons={"one": one, "other": one})
    with pytest.raises(config.ConfigError, match=r"no pointing\. It has: answer, arith"):
        make_batches(data={"lessons": {"one": {"until": 1, "tasks": {"pointing": 1.0}}}}).dataset()


def test_an_unknown_task_lists_the_known_ones():
    with pytest.raises(config.ConfigError, match=r"no drawing, painting\. It has: answer, arith"):
        make_batches(data={"tasks": {"drawing": 1.0, "painting": 1.0, "draw": 1.0}})


# ---------------------------------------------------------------------------------------------
# Contents of a row.


def test_the_loss_is_on_the_masked_tokens_of_the_response_and_nothing_else(rows):
    for row in rows:
        masked = np.sort(row.place[row.is_masked])
        np.testing.assert_array_equal(masked, np.sort(row.blocks.token[row.blocks.masked]))
        weighs = row.weight > 0
        # If t masks nothing, one token without weight is masked to keep the shape.
        if weighs.any() or row.is_masked.sum() > 1:
            np.testing.assert_array_equal(weighs, row.is_masked)
    assert sum((row.weight > 0).any() for row in rows) > 0.9 * len(rows)


def test_targets_are_the_clean_response_and_clean_tokens_are_shown(rows):
    for row in rows:
        masked, shown = row.is_masked, (row.place >= 0) & ~row.is_masked
        np.testing.assert_array_equal(row.target[masked], row.example.response[row.place[masked]])
        np.testing.assert_array_equal(row.codes[shown], row.example.response[row.place[shown]])
        present = row.blocks.token[row.blocks.block != diffusion.ABSENT]
        np.testing.assert_array_equal(np.sort(row.place[masked | shown]), np.sort(present))
        if row.example.modality == "image":
            np.testing.assert_array_equal(row.index[masked], row.place[masked])


def test_rows_are_sorted_by_block_and_fit_their_group(batches):
    for group in scene_batches.GROUPS:
        shape = batches.shape_of(group).example
        assert shape.understanding % batches.multiple == shape.generation % batches.multiple == 0
        for index in range(4):
            batch = batches.batch(group, index)
            for stream, length in (
                (batch.understanding, shape.understanding),
                (batch.generation, shape.generation),
            ):
                assert (stream is None) == (length == 0)
                if stream is not None:
                    assert stream.tags.shape == (SIZE, length)
                    assert (np.diff(stream.tags.block, axis=1) >= 0).all()


def shorter(shape, understanding):
    return dataclasses.replace(shape, example=shape.example._replace(understanding=understanding))


def test_a_row_that_does_not_fit_is_drawn_again(by_kind):
    batches = by_kind["schedule"]
    whole = batches.shape_of("tell")
    lengths = [batches.made("tell", index, 0).length.understanding for index in range(64)]
    most = int(np.median(lengths))
    batches.shapes["tell"] = shorter(whole, most)
    try:
        again = [batches.row("tell", index).length.understanding for index in range(64)]
        for before, now in zip(lengths, again, strict=True):
            assert now == before or before > most >= now
        batches.shapes["tell"] = shorter(whole, 1)
        with pytest.raises(ValueError, match="64 examples of group tell"):
            batches.row("tell", 0)
    finally:
        batches.shapes["tell"] = whole


def test_no_given_token_is_masked(batches):
    is_full = batches.settings.diffusion.attention == "full"
    rows = [row for row in rows_of(batches, ("tell", "edit")) if row.example.given.any()]
    assert len(rows) > 5
    for row in rows:
        given = row.example.given
        of_given = given[row.blocks.token]
        assert not row.blocks.masked[of_given].any()
        assert (row.blocks.block[of_given] == GIVEN_BLOCK).all()
        is_given = np.isin(row.place, np.flatnonzero(given))
        assert is_given.sum() == given.sum()
        assert (row.block[is_given] == (PROMPT_BLOCK if is_full else GIVEN_BLOCK)).all()


def test_a_random_part_is_given_a_rectangle_a_span_or_what_lies_around_it():
    batches = make_batches(data={"tasks": {"draw": 1.0, "answer": 1.0}, "given": 1.0})
    rng, shares = np.random.default_rng(0), []
    for group, index in itertools.product(("draw", "answer"), range(60)):
        example = batches.made(group, index, 0).example
        given = given_of(example, batches.settings, rng)
        shares.append(given.mean())
        assert not given[: example.reach].all()
        if example.modality == "text":
            assert abs(np.diff(given.astype(int), prepend=0, append=0)).sum() in (0, 2)
            assert not given[example.reach :].any()
        else:
            grid = given.reshape(6, 6)
            assert is_rectangle(grid) or is_rectangle(~grid)
    assert len({*shares}) > 10


def is_rectangle(grid) -> bool:
    rows, columns = grid.any(axis=1), grid.any(axis=0)
    edges = [abs(np.diff(line.astype(int), prepend=0, append=0)).sum() for line in (rows, columns)]
    return max(edges) <= 2 and (grid == rows[:, None] & columns[None]).all()


def test_without_a_share_only_what_the_task_gives_is_given():
    batches = make_batches(data={"tasks": {"draw": 1.0, "inpaint": 1.0}, "given": 0.0})
    for group, index in itertools.product(("draw", "edit"), range(10)):
        example = batches.made(group, index, 0).example
        given = given_of(example, batches.settings, np.random.default_rng(0))
        np.testing.assert_array_equal(given, example.given)
        assert given.any() == (group == "edit")


@pytest.mark.parametrize("kind", ["schedule", "steps", "plan", "uniform"])
def test_blocks_are_clean_ones_then_masked_ones_with_registers(by_kind, kind):
    model, settings = by_kind[kind].settings.model, by_kind[kind].settings.diffusion
    numbers = set()
    for row in rows_of(by_kind[kind], count=2):
        is_text = row.example.modality == "text" and kind != "uniform"
        most = settings.text_masked_blocks if is_text else settings.num_masked_blocks
        masked = np.unique(row.block[row.is_masked])
        assert masked.tolist() == sorted(row.blocks.masked_blocks)
        assert row.blocks.num_clean < masked.min()
        assert len(masked) <= (most if is_text or kind != "plan" else 4)  # of the sampler's steps
        numbers |= {len(masked)} if is_text else set()
        others = row.block[~row.is_masked & ~row.is_register]
        assert PROMPT_BLOCK <= others.min(initial=0)
        assert others.max(initial=0) <= row.blocks.num_clean
        for number in masked:
            assert (row.is_register & (row.block == number)).sum() == model.num_registers
        assert row.is_register.sum() == len(masked) * model.num_registers
        # tests/proofs/test_loss.py shows that `sees` is right.
        last_clean = [row.blocks.horizons.get(b, row.blocks.num_clean) for b in row.block.tolist()]
        np.testing.assert_array_equal(row.horizon, np.minimum(row.block, last_clean))
    if kind == "plan":
        assert max(numbers) > 3  # two steps of each text block
    else:
        assert numbers == {"schedule": {1}, "steps": {2, 3}, "uniform": set()}[kind]


def test_rows_of_a_plan_predict_all_that_is_not_given_and_images_have_one_length():
    batches = make_batches(
        data={"tasks": ALL, "max_answer_len": 40, "given": 0.0},
        diffusion={"blocks": "plan", "text_masked_blocks": 16},
    )
    lengths = set()
    for row in rows_of(batches, count=2):
        given, wanted = row.example.given, np.arange(len(row.example.response))
        wanted = wanted[~given & (wanted < row.example.reach)]
        assert sorted(set(row.place[row.weight > 0])) == wanted.tolist()
        assert row.weight.sum() == pytest.approx(row.total)
        if row.example.modality == "image":
            np.testing.assert_array_equal(np.unique(row.weight), [0, 1])
            assert (row.weight > 0).sum() == len(wanted)
            if not given.any():
                lengths.add(((row.place >= 0) | row.is_register).sum())
    assert len(lengths) == 1


def test_registers_stand_after_the_whole_sequence(by_kind):
    model = by_kind["schedule"].settings.model
    for row in rows_of(by_kind["schedule"], ("draw", "tell"), 1):
        length = prompt_row(row.example.parts, text_mask_id=1, codes_per_token=1).length
        places = np.unique(row.position[row.is_register])
        np.testing.assert_array_equal(places, length + np.arange(model.num_registers))


def test_registers_of_text_stand_after_lengths_up_to_the_longest_that_is_sampled(by_kind):
    """Nothing else in a row moves, no token is added, and a seed always draws the same length."""
    before, longest = by_kind["schedule"], 64
    data = {"tasks": ALL, "max_answer_len": 40, "sampled_answer_len": longest}
    after, model, lengths = make_batches(data=data), before.settings.model, set()
    for group, number in itertools.product(before.groups, range(40)):
        was, row = (batches.made(group, number, 0) for batches in (before, after))
        again = after.made(group, number, 0)
        assert row.length == was.length
        one, two = was.tokens.understanding, row.tokens.understanding
        registers = one.tokens == model.text_register_id
        moved = int((two.position - one.position)[registers].max(initial=0))
        expected = dataclasses.replace(one, position=one.position + moved * registers)
        pairs = [(expected, two), (was.tokens.generation, row.tokens.generation)]
        for made, found in [*pairs, (two, again.tokens.understanding)]:
            for field, values in vars(made).items():
                np.testing.assert_array_equal(values, getattr(found, field))
        if row.example.modality == "text":
            lengths.add(len(row.example.response) + moved)
        else:
            assert moved == 0
    assert lengths == {*range(8, longest + 1, 8)}


def test_with_full_attention_everything_is_in_block_0_without_registers(by_kind):
    for row in rows_of(by_kind["full"], count=1):
        assert (row.block == PROMPT_BLOCK).all()
        assert (row.horizon == PROMPT_BLOCK).all()
        assert not row.is_register.any()
        assert (row.place >= 0).sum() == len(row.example.response)  # nothing is left out


def test_totals_are_what_the_weights_are_divided_by(rows):
    for row in rows:
        assert row.total == np.float32(row.blocks.total)
        assert 0 < row.blocks.total <= len(row.example.response)


def test_text_and_image_totals_are_apart(by_kind):
    text, image = (by_kind["schedule"].batch(group, 0) for group in ("answer", "draw"))
    assert (text.predicts, image.predicts) == ("understanding", "generation")
    assert text.text_total.all() and not text.image_total.any()
    assert image.image_total.all() and not image.text_total.any()


def test_a_dropped_prompt_is_masks_between_its_headers():
    batches = make_batches(data={"tasks": {"draw": 1.0}, "prompt_drop": 1.0})
    model, t = batches.settings.model, batches.encoder.tokenizer
    stream = batches.batch("draw", 0).understanding
    for tokens, block in zip(stream.tokens, stream.tags.block, strict=True):
        left = [i for i in tokens[block != PAD_BLOCK].tolist() if i != model.text_mask_id]
        assert left == [t.user_id, t.end_of_turn_id, t.assistant_id, t.end_of_turn_id]


def test_plans_are_left_out_in_their_share():
    def lengths(share):
        batches = make_batches(data={"tasks": {"draw": 1.0}, "layout_drop": share})
        return [batches.row("draw", index).length.understanding for index in range(20)]

    assert all(without < whole for without, whole in zip(lengths(1.0), lengths(0.0), strict=True))


# ---------------------------------------------------------------------------------------------
# The released objective.

RELEASED = {"corruption": "released", "attention": "full", "weighting": "mean"}


def test_whole_sequences_fill_the_length_of_their_group_with_end_of_text():
    batches = make_batches(diffusion=RELEASED, data={"tasks": ALL, "source_drop": 0.5})
    dropped = set()
    for group, index in itertools.product(scene_batches.GROUPS, range(2)):
        batch, shape = batches.batch(group, index), batches.shape_of(group).example
        assert shape.understanding % batches.multiple == 0
        assert batch.understanding.tags.shape == (SIZE, shape.understanding)
        is_drawn = group in IMAGE_GROUPS
        assert batch.predicts == ("both" if is_drawn else "understanding")
        cells = np.zeros((SIZE, 0))
        if is_drawn:
            cells = batch.generation.tags.block
            dropped |= {(group, n) for n in (cells != PAD_BLOCK).sum(axis=1).tolist()}
        tokens = (batch.understanding.tags.block != PAD_BLOCK).sum(axis=1)
        length = tokens + (cells != PAD_BLOCK).sum(axis=1)
        assert len({*length.tolist()}) == 1
        # The last token is padding, which is also learned: end-of-text, or masked with a loss.
        last = batch.understanding.tags.position.argmax(axis=1)[:, None]
        token, target, weight = (
            np.take_along_axis(x, last, axis=1)[:, 0]
            for x in (batch.understanding.tokens, batch.text_target, batch.text_weight)
        )
        assert (target == batches.settings.model.end_of_text_id).all()
        assert np.where(
            weight > 0, token == batches.settings.model.text_mask_id, token == target
        ).all()
    cells = batches.settings.model.num_cells
    assert dropped == {("draw", cells), ("edit", cells), ("edit", 2 * cells)}


def test_whole_sequences_depend_on_their_number_alone():
    first, second = (make_batches(diffusion=RELEASED).dataset() for _ in range(2))
    assert [digest(first[i]) for i in (3, 4)] == [digest(second[i]) for i in (4, 3)][::-1]
    assert digest(first[3]) != digest(first[4])


def test_complementary_rows_follow_with_the_inverse_masks():
    batches = make_batches(
        data={"tasks": {"draw": 1.0}}, diffusion=RELEASED | {"complementary": True}
    )
    batch = batches.batch("draw", 0)
    weight = batch.image_weight[:, : batches.settings.model.num_cells]
    first, second = weight[:SIZE] > 0, weight[SIZE:] > 0
    np.testing.assert_array_equal(first, ~second)
    both = (batch.text_weight[:SIZE] > 0).astype(int) + (batch.text_weight[SIZE:] > 0)
    assert both.max() == 1 and both.any(axis=1).all()


def test_text_without_a_loss_cannot_be_all_there_is_to_learn():
    mute = RELEASED | {"text_loss": False}
    with pytest.raises(config.ConfigError, match="the tasks answer nothing to learn: leave them"):
        make_batches(data={"tasks": {"draw": 1.0, "answer": 1.0}}, diffusion=mute)
    batches = make_batches(data={"tasks": {"draw": 1.0}}, diffusion=mute)
    assert batches.batch("draw", 0).predicts == "generation"
