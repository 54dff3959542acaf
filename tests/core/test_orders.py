# SPDX-License-Identifier: Apache-2.0
"""Orders and schedules equal their published values."""

import hashlib

import numpy as np
import pytest

from sparse_lavida_jax import config, orders

SHIFT_5_OF_64_STEPS = """
13 14 13 14 15 15 15 15 16 17 17 17 18 19 19 19 21 21 21 23 23 24 25 25 27 28 28 30 31 32 33 35
36 38 40 41 44 45 48 49 53 55 59 61 65 69 73 77 83 88 94 101 109 116 126 137 148 162 177 195 216
240 267 301
"""


@pytest.mark.parametrize(
    ("side", "digest"),
    [
        (64, "33f811cc0a6123ff104baea0c3ffc6c0682ebe2565a6bb9213c39133eff83721"),
        (32, "4c8b92d3af6548a33e37238ad91a89c5929f2bd3a48b7bffb86a59507928011b"),
    ],
)
def test_stratified_order_is_the_released_one(side, digest):
    listed = ",".join(str(cell) for cell in orders.stratified(side, side, 42))
    assert hashlib.sha256(listed.encode()).hexdigest() == digest


def test_stratified_order_puts_one_cell_in_every_tile():
    y, x = np.divmod(orders.stratified(16, 16, 7), 16)
    for tiles in (2, 4, 8):
        size = 16 // tiles
        tile = (y // size * tiles + x // size)[: tiles**2]
        np.testing.assert_array_equal(np.sort(tile), np.arange(tiles**2))


def test_halton_starts_with_its_first_points():
    """Points (1/2, 1/3), (1/4, 2/3), (3/4, 1/9), (1/8, 4/9) in cells of 1/8 by 1/9."""
    first = [(4, 3), (2, 6), (6, 1), (1, 4)]
    assert orders.halton(9, 8)[:4].tolist() == [y * 8 + x for x, y in first]


def test_random_order_depends_on_its_seed_only():
    a, b = orders.random_order(5, 7, 1), orders.random_order(5, 7, 1)
    np.testing.assert_array_equal(a, b)
    assert (a != orders.random_order(5, 7, 2)).any()


def test_raster_is_reading_order():
    assert orders.order("raster", 2, 3, 0).tolist() == [0, 1, 2, 3, 4, 5]


def test_unknown_order_lists_the_known_ones():
    with pytest.raises(ValueError, match="stratified, halton, random, raster"):
        orders.order("spiral", 4, 4, 0)


def test_the_configuration_offers_every_order_schedule_and_way_to_cool():
    """`config` imports nothing from the package, so it repeats the names."""
    offered = {
        (config.Sampling, "order"): [*orders.ORDERS, "confidence"],
        (config.Sampling, "schedule"): orders.SCHEDULES,
        (config.TextSampling, "schedule"): ["even", *orders.SCHEDULES],
        (config.ReleasedSampling, "temperature_schedule"): orders.COOLING,
        (config.ReleasedSampling, "guidance_schedule"): orders.COOLING,
        (config.ReleasedSampling, "confidence_noise_schedule"): orders.COOLING,
    }
    for (section, field), names in offered.items():
        with pytest.raises(config.ConfigError, match=f"choose one of {', '.join(names)}"):
            section(**{field: "none of them"})


def test_order_of_an_empty_grid_is_refused():
    with pytest.raises(ValueError, match="0 x 4"):
        orders.order("raster", 0, 4, 0)


def test_a_cached_order_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        orders.order("halton", 3, 3, 0)[0] = 8


def test_shift_schedule_is_the_released_one():
    expected = [int(n) for n in SHIFT_5_OF_64_STEPS.split()]
    assert orders.counts("shift", 64, 4096, 5.0).tolist() == expected


def test_linear_schedule_splits_evenly():
    assert orders.counts("linear", 4, 8, 1.0).tolist() == [2, 2, 2, 2]


def test_more_steps_than_tokens_is_one_token_a_step():
    assert orders.counts("cosine", 50, 5, 1.0).tolist() == [1] * 5


@pytest.mark.parametrize("schedule", orders.SCHEDULES)
@pytest.mark.parametrize("length", [1, 2, 36, 1024, 10_000, 65_536])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 64])
def test_no_step_is_empty_and_every_token_has_its_step(schedule, length, num_steps):
    per_step = orders.counts(schedule, num_steps, length, 3.0)
    assert len(per_step) == min(num_steps, length)
    assert per_step.min() >= 1
    assert per_step.sum() == length


def test_merged_steps_decode_at_least_so_many_tokens():
    per_step = orders.counts("shift", 64, 1024, 5.0)
    fewer = orders.merged(per_step, 16)
    assert len(fewer) == 35 and fewer.min() >= 16
    assert np.cumsum(fewer)[-1] == 1024
    assert set(np.cumsum(fewer)) <= set(np.cumsum(per_step))  # only neighbours are merged
    np.testing.assert_array_equal(orders.merged(per_step, 0), per_step)
    assert orders.merged(per_step, 5000).tolist() == [1024]
    assert orders.merged(np.array([3, 3, 1], np.int32), 3).tolist() == [3, 4]
    assert orders.merged(per_step[:0], 4).tolist() == []


