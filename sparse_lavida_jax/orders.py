# SPDX-License-Identifier: Apache-2.0
"""Unmasking orders and schedules, which the sampler's plans and the training blocks follow.

Paper Sec. 3.2: which tokens C_k are decoded in step k is fixed before the first step. An order is
a permutation of the cells of an image, and a schedule gives the number of cells per step. Each is
one function, registered by name in `ORDERS`, `SCHEDULES` or `COOLING`. NumPy on the host.
"""

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int


def _registered(table: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise ValueError(f"{what} {name!r}; choose one of {', '.join(table)}.")
    return table[name]


# ---------------------------------------------------------------------------------------------
# Orders: permutations of the cells of a grid, as raster indices.


def stratified(
    height: int, width: int, seed: int, *, shuffle: bool = True
) -> Int[np.ndarray, " l"]:
    """Returns the base model's order: one random cell per quadrant, then per quadrant of these, ...

    The first 4^k cells of a 2^n square include exactly one of every tile in its 2^k x 2^k tiling.
    Bit-equal to the released order on such squares (spec Sec. 7.4), including Python's generator.
    For other grids, cells outside are dropped from the order of the next larger square.

    Args:
        shuffle: visit the quadrants of each size in random order, as the released sampler does;
            otherwise row by row within each larger one.
    """
    x, y = _stratified_square(1 << (max(height, width) - 1).bit_length(), seed, shuffle).T
    inside = (y < height) & (x < width)
    return y[inside] * width + x[inside]


@functools.lru_cache(maxsize=64)
def _stratified_square(side: int, seed: int, shuffle: bool) -> Int[np.ndarray, "l 2"]:
    """Returns x and y of the cells of a power-of-two square, as the release draws them."""
    if side == 1:
        return np.zeros((1, 2), np.int32)
    generator = random.Random(seed)
    cells, blocks, size = [], [(0, 0)], side
    while size > 1:
        size //= 2
        blocks = [
            (x + dx, y + dy)
            for x, y in blocks
            for dx, dy in ((0, 0), (size, 0), (0, size), (size, size))
        ]
        if shuffle:
            generator.shuffle(blocks)
        visited = {(x - x % size, y - y % size) for x, y in cells}
        for x0, y0 in blocks:
            if (x0, y0) not in visited:
                x = generator.randrange(x0, x0 + size)
                y = generator.randrange(y0, y0 + size)
                cells.append((x, y))
    return np.array(cells, np.int32)


def halton(height: int, width: int, seed: int = 0) -> Int[np.ndarray, " l"]:
    """Returns the cells as the 2-D Halton sequence first hits them: x in base 2, y in base 3.

    Args:
        seed: has no effect.
    """
    num_points = 4 * height * width
    while True:
        # Point 0 is the corner; the sequence proper starts at 1.
        index = np.arange(1, num_points + 1)
        hits = _radical_inverse(index, 3, height) * width + _radical_inverse(index, 2, width)
        cells, first = np.unique(hits, return_index=True)
        if len(cells) == height * width:
            return cells[np.argsort(first)].astype(np.int32)
        num_points *= 2


def _radical_inverse(index: Int[np.ndarray, " n"], base: int, scale: int) -> Int[np.ndarray, " n"]:
    """Returns floor(scale * 0.d1d2...) for index = ...d2d1 in `base`, in exact integers."""
    numerator, denominator, left = np.zeros_like(index), 1, index.copy()
    while left.any():
        numerator = numerator * base + left % base
        denominator *= base
        left //= base
    return numerator * scale // denominator


def random_order(height: int, width: int, seed: int) -> Int[np.ndarray, " l"]:
    """Returns a uniformly random permutation."""
    return np.random.default_rng(seed).permutation(height * width).astype(np.int32)


def raster(height: int, width: int, seed: int = 0) -> Int[np.ndarray, " l"]:
    """Returns reading order, whatever the seed: left to right, then top to bottom."""
    return np.arange(height * width, dtype=np.int32)


ORDERS: dict[str, Callable[[int, int, int], Int[np.ndarray, " l"]]] = {
    "stratified": stratified,
    "halton": halton,
    "random": random_order,
    "raster": raster,
    "layout": stratified,  # of the cells that `Example.first` does not name
}


@functools.lru_cache(maxsize=1024)  # more than the number of seeds that training draws
def order(name: str, height: int, width: int, seed: int) -> Int[np.ndarray, " l"]:
    """Returns the order called `name` over a grid of cells, read-only.

    Raises:
        ValueError: an unknown name, or an empty grid.
    """
    function = _registered(ORDERS, name, "there is no order")
    if height < 1 or width < 1:
        raise ValueError(f"an order needs at least one cell, got a grid of {height} x {width}.")
    cells = function(height, width, seed)
    cells.setflags(write=False)  # every caller gets the same cached array
    return cells


def begun(order: Int[np.ndarray, " l"], first: Sequence[int]) -> Int[np.ndarray, " l"]:
    """Returns an order in which some of its cells come first."""
    if not first:
        return order
    own = np.asarray(first, order.dtype)
    return np.concatenate([own, order[~np.isin(order, own)]])


# ---------------------------------------------------------------------------------------------
# Schedules: the number of tokens per step.


def _shift(t: np.ndarray, shift: float) -> np.ndarray:
    # Both factors are rounded to float32 separately, as released: it matters for shift 1/3.
    return shift * t / (1 + (shift - 1) * t)


def _exp(t: np.ndarray, _: float) -> np.ndarray:
    return np.clip((1 - np.exp(-5 * t.astype(float))) / (1 - math.exp(-5)), 1e-4, 1)


def _logit_normal(t: np.ndarray, _: float) -> np.ndarray:
    erf = [math.erf(math.log(x / (1 - x)) / math.sqrt(2)) for x in t[1:-1].astype(float)]
    return 0.5 * (1 + np.array([-1, *erf, 1][: len(t)]))


def _cos(angle: np.ndarray) -> np.ndarray:
    """Returns the cosine rounded to float32: NumPy's last bit depends on the machine."""
    return np.cos(angle.astype(float)).astype(angle.dtype)


# The cumulative share of tokens as a function of the share t of steps, in float32, and of the
# shift; `counts` reverses it.
SCHEDULES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "shift": _shift,
    "cosine": lambda t, _: 1 - np.float32(0.5) * (1 + _cos(np.float32(np.pi) * t)),
    "cosine2": lambda t, _: _cos(np.float32(np.pi) * (1 - t) / 2),
    "exp": _exp,
    "logit_normal": _logit_normal,
    "linear": lambda t, _: t,
}

