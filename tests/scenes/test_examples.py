# SPDX-License-Identifier: Apache-2.0
"""Prompts have the form of the base model, answers are whole text blocks, words become tokens."""

import dataclasses

import numpy as np
import pytest
import stand_ins

from sparse_lavida_jax import sequence
from sparse_lavida_jax.scenes import prompts, tasks, world
from sparse_lavida_jax.scenes.grammar import Layout
from sparse_lavida_jax.tags import NO_FEATURE


@pytest.fixture(scope="module")
def encoder():
    return stand_ins.encoder(stand_ins.settings())


def laid_out(example, encoder, **drops):
    return sequence.prompt_row(
        example.parts,
        text_mask_id=encoder.model.text_mask_id,
        codes_per_token=encoder.model.codes_per_token,
        **drops,
    )


def samples(task, count=25):
    return [tasks.sample(task, 0, index) for index in range(count)]


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("drops", [{}, {"drop_prompt": True, "drop_source": True}])
def test_positions_of_both_streams_and_the_response_fill_the_sequence(encoder, task, drops):
    for sample in samples(task):
        example = encoder.scene_example(sample)
        row = laid_out(example, encoder, **drops)
        response = row.response_position + np.arange(len(example.response))
        every = np.concatenate([row.position, row.source_position, response])
        np.testing.assert_array_equal(np.sort(every), np.arange(row.length))


@pytest.mark.parametrize("task", [name for name in tasks.TASKS if not tasks.TABLE[name].is_image])
def test_a_text_response_is_whole_blocks_and_ends(encoder, task):
    block, end = encoder.data.text_block_len, encoder.tokenizer.end_of_text_id
    for extra, sample in enumerate(samples(task)):
        example = encoder.scene_example(sample, extra_blocks=extra % 4)
        ids = example.response[:, 0]
        answer = encoder.tokenizer.encode(sample.answer)
        assert example.modality == "text"
        assert len(ids) % block == 0
        assert example.reach % block == 0
        assert ids[: len(answer)].tolist() == answer
        assert set(ids[len(answer) :].tolist()) == {end}
        # The sampler decodes up to the text block of the first end-of-text.
        assert example.reach - block <= len(answer) < example.reach <= len(ids)


def test_padding_ends_at_the_longest_answer_unless_the_answer_is_longer(encoder):
    longest = encoder.data.max_answer_len
    short = encoder.text_example("how many?", " 3", extra_blocks=99)
    assert len(short.response) == longest
    assert short.reach == encoder.data.text_block_len
    long = encoder.text_example("count", " 3" * 20, extra_blocks=99)
    assert len(long.response) == long.reach == 24 > longest


def test_a_full_block_is_followed_by_one_that_ends_it(encoder):
    example = encoder.text_example("count", " 3" * encoder.data.text_block_len)
    assert example.reach == len(example.response) == 2 * encoder.data.text_block_len


@pytest.mark.parametrize("task", ["infill", "constrained_caption"])
def test_given_words_become_exactly_their_tokens(encoder, task):
    seen = 0
    for sample in samples(task, 60):
        example = encoder.scene_example(sample)
        given = np.flatnonzero(example.given)
        words = [sample.answer[slice(*span)] for span in sample.given]
        expected = [id for word in words for id in encoder.tokenizer.encode(word)]
        assert example.response[given, 0].tolist() == expected
        seen += len(given)
    assert seen > 60


def test_without_given_spans_nothing_is_given(encoder):
    for task in ("answer", "layout", "draw", "edit"):
        assert not any(encoder.scene_example(sample).given.any() for sample in samples(task))


def test_an_edit_may_keep_what_its_layout_does_not_name(encoder):
    for sample in samples("edit"):
        example = encoder.scene_example(sample, keeps=True)
        named = np.zeros(world.NUM_CELLS, bool)
        named[list(Layout.parse(sample.layout).appearances)] = True
        np.testing.assert_array_equal(example.given, ~named)
        source = encoder.scene_codes(sample.image)
        np.testing.assert_array_equal(example.response[example.given], source[example.given])


def test_an_edit_is_sampled_as_it_was_trained(encoder):
    data = dataclasses.replace(encoder.data, edit_keeps=0.5)
    keeping = prompts.ScenePrompts(dataclasses.replace(encoder, data=data))
    codes = np.zeros((world.NUM_CELLS, 1), np.int32)
    how = "remove the red circle", codes, world.render(world.EMPTY_SCENE), None
    layout = " nothing<LOC_0><LOC_0><LOC_4><LOC_4>"
    np.testing.assert_array_equal(np.flatnonzero(~keeping.change(*how, layout).given), [0])
    assert not prompts.ScenePrompts(encoder).change(*how, layout).given.any()
    for none in (None, "", " a red", " red circle<LOC_0><LOC_0><LOC_4><LOC_4>"):
        assert not keeping.change(*how, none).given.any()


@pytest.mark.parametrize("task", ["inpaint", "outpaint"])
def test_known_cells_are_given(encoder, task):
    for sample in samples(task):
        example = encoder.scene_example(sample)
        np.testing.assert_array_equal(example.given, sample.known)
        known = np.array(sample.image.cells)[example.given]
        np.testing.assert_array_equal(example.response[example.given, 0], known)


