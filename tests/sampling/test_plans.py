# SPDX-License-Identifier: Apache-2.0
"""Plans, their phases and text plans, compared with positions written out by hand."""

import dataclasses
import functools

import numpy as np
import pytest

from sparse_lavida_jax import orders
from sparse_lavida_jax.sampling import plans, presets


def plan_2x2(given=None):
    cells = np.array([3, 1, 0, 2], np.int32)
    return plans.image_plan(cells, schedule="linear", num_steps=2, shift=1.0, given=given)


def test_plan_follows_the_order():
    plan = plan_2x2()
    assert plan.decode.tolist() == [[[3, 1]], [[0, 2]]]
    assert plan.decoded_at.tolist() == [[3, 2, 3, 2]]
    assert plan.block[0] == 2


def test_a_given_cell_is_block_1_and_decoding_starts_at_block_2_in_every_row():
    given = np.array([[False, False, False, True], [False] * 4, [True, False, True, True]])
    plan = plan_2x2(given)
    assert plan.block[0] == 2
    assert plan.decoded_at.tolist() == [[2, 2, 3, 1], [3, 2, 3, 2], [1, 2, 1, 1]]
    assert plan.decode[:, 0].tolist() == [[1, 0], [2, -1]]
    assert plan.decode[:, 1].tolist() == [[3, 1], [0, 2]]
    assert plan.decode[:, 2].tolist() == [[1, -1], [-1, -1]]


def test_a_plan_with_everything_given_has_no_steps():
    plan = plan_2x2(np.ones((1, 4), bool))
    assert plan.num_steps == 0
    assert plans.phases(plan, passes_clean="newest", passes_rest=False) == []


def test_phase_of_the_sparse_sampler_passes_the_step_before():
    (phase,) = plans.phases(plan_2x2(), passes_clean="newest", passes_rest=False, max_phases=1)
    assert phase.block.tolist() == [2, 3]
    assert phase.clean.tolist() == [[[-1, -1]], [[1, 3]]]
    assert phase.decode.tolist() == [[[3, 1]], [[0, 2]]]
    assert phase.rest.shape == (2, 1, 0)
    assert phase.count.tolist() == [[2], [2]]