# The remaining share of a temperature after a share t of the steps.
COOLING: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "constant": lambda t, _: np.ones_like(t),
    "linear": lambda t, _: 1 - t,
    "cosine2": lambda t, _: np.cos(np.pi * t / 2),
    "shift": lambda t, shift: _shift(1 - t, shift),
    "exp": lambda t, _: _exp(1 - t, _),
}


ROOM_FOR_FIRST = 8  # tokens in the first step of `counts_after` that later steps leave room for


@functools.lru_cache(maxsize=1024)
def counts(schedule: str, num_steps: int, length: int, shift: float) -> Int[np.ndarray, " k"]:
    """Returns how many of `length` tokens each step decodes (spec Sec. 7.3), read-only.

    Every step decodes at least one token, so there are min(num_steps, length) steps.

    Args:
        schedule: a name in `SCHEDULES`.
        shift: only for the schedule "shift"; above 1 the first steps decode fewer tokens.

    Raises:
        ValueError: an unknown schedule, or a number out of range.
    """
    cumulated_share = _registered(SCHEDULES, schedule, "there is no schedule")
    if num_steps < 1 or length < 0 or shift <= 0:
        raise ValueError(
            f"a schedule needs num_steps >= 1, length >= 0 and shift > 0, got {num_steps=},"
            f" {length=}, {shift=}."
        )
    steps = min(num_steps, length)
    # The release truncates a float32 product: in float64, other steps would get the extra token.
    share = cumulated_share(_shares(steps), shift).astype(np.float32)
    cumulated = (share * np.float32(length)).astype(np.int64)
    per_step = np.maximum(np.diff(cumulated), 1)
    surplus = per_step.sum() - length
    if surplus < 0:  # "exp" starts above 0, a whole token from 10,000 on: the last step takes it
        per_step[0] -= surplus
    i = 0
    while surplus > 0:
        if per_step[i] > 1:
            per_step[i] -= 1
            surplus -= 1
        i = (i + 1) % steps
    per_step = per_step[::-1].astype(np.int32)
    per_step.setflags(write=False)
    return per_step


