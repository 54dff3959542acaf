# SPDX-License-Identifier: Apache-2.0
"""Random choices that are the same on every machine, and random objects of the small world."""

import functools
import threading
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from sparse_lavida_jax.scenes.world import COLOURS, NAMED, NUM_CELLS, SHAPES, SIZES, Object, Scene

Pair = tuple[str, str]  # shape, colour
Pairs = tuple[Pair, ...]

PAIRS: Pairs = tuple((shape, colour) for shape in SHAPES for colour in COLOURS)
HELD_OUT: Pairs = (
    ("circle", "purple"),
    ("square", "cyan"),
    ("triangle", "red"),
    ("cross", "yellow"),
)
TRAINED: Pairs = tuple(pair for pair in PAIRS if pair not in HELD_OUT)
MOST_OBJECTS = 6  # in an input scene

T = TypeVar("T")


class PhiloxPool(threading.local):
    """Philox generators of each thread, for use again: to make one takes ten times as long."""

    def __init__(self):
        self._made: list[np.random.Philox] = []

    def at(
        self, place: int, key: tuple[int, int], counter: tuple[int, int, int, int]
    ) -> np.random.Philox:
        """Returns the generator at a place, in the state of a new one of this key and counter."""
        while place >= len(self._made):
            self._made.append(np.random.Philox(0))
        bits: Any = self._made[place]
        state, unused = {"key": key, "counter": counter}, {"has_uint32": 0, "uinteger": 0}
        buffer = {"buffer": (0,) * 4, "buffer_pos": 4}
        bits.state = {"bit_generator": "Philox", "state": state, **buffer, **unused}
        return bits


_POOL = PhiloxPool()
WORDS, BLOCK_WORDS = 32, 4  # drawn at a time; for each value of the counter


class Dice:
    """Random choices from the raw words of Philox, which are the same in all NumPy versions.

    Raises:
        ValueError: a negative seed or index.
    """

    def __init__(self, seed: int, stream: str, index: int, *, held_out: bool = False):
        if seed < 0 or index < 0:
            raise ValueError(f"seed and index must be 0 or more, got {seed=}, {index=}.")
        self._key, self._index, self._drawn = (seed, zlib.crc32(stream.encode())), index, 0
        self._words: list[int] = []
        self.held_out = held_out

    def below(self, end: int) -> int:
        """Returns a number in 0..end-1; the bias of the remainder is under 2**-50."""
        try:
            return self._words.pop() % end
        except IndexError:
            # The low words of the counter advance within an example; the third is its index.
            bits = _POOL.at(0, self._key, (self._drawn // BLOCK_WORDS, 0, self._index, 0))
            self._words = bits.random_raw(WORDS).tolist()
            self._drawn += WORDS
            return self._words.pop() % end

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def between(self, low: int, high: int) -> int:
        """Returns a number in low..high, inclusive."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def several(self, choices: Sequence[T], count: int) -> list[T]:
        """Returns `count` different choices, in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def pair(self, alone: bool = False, among: Pairs = PAIRS) -> Pair:
        """Returns a shape and a colour that may be used in this split.

        Args:
            alone: the example has no other object, so that held-out pairs are always allowed.
            among: the pairs to choose from.
        """
        pool = PAIRS if alone or self.held_out else TRAINED
        if self.held_out and self.chance(50):
            pool = HELD_OUT
        return self.pick(pool if among is PAIRS else _common(pool, among) or among)

    def thing(self, alone: bool = False, among: Pairs = PAIRS) -> Object:
        return NAMED[*self.pair(alone, among), self.pick(SIZES)]

    def scene(self, low: int = 1, high: int = MOST_OBJECTS) -> Scene:
        """Returns a scene of low..high objects."""
        count = self.between(low, high)
        return self.scatter([self.thing(alone=count == 1) for _ in range(count)])

    def scatter(self, things: Sequence[Object]) -> Scene:
        """Puts objects into random cells."""
        cells = self.several(range(NUM_CELLS), len(things))
        return Scene.of(dict(zip(cells, things, strict=True)))


@functools.cache
def _common(first: Pairs, second: Pairs) -> Pairs:
    return tuple(pair for pair in first if pair in second)