def test_phase_without_truncation_passes_what_is_still_masked():
    plan = plans.image_plan(np.arange(4), schedule="linear", num_steps=4, shift=1.0)
    (phase,) = plans.phases(plan, passes_clean="all", passes_rest=True, max_phases=1, buckets=(3,))
    assert phase.clean[:, 0].tolist() == [[-1, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert phase.rest[:, 0].tolist() == [[1, 2, 3], [2, 3, -1], [3, -1, -1], [-1, -1, -1]]


def test_a_kernel_that_copies_eight_tokens_at_a_time_gets_steps_of_multiples_of_eight():
    (phase,) = plans.phases(plan_2x2(), passes_clean="newest", passes_rest=False, max_phases=1)
    phase = dataclasses.replace(phase, registers=3)
    wide = plans.in_groups(phase, 8)
    parts = wide.clean, wide.decode, wide.rest
    assert sum(part.shape[-1] for part in parts) + 3 == 8 == wide.width
    assert wide.rest.shape[-1] == 1
    assert (wide.rest[..., phase.rest.shape[-1] :] == plans.PAD_POSITION).all()
    assert plans.in_groups(wide, 8) is wide and plans.in_groups(phase, 1) is phase


def test_the_largest_image_takes_few_phases_with_little_padding():
    parts = plans.phases(largest_plan(), passes_clean="newest", passes_rest=False)
    assert len(parts) <= 7
    slots = sum(part.decode[:, 0].size + part.clean[:, 0].size for part in parts)
    tokens = 1024 + 1024 - orders.counts("shift", 64, 1024, 5.0)[-1]
    assert slots < 1.5 * tokens


def plain_bucket(width, buckets):
    return min(one for one in (0, *buckets) if one >= width)


def plain_cuts(widths, buckets, max_phases, padding):
    """Bounds of phases from their definition in `plans.phases`, one cut after the other."""

    @functools.cache
    def cost(start, stop):
        widest = [max(of_steps) for of_steps in zip(*widths[start:stop], strict=True)]
        return (stop - start) * sum(plain_bucket(width, buckets) for width in widest)

    ways, whole = {0: (0, [])}, []  # by the steps they hold: the cheapest with so many phases
    for _ in range(max_phases):
        longer = {}
        for stop in range(1, len(widths) + 1):
            starts = [(ways[i][0] + cost(i, stop), i) for i in ways if i < stop]
            if starts:
                total, start = min(starts)
                longer[stop] = total, [*ways[start][1], (start, stop)]
        ways = longer
        whole += [ways[len(widths)]] if len(widths) in ways else []
    enough = min(total for total, _ in whole) * (1 + padding)
    return next(bounds for total, bounds in whole if total <= enough)


def a_plan(rng, length):
    """A plan of one to three rows with any order, schedule and number of given cells."""
    given = rng.random((rng.integers(1, 4), length)) < rng.choice([0, 0.2, 0.8])
    given[0, 0] = False  # at least one step
    return plans.image_plan(
        np.stack([rng.permutation(length) for _ in given]).astype(np.int32),
        schedule=str(rng.choice([*orders.SCHEDULES])),
        num_steps=int(rng.integers(1, 13)),
        shift=float(rng.choice([1 / 3, 1, 5])),
        given=given,
        merge=int(rng.choice([0, 3])),
    )


def largest_plan():
    cells = orders.order("stratified", 32, 32, 42)
    return plans.image_plan(cells, schedule="shift", num_steps=64, shift=5.0)


@pytest.mark.parametrize("case", ["largest", *range(40)])
def test_phases_are_those_of_a_plain_search(case):
    """The arrays are those that a search in loops finds, position by position."""
    rng = np.random.default_rng(0 if case == "largest" else case)
    plan = largest_plan() if case == "largest" else a_plan(rng, int(rng.integers(1, 40)))
    newest, passes_rest = (bool(rng.integers(2)) for _ in range(2))
    how = {"max_phases": int(rng.integers(1, 8)), "padding": float(rng.choice([0, 0.03, 0.5]))}
    how["buckets"] = (plans.BUCKETS, presets.WIDE_BUCKETS, (3, 7, 50))[rng.integers(3)]
    if case == "largest":
        newest, passes_rest = True, False
        how = {"buckets": plans.BUCKETS, "max_phases": 7, "padding": 0.125}
    parts = plans.phases(
        plan, passes_clean="newest" if newest else "all", passes_rest=passes_rest, **how
    )
    at, blocks = plan.decoded_at.tolist(), plan.block.tolist()
    passed = {
        "clean": [
            [
                [
                    i
                    for i, own in enumerate(row)
                    if (own == now - 1 or not newest) and 2 <= own < now
                ]
                for row in at
            ]
            for now in blocks
        ],
        "decode": [[[i for i in row if i >= 0] for row in step] for step in plan.decode.tolist()],
        "rest": [
            [[i for i, own in enumerate(row) if own > now and passes_rest] for row in at]
            for now in blocks
        ],
    }
    widths = [
        tuple(max(map(len, step)) for step in of_step)
        for of_step in zip(*passed.values(), strict=True)
    ]
    bounds = plain_cuts(widths, how["buckets"], how["max_phases"], how["padding"])
    for part, (start, stop) in zip(parts, bounds, strict=True):
        assert part.block.tolist() == blocks[start:stop]
        assert part.count.tolist() == [
            [len(row) for row in one] for one in passed["decode"][start:stop]
        ]
        for name, of_steps in passed.items():
            own = of_steps[start:stop]
            width = plain_bucket(max(len(row) for step in own for row in step), how["buckets"])
            found = getattr(part, name)
            assert found.dtype == np.int32
            assert found.tolist() == [
                [row + [-1] * (width - len(row)) for row in step] for step in own
            ]


@pytest.mark.parametrize("case", range(10))
def test_phases_over_codes_are_those_of_a_plain_search(case):
    rng = np.random.default_rng(case)
    h, w, side = (int(rng.integers(1, 5)) for _ in range(3))
    cells = rng.random((2, h * w)) < 0.2
    cells[0, 0] = False
    plan, _ = code_plan(h, w, side, num_steps=int(rng.integers(1, 13)), given=cells)
    cell_of = np.arange(h * w).reshape(h, w).repeat(side, axis=0).repeat(side, axis=1).ravel()
    touched = [
        max(len({*cell_of[row == block].tolist()}) for row in plan.decoded_at)
        for block in plan.block
    ]
    parts = plans.code_phases(plan, h, w, side)
    bounds = plain_cuts([(width,) for width in touched], plans.BUCKETS, 7, 0.125)
    for part, (start, stop) in zip(parts, bounds, strict=True):
        assert part.block.tolist() == plan.block[start:stop].tolist()
        width = plain_bucket(max(touched[start:stop]), plans.BUCKETS)
        assert part.decode.shape[-1] == min(width, (~cells).sum(axis=1).max())


@pytest.mark.parametrize("clean_once", [True, False])
def test_passes_of_a_step_decode_codes_of_its_cells(clean_once):
    (whole,) = plans.phases(plan_2x2(), passes_clean="newest", passes_rest=False, max_phases=1)
    assert plans.in_passes([whole], 1, 2, clean_once=clean_once) == [whole]
    (part,) = plans.in_passes([whole], 2, 2, clean_once=clean_once)
    assert part.block.tolist() == [2, 2, 3, 3]
    assert part.decode.tolist() == [[[3, 1]], [[3, 1]], [[0, 2]], [[0, 2]]]
    diagonal = [True, False, False, True]
    assert part.candidates[0].tolist() == [[diagonal, diagonal]]
    assert (part.candidates[::2] != part.candidates[1::2]).all()
    again = [[-1, -1]] if clean_once else [[1, 3]]
    assert part.clean.tolist() == [[[-1, -1]], [[-1, -1]], [[1, 3]], again]
    (single,) = plans.in_passes([whole], 4, 2, clean_once=clean_once)
    assert single.candidates[:4, 0, 0].argmax(axis=-1).tolist() == [0, 3, 1, 2]


def test_a_step_wider_than_every_bucket_says_so():
    with pytest.raises(ValueError, match="holds 2 tokens, the widest bucket 1"):
        plans.phases(plan_2x2(), passes_clean="newest", passes_rest=False, buckets=(1,))


def test_text_blocks_pass_the_block_before_once():
    parts = plans.text_plan(6, 3, 2)
    assert [part.block.tolist() for part in parts] == [[2], [3], [4], [5]]
    assert [part.clean[:, 0].tolist() for part in parts] == [
        [[-1, -1, -1]], [[]], [[0, 1, 2]], [[]],
    ]  # fmt: skip
    assert [part.decode[0, 0].tolist() for part in parts] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2
    assert [part.count.tolist() for part in parts] == [[[2]], [[1]], [[2]], [[1]]]


def test_text_without_response_cache_and_truncation_passes_everything():
    first, second = plans.text_plan(6, 3, 2, passes_clean="all", passes_rest=True)
    assert first.clean.shape == (2, 1, 0)
    assert first.rest[:, 0].tolist() == [[3, 4, 5]] * 2
    assert second.clean[:, 0].tolist() == [[0, 1, 2]] * 2
    assert second.rest.shape == (2, 1, 0)


def test_a_single_text_block_is_one_phase():
    (part,) = plans.text_plan(4, 4, 3)
    assert part.clean.shape == (3, 1, 0)
    assert part.count.tolist() == [[2], [1], [1]]


def test_given_text_is_never_decoded_and_an_all_given_block_has_no_steps():
    given = np.zeros((2, 6), bool)
    given[:, :2] = True
    given[0, 3] = True
    parts = plans.text_plan(6, 2, 2, given)
    assert [part.block.tolist() for part in parts] == [[4], [5], [6], [7]]
    assert parts[0].decode[0].tolist() == [[2, -1], [2, 3]]
    assert parts[2].clean[0].tolist() == [[2, -1], [2, 3]]
    assert [part.count[0].tolist() for part in parts] == [[1, 1], [0, 1], [1, 1], [1, 1]]


def test_text_that_is_no_whole_number_of_blocks_is_refused():
    with pytest.raises(ValueError, match="Pad the response"):
        plans.text_plan(7, 3, 2)


def test_phases_are_cut_where_the_number_of_registers_changes():
    plan = plans.image_plan(np.arange(4), schedule="linear", num_steps=4, shift=1.0)
    parts = plans.phases(plan, passes_clean="all", passes_rest=True, max_phases=1)
    cut = plans.with_steps(parts, registers=np.array([4, 4, 2, 1]))
    assert [(part.num_steps, part.registers) for part in cut] == [(2, 4), (1, 2), (1, 1)]


def test_a_block_order_holds_every_text_block_once():
    with pytest.raises(ValueError, match="each of the 3 text blocks once"):
        plans.text_plan(6, 2, 2, block_order=[0, 2, 2])


def test_text_blocks_decoded_before_are_clean_wherever_they_stand():
    parts = plans.text_plan(6, 2, 1, passes_clean="all", passes_rest=True, block_order=[1, 2, 0])
    assert [part.decode[0, 0].tolist() for part in parts] == [[2, 3], [4, 5], [0, 1]]
    assert [part.clean[0, 0].tolist() for part in parts] == [[], [2, 3], [2, 3, 4, 5]]
    assert [part.rest[0, 0].tolist() for part in parts] == [[0, 1, 4, 5], [0, 1], []]
    assert [part.block.tolist() for part in parts] == [[2], [3], [4]]


def test_phases_are_cut_where_guidance_begins_or_ends():
    plan = plans.image_plan(np.arange(6), schedule="linear", num_steps=6, shift=1.0)
    parts = plans.phases(plan, passes_clean="all", passes_rest=True, max_phases=1)
    guided = np.array([False, True, True, False, False, False, True])
    share = np.arange(7, dtype=np.float32)
    cut = plans.with_steps(parts, guided=guided, noise=share, temperature=share + 10)
    assert [part.guided for part in cut] == [False, True, False]
    assert [part.block.tolist() for part in cut] == [[2], [3, 4], [5, 6, 7]]
    assert np.concatenate([part.noise for part in cut]).tolist() == list(range(6))
    assert cut[1].temperature.tolist() == [11, 12]
    np.testing.assert_array_equal(np.concatenate([part.decode for part in cut]), parts[0].decode)


def code_plan(h, w, side, *, num_steps, given=None):
    """A plan for every row over the codes of h x w cells, and which cells are given."""
    cells = np.zeros((2, h * w), bool) if given is None else given
    codes = np.repeat(cells.reshape(2, h, w), side, axis=1).repeat(side, axis=2)
    return plans.image_plan(
        orders.order("random", h * side, w * side, 3),
        schedule="shift",
        num_steps=num_steps,
        shift=5.0,
        given=codes.reshape(2, -1),
    ), cells


@pytest.mark.parametrize(("h", "w", "side"), [(4, 4, 2), (3, 5, 2), (4, 3, 1)])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_every_step_passes_all_cells_and_commits_the_codes_of_the_plan(h, w, side, share):
    given = np.random.default_rng(0).random((2, h * w)) < share
    plan, given = code_plan(h, w, side, num_steps=7, given=given)
    parts = plans.code_phases(plan, h, w, side)
    most = (~given).sum(axis=1).max()
    for part in parts:
        for i, block in enumerate(part.block):
            assert part.decode.shape[-1] + part.rest.shape[-1] == most
            for row in range(2):
                passed = np.concatenate([part.decode[i, row], part.rest[i, row]])
                assert sorted(passed[passed >= 0]) == np.flatnonzero(~given[row]).tolist()
                codes = {
                    (cell // w * side + j // side) * (w * side) + cell % w * side + j % side
                    for cell, chosen in zip(
                        part.decode[i, row], part.candidates[i, row], strict=True
                    )
                    for j in np.flatnonzero(chosen)
                }
                assert codes == set(np.flatnonzero(plan.decoded_at[row] == block))
                assert part.count[i, row] == len(codes)
    assert sum(part.num_steps for part in parts) == plan.num_steps
    assert all(part.clean.shape[-1] == 0 for part in parts)


def test_the_largest_image_predicts_few_of_the_cells_it_passes():
    plan = plans.image_plan(
        orders.order("stratified", 64, 64, 42), schedule="shift", num_steps=64, shift=5.0
    )
    parts = plans.code_phases(plan, 32, 32, 2)
    assert len(parts) <= 7
    assert {part.decode.shape[-1] + part.rest.shape[-1] for part in parts} == {1024}
    assert sum(part.decode.size for part in parts) < 64 * 1024 / 6


def test_by_confidence_every_code_is_a_candidate_of_every_step():
    plan, given = code_plan(2, 3, 2, num_steps=5)
    (part,) = plans.code_phases(plan, 2, 3, 2, by_confidence=True)
    assert part.decode.tolist() == [[list(range(6))] * 2] * 5
    assert part.candidates.shape == (5, 2, 6, 4)
    assert part.candidates.all()
    assert part.count[:, 0].tolist() == orders.counts("shift", 5, 24, 5.0).tolist()
    given = ~given
    given[0, 2] = False
    plan, _ = code_plan(2, 3, 2, num_steps=5, given=given)
    (part,) = plans.code_phases(plan, 2, 3, 2, by_confidence=True)
    assert part.decode[0].tolist() == [[2], [-1]]
    assert part.count[:, 0].sum() == 4
    assert not part.count[:, 1].any()


def test_nothing_left_to_decode_is_no_phase():
    plan, _ = code_plan(2, 2, 2, num_steps=3, given=np.ones((2, 4), bool))
    assert plans.code_phases(plan, 2, 2, 2) == []
    assert plans.code_phases(plan, 2, 2, 2, by_confidence=True) == []


def test_a_text_block_follows_a_schedule_of_its_own_masked_tokens():
    given = np.zeros((2, 8), bool)
    given[1, :5] = True
    parts = plans.text_plan(8, 8, 4, given, schedule="shift", shift=3.0)
    counts = np.concatenate([part.count for part in parts])
    assert counts[:, 0].tolist() == orders.counts("shift", 4, 8, 3.0).tolist()
    assert counts[:, 1].tolist() == [*orders.counts("shift", 4, 3, 3.0), 0]


def test_the_dual_cache_keeps_everything_outside_the_text_block():
    parts = plans.text_plan(6, 2, 2, passes_clean="all", refreshes=True, given_in_steps=True)
    assert [part.refreshes for part in parts] == [True, False] * 3
    assert [part.clean[0, 0].tolist() for part in parts[::2]] == [
        [2, 3, 4, 5], [0, 1, 4, 5], [0, 1, 2, 3],
    ]  # fmt: skip
    assert all(part.clean.shape[-1] == 0 for part in parts[1::2])
    assert all(part.rest.shape[-1] == 0 for part in parts)
    assert [part.decode[0, 0].tolist() for part in parts[1::2]] == [[0, 1], [2, 3], [4, 5]]


def test_the_prefix_cache_keeps_what_stands_before_the_text_block():
    parts = plans.text_plan(6, 2, 2, passes_clean="all", refreshes=True, passes_rest=True)
    assert [part.clean[0, 0].tolist() for part in parts] == [[], [], [0, 1], [], [0, 1, 2, 3], []]
    assert [part.rest[0, 0].tolist() for part in parts] == [
        [2, 3, 4, 5], [2, 3, 4, 5], [4, 5], [4, 5], [], [],
    ]  # fmt: skip


def test_given_text_is_passed_where_it_is_not_in_the_prompt():
    given = np.array([[False, True, False, False, True, True]])
    options = {"passes_clean": "all", "passes_rest": True}
    first, second = plans.text_plan(6, 2, 2, given, given_in_steps=True, **options)
    assert first.decode[0, 0].tolist() == [0, 1]
    assert first.rest[0, 0].tolist() == [2, 3, 4, 5]
    assert first.count[:, 0].tolist() == [1]
    assert second.clean[0, 0].tolist() == [0, 1]
    assert second.rest[0, 0].tolist() == [4, 5]


def test_leftovers_of_earlier_text_blocks_stay_candidates():
    parts = plans.text_plan(4, 2, 2, leftovers=True)
    assert [part.decode[0, 0].tolist() for part in parts] == [[0, 1, 2, 3]] * 2
    assert [part.candidates[0, 0, :, 0].tolist() for part in parts] == [
        [True, True, False, False], [True] * 4,
    ]  # fmt: skip
    assert [part.count[:, 0].tolist() for part in parts] == [[1, 1]] * 2
