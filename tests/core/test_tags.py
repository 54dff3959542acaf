# SPDX-License-Identifier: Apache-2.0
"""Tags, and prompts laid out with and without what guidance drops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lavida_jax import sequence
from sparse_lavida_jax.sequence import Blank, LearnedText, Response, Source, Text, VisionTokens
from sparse_lavida_jax.tags import (
    NO_EMBEDDING,
    NO_FEATURE,
    concatenate,
    make_tags,
    without_blocks,
)
from sparse_lavida_jax.visibility import PAD_BLOCK, PAD_HORIZON, visible

MASK = 1
CODES = np.arange(8).reshape(2, 4)
PARTS = (
    Text(np.array([2]), keep=True),
    VisionTokens(3),
    Source(CODES),
    Text(np.array([10, 11])),
    Text(np.array([3]), keep=True),
    Response(5),
    Text(np.array([4]), keep=True),
)


def row(parts=PARTS, **drops):
    return sequence.prompt_row(parts, text_mask_id=MASK, codes_per_token=4, **drops)


def tags(block, last_clean):
    return make_tags(np.arange(block.size).reshape(block.shape), block, last_clean)


def test_horizon_is_the_own_block_or_the_last_clean_one():
    made = tags(np.array([[0, 1, 2, 3, 4, PAD_BLOCK]]), 2)
    np.testing.assert_array_equal(made.horizon, [[0, 1, 2, 2, 2, PAD_HORIZON]])
    np.testing.assert_array_equal(made.position, [[0, 1, 2, 3, 4, 0]])


def test_host_arrays_stay_on_the_host_and_device_arrays_on_the_device():
    block = np.array([[0, 1]])
    on_host, on_device = tags(block, 1), make_tags(*map(jnp.asarray, (block, block)), 1)
    assert all(type(x) is np.ndarray and x.dtype == np.int32 for x in jax.tree.leaves(on_host))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(on_device))
    np.testing.assert_array_equal(on_host.horizon, on_device.horizon)


def test_a_later_response_sees_an_earlier_one_only_clean():
    """Two responses in a sequence: block numbers continue, clean ones first, each with its own M.

    Prompt 0; first response clean 1, masked 3; second response clean 2, masked 4.
    """
    block = np.array([[0, 1, 3, 2, 4]])
    made = tags(block, np.array([[2, 1, 1, 2, 2]]))
    mask = visible(*(jnp.asarray(x) for x in (made.block.T, made.horizon.T, made.block)))
    first_masked, second_clean, second_masked = 2, 3, 4
    np.testing.assert_array_equal(mask[first_masked], [True, True, True, False, False])
    np.testing.assert_array_equal(mask[second_clean], [True, True, False, True, False])
    np.testing.assert_array_equal(mask[second_masked], [True, True, False, True, True])


def test_without_blocks_puts_all_but_padding_in_block_0():
    made = without_blocks(tags(np.array([[0, 3, 7, PAD_BLOCK]]), 2))
    np.testing.assert_array_equal(made.block, [[0, 0, 0, PAD_BLOCK]])
    np.testing.assert_array_equal(made.horizon, [[0, 0, 0, PAD_HORIZON]])
    np.testing.assert_array_equal(made.position, [[0, 1, 2, 0]])


def test_concatenated_tags_stand_one_after_the_other():
    first, second = tags(np.array([[0, 1]]), 1), tags(np.array([[2, PAD_BLOCK, 3]]), 2)
    both = concatenate(first, second)
    assert both.shape == (1, 5)
    np.testing.assert_array_equal(both.block, [[0, 1, 2, PAD_BLOCK, 3]])
    np.testing.assert_array_equal(both.horizon, [[0, 1, 2, PAD_HORIZON, 2]])
    np.testing.assert_array_equal(both.position, [[0, 1, 0, 0, 2]])


def test_prompt_row_gives_each_part_its_place():
    made = row()
    np.testing.assert_array_equal(made.ids, [2, MASK, MASK, MASK, 10, 11, 3, 4])
    np.testing.assert_array_equal(made.feature, [-1, 0, 1, 2, -1, -1, -1, -1])
    np.testing.assert_array_equal(made.position, [0, 1, 2, 3, 6, 7, 8, 14])
    np.testing.assert_array_equal(made.codes, CODES)
    np.testing.assert_array_equal(made.cell, [0, 1])
    np.testing.assert_array_equal(made.source_position, [4, 5])
    assert (made.response_position, made.length) == (9, 15)


@pytest.mark.parametrize("drop_prompt", [False, True])
@pytest.mark.parametrize("drop_source", [False, True])
def test_dropping_moves_no_position(drop_prompt, drop_source):
    made = row(drop_prompt=drop_prompt, drop_source=drop_source)
    taken = np.concatenate([made.position, made.source_position])
    response = made.response_position + np.arange(5)
    assert sorted([*taken, *response]) == list(range(made.length))
    assert len(made.ids) == len(made.position) == len(made.feature)
    assert len(made.codes) == len(made.cell) == len(made.source_position)


def test_dropped_prompt_is_text_masks_without_features_and_keeps_its_headers():
    made = row(drop_prompt=True)
    np.testing.assert_array_equal(made.ids, [2, *[MASK] * 5, 3, 4])
    assert (made.feature == NO_FEATURE).all()
    np.testing.assert_array_equal(made.codes, CODES)


def test_dropped_source_cells_become_text_masks_at_their_positions():
    made = row(drop_source=True)
    moved = np.isin(made.position, [4, 5])
    assert moved.sum() == 2
    assert (made.ids[moved] == MASK).all()
    assert (made.feature[moved] == NO_FEATURE).all()
    assert made.codes.shape == (0, 4)


def test_features_are_counted_on_over_several_images():
    made = row((VisionTokens(2), Text(np.array([9])), VisionTokens(3), Response(1)))
    np.testing.assert_array_equal(made.feature, [0, 1, -1, 2, 3, 4])


def test_tokens_of_an_image_may_be_any_of_its_features():
    """The second image's features follow all of the first one's, used or not."""
    first = VisionTokens(4, np.array([0, 2, 5, 5]), 6)
    parts = (first, VisionTokens(2), VisionTokens(1, np.array([1]), 2))
    made = row((*parts, Response(1)))
    np.testing.assert_array_equal(made.feature, [0, 2, 5, 5, 6, 7, 9])
    assert made.length == 8
    assert (row((*parts, Response(1)), drop_prompt=True).feature == NO_FEATURE).all()


@pytest.mark.parametrize(
    ("num_tokens", "index", "num_features"),
    [(2, [0, 1, 2], 3), (2, [0, 3], 3), (2, [-1, 0], 3), (3, None, 2)],
)
def test_features_that_an_image_does_not_have_are_refused(num_tokens, index, num_features):
    index = None if index is None else np.array(index)
    with pytest.raises(ValueError, match="name one for each token, all of the image"):
        VisionTokens(num_tokens, index, num_features)


@pytest.mark.parametrize("responses", [0, 2])
def test_a_prompt_without_exactly_one_response_is_refused(responses):
    with pytest.raises(ValueError, match="exactly one Response, got"):
        row((Text(np.array([9])), *[Response(2)] * responses))


@pytest.mark.parametrize("side", [1, 2])
def test_cells_hold_the_codes_of_their_square(side):
    height, width = 3, 2
    codes = np.arange(2 * height * width * side**2).reshape(2, height * side, width * side)
    cells = sequence.cells_from_codes(codes, side)
    assert cells.shape == (2, height * width, side**2)
    for b, y, x, p, q in itertools.product(
        range(2), range(height), range(width), range(side), range(side)
    ):
        assert cells[b, y * width + x, p * side + q] == codes[b, y * side + p, x * side + q]
    np.testing.assert_array_equal(sequence.codes_from_cells(cells, height, side), codes)


def test_a_row_without_an_image_gets_a_blank_one():
    image = np.full((2, 2, 3), 9, np.uint8)
    np.testing.assert_array_equal(
        sequence.stack_images([None, image]), np.stack([np.zeros_like(image), image])
    )
    assert sequence.stack_images([None, None]) is None


# ---------------------------------------------------------------------------------------------
# Whole sequences.


@pytest.mark.parametrize("drop_prompt", [False, True])
def test_answers_are_never_dropped_and_blanks_become_masks(drop_prompt):
    parts = (
        Text(np.array([9])),
        LearnedText(np.array([10, 11])),
        Response(1),
        LearnedText(np.array([12])),
        Blank(2),
    )
    made = row(parts, drop_prompt=drop_prompt)
    np.testing.assert_array_equal(made.ids, [MASK if drop_prompt else 9, 10, 11, 12, MASK, MASK])
    np.testing.assert_array_equal(made.is_answer, [False, True, True, True, False, False])
    blank = NO_FEATURE if drop_prompt else NO_EMBEDDING
    np.testing.assert_array_equal(made.feature, [*[NO_FEATURE] * 4, blank, blank])
    np.testing.assert_array_equal(made.position, [0, 1, 2, 4, 5, 6])
    assert made.length == sum(map(sequence.num_tokens, parts)) == 7


def test_views_are_filled_up_to_those_of_the_longest_row():
    first, second, third = (np.full((n, 2, 2, 3), n, np.uint8) for n in (1, 2, 4))
    made = sequence.stack_views([(first, second), (), (third,)])
    np.testing.assert_array_equal(made[:, :, 0, 0, 0], [[1, 2, 2, 0], [0] * 4, [4] * 4])
    assert sequence.stack_views([(), ()]) is None


@pytest.mark.parametrize("newline", [False, True])
def test_stacked_features_are_those_of_the_same_place_in_the_same_view(newline):
    """The expected features are written out: (image, view, place), and the newlines."""
    views, most, per_view = (2, 1, 3), 8, 4
    own, seen, view = [], [], 0
    for count in views:
        own += [(view + v, place) for v in range(count) for place in range(per_view)]
        own += ["newline"] * newline
        view += count
    seen = [(v, place) for v in range(most) for place in range(per_view)] + ["newline"] * newline
    feature = np.array([NO_EMBEDDING, *range(len(own)), NO_FEATURE])
    moved = sequence.stacked_features(feature, views, most, per_view, newline=newline)
    assert moved[0] == NO_EMBEDDING and moved[-1] == NO_FEATURE
    assert [seen[index] for index in moved[1:-1]] == own
    none = np.full(2, NO_FEATURE)
    np.testing.assert_array_equal(sequence.stacked_features(none, (), 3, 4, newline=newline), none)