def test_unknown_schedule_lists_the_known_ones():
    with pytest.raises(ValueError, match="shift, cosine, cosine2, exp, logit_normal, linear"):
        orders.counts("quadratic", 4, 8, 1.0)


def test_zero_steps_are_refused():
    with pytest.raises(ValueError, match="num_steps=0"):
        orders.counts("shift", 0, 8, 1.0)


# ---------------------------------------------------------------------------------------------
# As released.

# SHA-256 of the counts from the released formula in PyTorch 2.6, for every length, number of steps
# and shift below, as little-endian int32.
LENGTHS, MOST_STEPS, SHIFTS = (49, 256, 1024, 4096), 128, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
DIGESTS = {
    "shift": "e9caa3fd96c23193",
    "cosine": "30cbe14be8c35abe",
    "cosine2": "1eaae348e29fa9ed",
    "exp": "b23aff37d02a34c7",
    "logit_normal": "30d491ce3589ca63",
    "linear": "ed3c4d142f045d14",
}


def every_count(schedule, counts):
    shifts = SHIFTS if schedule == "shift" else SHIFTS[:1]
    for length in LENGTHS:
        for steps in range(1, MOST_STEPS + 1):
            for shift in shifts:
                yield np.array(counts(schedule, steps, length, shift), "<i4")


@pytest.mark.parametrize("schedule", DIGESTS)
def test_no_step_is_a_token_longer_or_shorter_than_released(schedule):
    """With float64 instead of float32, some schedules were."""
    ours = b"".join(map(bytes, every_count(schedule, orders.counts)))
    assert hashlib.sha256(ours).hexdigest()[:16] == DIGESTS[schedule]


@pytest.mark.parametrize("schedule", DIGESTS)
def test_the_counts_are_those_of_pytorch(schedule):
    torch = pytest.importorskip("torch", reason="compares with PyTorch: pip install torch")
    shares = {
        "shift": lambda t, shift: shift * t / (1 + (shift - 1) * t),
        "cosine": lambda t, _: 1 - 0.5 * (1 + torch.cos(np.pi * t)),
        "cosine2": lambda t, _: torch.cos(np.pi * (1 - t) / 2),
        "exp": lambda t, _: ((1 - torch.exp(-5 * t)) / (1 - np.exp(-5))).clamp(1e-4, 1),
        "logit_normal": lambda t, _: 0.5 * (1 + torch.erf(torch.logit(t) / 2**0.5)),
        "linear": lambda t, _: t,
    }

    def released(schedule, steps, length, shift):
        steps = min(steps, length)
        time = torch.linspace(0, 1, steps + 1)
        cumulated = (shares[schedule](time, shift) * length).long()
        count = (cumulated[1:] - cumulated[:-1]).clamp(min=1).tolist()
        i = 0
        while sum(count) > length:
            count[i] -= count[i] > 1
            i = (i + 1) % steps
        return count[::-1]

    for ours, theirs in zip(
        every_count(schedule, orders.counts), every_count(schedule, released), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_schedule_is_rounded_as_the_release_rounds_it():
    """In float32, factor by factor; in another order a shift of 1/3 would lose a token."""
    assert orders.counts("shift", 8, 16, 1 / 3).tolist() == [5, 3, 3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("name", orders.COOLING)
def test_temperatures_fall_from_one_to_their_least(name):
    left = orders.cooling(name, 9, 0.25, 5.0)
    assert left[0] == pytest.approx(1.0, abs=1e-6)
    assert left[-1] == (1.0 if name == "constant" else pytest.approx(0.25, abs=1e-3))
    assert (np.diff(left) <= 0).all()
    assert orders.cooling(name, 1, 0.25, 5.0).tolist() == [1.0]


def test_an_exponential_temperature_is_that_of_the_schedule():
    """The release checks for it under the wrong setting, so its code is never reached."""
    time = np.arange(5) / 4
    expected = (1 - np.exp(-5 * (1 - time[:4]))) / (1 - np.exp(-5)) * 0.5 + 0.5
    np.testing.assert_allclose(orders.cooling("exp", 5, 0.5, 3.0)[:4], expected, rtol=1e-6)


def test_an_unknown_way_to_cool_lists_the_known_ones():
    with pytest.raises(ValueError, match="constant, linear, cosine2, shift, exp"):
        orders.cooling("quadratic", 4, 0.5, 1.0)


@pytest.mark.parametrize(
    ("interval", "guided"),
    [((0.0, 1.0), range(1, 11)), ((0.3, 0.7), range(3, 8)), ((0.35, 0.79), range(3, 8)),
     ((0.0, 0.05), range(0)), ((1.0, 1.0), [10])],
)  # fmt: skip
def test_steps_count_from_one_and_bounds_are_inside(interval, guided):
    steps = np.flatnonzero(orders.guided_steps(interval, 10)) + 1
    assert steps.tolist() == list(guided)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(64, 64, [64] * 8), (64, 8, [64, 64, 32, 32, 16, 16, 8, 8]), (3, 0, [3, 3, 3, 1, 1, 1, 0, 0]),
     (0, 0, [0] * 8)],
)  # fmt: skip
def test_registers_fall_by_halves(first, last, expected):
    assert orders.register_counts(first, last, 8).tolist() == expected