def _shares(steps: int) -> Float[np.ndarray, " k1"]:
    """Returns the shares 0 to 1 of the steps, rounded as `torch.linspace` does in float32.

    It counts up from 0 in the lower half and down from 1, in fused products, in the upper half.
    """
    if not steps:
        return np.zeros(1, np.float32)
    i, step = np.arange(steps + 1), np.float32(1) / np.float32(steps)
    upper = (1 - np.float64(step) * (steps - i)).astype(np.float32)
    return np.where(i < (steps + 1) // 2, step * i.astype(np.float32), upper)


def counts_after(
    first: int, schedule: str, num_steps: int, length: int, shift: float
) -> Int[np.ndarray, " k"]:
    """Returns `counts` of a plan whose first step decodes `first` tokens; 0: `counts` itself.

    Up to `ROOM_FOR_FIRST` of them change only the last step besides, so that images of few and of
    many things share their programs.
    """
    room = max(first, ROOM_FOR_FIRST)
    if not first or num_steps < 2 or length - room < num_steps:
        return counts(schedule, num_steps, length, shift)
    rest = counts(schedule, num_steps - 1, length - room, shift)
    return np.concatenate([[first], rest[:-1], [rest[-1] + room - first]]).astype(np.int32)


def merged(per_step: Int[np.ndarray, " k"], least: int) -> Int[np.ndarray, " k2"]:
    """Returns the counts of fewer steps, merged until each decodes at least `least` tokens.

    A remainder at the end goes to the last step.
    """
    result, held = [], 0
    for count in per_step.tolist():
        held += count
        if held >= least:
            result.append(held)
            held = 0
    if held:
        result = [*result[:-1], sum(result[-1:]) + held]
    return np.array(result, np.int32)


def cooling(name: str, num_steps: int, least: float, shift: float) -> Float[np.ndarray, " k"]:
    """Returns the share of a temperature in each step, from 1 down to `least` (spec Sec. 7.3).

    Args:
        name: a name in `COOLING`; "shift" and "exp" fall as those schedules rise.
        num_steps: as requested, even if `counts` makes fewer (as released).
        shift: only for "shift".

    Raises:
        ValueError: an unknown name.
    """
    left = _registered(COOLING, name, "no temperature falls like")
    time = np.arange(num_steps) / max(num_steps - 1, 1)
    return (left(time, shift) * (1 - least) + least).astype(np.float32)


def guided_steps(interval: tuple[float, float], num_steps: int) -> Bool[np.ndarray, " k"]:
    """Returns which steps are guided (spec Sec. 7.2).

    The bounds are shares of all steps, inclusive; steps count from 1, bounds are rounded down.
    """
    first, last = (int(share * num_steps) for share in interval)
    step = np.arange(1, num_steps + 1)
    return (first <= step) & (step <= last)


def register_counts(first: int, last: int, num_steps: int) -> Int[np.ndarray, " k"]:
    """Returns the number of registers in each step: halved from `first` down to `last`.

    Each level lasts equally long, give or take a step, so that few programs are needed: four
    for 64 to 8.
    """
    levels = [first]
    while levels[-1] // 2 > last:
        levels.append(levels[-1] // 2)
    if first > last:
        levels.append(last)
    return np.array(levels, np.int32)[np.arange(num_steps) * len(levels) // num_steps]


# ---------------------------------------------------------------------------------------------
# Time: how much of a response training masks.

MIN_TIME = 1e-3  # floor of t, as released (spec 9.2)


def time_from_uniform(policy: str, uniform: float) -> tuple[float, float]:
    """Returns the time t in [1e-3, 1] for a uniform u, and the density p(t) of the policy.

    uniform: t = u. cosine: t = cos(pi u / 2), p = 2 / (pi sqrt(1 - t^2)). logit_normal:
    t = sigmoid of a standard normal. mode: SD3's mode sampling with scale 1.29 (arXiv:2403.03206).

    Raises:
        ValueError: an unknown policy.
    """
    time, slope = time_and_slope(policy, uniform)
    return max(time, MIN_TIME), 1 / max(slope, 1e-9)


def time_and_slope(policy: str, uniform: float) -> tuple[float, float]:
    """Returns t, without its lower bound, and |dt/du|."""
    u = min(max(uniform, 1e-6), 1 - 1e-6)
    match policy:
        case "uniform":
            return u, 1.0
        case "cosine":
            return math.cos(math.pi * u / 2), math.pi / 2 * math.sin(math.pi * u / 2)
        case "logit_normal":
            normal = _normal_quantile(u)
            t = 1 / (1 + math.exp(-normal))
            return t, t * (1 - t) * math.sqrt(2 * math.pi) * math.exp(normal * normal / 2)
        case "mode":
            scale = 1.29
            t = 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
            return t, abs(-1 - scale * (1 - math.pi / 2 * math.sin(math.pi * u)))
    raise ValueError(
        f"time policy {policy!r} is unknown: use uniform, cosine, logit_normal or mode."
    )


def _normal_quantile(share: float) -> float:
    """Inverse of the normal distribution function, by bisection on `math.erf` (1e-12)."""
    low, high = -8.0, 8.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if (1 + math.erf(middle / math.sqrt(2))) / 2 < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