def test_an_image_example_holds_image_source_prompt_layout_and_response_in_order(encoder):
    (sample,) = samples("edit", 1)
    example = encoder.scene_example(sample)
    t = encoder.tokenizer
    kinds = [type(part).__name__ for part in example.parts]
    assert kinds == [
        "Text", "VisionTokens", "Source", "Text", "Text", "Text", "Response", "Text",
    ]  # fmt: skip
    texts = [part.ids.tolist() for part in example.parts if isinstance(part, sequence.Text)]
    assert texts == [
        [t.user_id], t.encode(sample.prompt), [t.end_of_turn_id, t.assistant_id],
        t.encode(sample.layout), [t.end_of_turn_id],
    ]  # fmt: skip
    assert example.modality == "image"
    np.testing.assert_array_equal(example.response[:, 0], sample.target.cells)
    np.testing.assert_array_equal(example.parts[2].codes[:, 0], sample.image.cells)
    side = encoder.model.vision.image_size
    np.testing.assert_array_equal(example.pixels, world.render(sample.image, side))
    without = encoder.scene_example(sample, with_layout=False)
    assert [type(part).__name__ for part in without.parts] == [*kinds[:5], "Response", "Text"]


def test_a_dropped_prompt_keeps_headers_and_nothing_else(encoder):
    (sample,) = samples("edit", 1)
    t, mask = encoder.tokenizer, encoder.model.text_mask_id
    whole = laid_out(encoder.scene_example(sample), encoder)
    dropped = laid_out(encoder.scene_example(sample), encoder, drop_prompt=True, drop_source=True)
    headers = [t.user_id, t.end_of_turn_id, t.assistant_id, t.end_of_turn_id]
    assert [id for id in dropped.ids.tolist() if id != mask] == headers
    assert (dropped.feature == NO_FEATURE).all()
    assert len(dropped.codes) == 0
    assert (dropped.length, dropped.response_position) == (whole.length, whole.response_position)
    # Headers keep their positions.
    where = dict(zip(whole.position.tolist(), whole.ids.tolist(), strict=True))
    for position, id in zip(dropped.position.tolist(), dropped.ids.tolist(), strict=True):
        assert id == mask or where[position] == id


# ---------------------------------------------------------------------------------------------
# Whole sequences.


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_whole_sequence_stands_where_the_example_does(encoder, task):
    for sample in samples(task):
        example = encoder.scene_example(sample)
        made = encoder.sequence(example)
        row = laid_out(example, encoder)
        whole = sequence.prompt_row(
            made.parts,
            text_mask_id=encoder.model.text_mask_id,
            codes_per_token=encoder.model.codes_per_token,
        )
        assert whole.length == made.length == row.length
        np.testing.assert_array_equal(whole.source_position, row.source_position)
        tokens = dict(zip(row.position.tolist(), row.ids.tolist(), strict=True))
        place = row.response_position + np.arange(len(example.response))
        if example.modality == "text":
            tokens |= dict(zip(place.tolist(), example.response[:, 0].tolist(), strict=True))
            assert len(made.codes) == 0
        else:
            assert whole.response_position == row.response_position
            np.testing.assert_array_equal(made.codes, example.response)
        assert dict(zip(whole.position.tolist(), whole.ids.tolist(), strict=True)) == tokens
        assert (len(made.views) == 1) == (example.pixels is not None)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_everything_after_the_assistant_token_is_answered_but_what_is_given(encoder, task):
    for sample in samples(task):
        example = encoder.scene_example(sample)
        row = sequence.prompt_row(
            encoder.sequence(example).parts, text_mask_id=1, codes_per_token=1, drop_prompt=True
        )
        (assistant,) = laid_out(example, encoder).position[
            laid_out(example, encoder).ids == encoder.tokenizer.assistant_id
        ]
        given = np.zeros(row.length, bool)
        if example.modality == "text":
            start = laid_out(example, encoder).response_position
            given[start : start + len(example.given)] = example.given
        expected = (row.position > assistant) & ~given[row.position]
        np.testing.assert_array_equal(row.is_answer, expected)
        np.testing.assert_array_equal(row.ids == 1, row.position <= assistant)


def test_a_blind_model_is_shown_an_empty_scene(encoder):
    blind = dataclasses.replace(encoder, data=dataclasses.replace(encoder.data, blind=True))
    empty = encoder.seen(world.EMPTY_SCENE)
    for task in ("answer", "name", "edit"):
        for sample in samples(task, 5):
            open_eyed, closed = (each.scene_example(sample) for each in (encoder, blind))
            np.testing.assert_array_equal(closed.pixels, empty)
            assert not np.array_equal(open_eyed.pixels, empty)
            np.testing.assert_array_equal(closed.response, open_eyed.response)
    shown = world.render(samples("answer", 1)[0].image)
    asked = prompts.ScenePrompts(blind).ask("how many circles are there?", (shown,), 8)
    np.testing.assert_array_equal(asked.pixels, empty)
