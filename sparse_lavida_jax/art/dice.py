# SPDX-License-Identifier: Apache-2.0
"""Random scenes of real art, the same on every machine, and what is held out of training.

Four in a hundred (thing, style) pairs are held out, and some (thing, thing) pairs. In training a
thing in a held-out style stands only *alone* in an image, so that its pixels are known, and two
things of a held-out pair never stand in one image. `is_held_out` is the line between the splits.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from sparse_lavida_jax.art.sheet import SIZES, STYLES, Sheet, load
from sparse_lavida_jax.art.world import (
    BACKGROUNDS,
    CELL,
    IMAGE_SIZE,
    MOST_THINGS,
    STEP,
    ArtScene,
    Placed,
    overlap,
    render,
)
from sparse_lavida_jax.scenes.dice import Dice

EVERY = 8  # one thing in so many has a held-out style
PARTNER = 37  # things so many places apart in the sheet are a held-out pair
ATTEMPTS = 30  # to find a free place for a thing
CROWD = 9  # things in the images that an image tokenizer learns from

Look = tuple[str, str]  # name, style


@functools.cache
def held_out_looks(sheet: Sheet) -> tuple[Look, ...]:
    """Lists the held-out (thing, style) pairs: each style equally often."""
    names = [thing.name for thing in sheet.things]
    chosen = names[EVERY // 2 :: EVERY]
    return tuple((name, tuple(STYLES)[i % len(STYLES)]) for i, name in enumerate(chosen))


@functools.cache
def held_out_pairs(sheet: Sheet) -> frozenset[frozenset[str]]:
    """Returns the held-out (thing, thing) pairs: every thing is in two of them."""
    names = [thing.name for thing in sheet.things]
    return frozenset(frozenset((name, _partner(names, i))) for i, name in enumerate(names))


def _partner(names: Sequence[str], number: int) -> str:
    return names[(number + (PARTNER % len(names) or 1)) % len(names)]


def is_held_out(scene: ArtScene, sheet: Sheet) -> bool:
    """Whether a scene shows a held-out look in company, or a held-out pair."""
    if len(scene) < 2:
        return False
    if any((thing.name, thing.style) in _looks(sheet) for thing in scene.things):
        return True
    names, pairs = {thing.name for thing in scene.things}, held_out_pairs(sheet)
    return any(frozenset((one, other)) in pairs for one in names for other in names)


@functools.cache
def _looks(sheet: Sheet) -> frozenset[Look]:
    return frozenset(held_out_looks(sheet))


class ArtDice(Dice):
    """Random choices, and random scenes of a sheet.

    Args:
        seed, stream, index, held_out: see `Dice`.
        side: pixels per side of the images.
    """

    def __init__(
        self,
        seed: int,
        stream: str,
        index: int,
        *,
        held_out: bool = False,
        side: int = IMAGE_SIZE,
        sheet: Sheet | None = None,
    ):
        super().__init__(seed, stream, index, held_out=held_out)
        self.cells, self.steps, self.sheet = side // CELL, side // STEP, sheet or load()

    def looks(self, count: int) -> list[Look]:
        """Returns names and styles of things for one image: of one style six times in ten.

        Some of them are held out, if the split allows it: alone, a held-out look is always allowed.
        """
        names = [thing.name for thing in self.several(self.sheet.things, count)]
        styles = [self.pick(tuple(STYLES)) for _ in names]
        if self.chance(60):
            styles = styles[:1] * count
        looks = list(zip(names, styles, strict=True))
        if (self.held_out and self.chance(60)) or (count == 1 and self.chance(20)):
            looks[self.below(count)] = self.pick(held_out_looks(self.sheet))
        elif self.held_out and count > 1:
            names = [thing.name for thing in self.sheet.things]
            first = self.below(len(names))
            pair = names[first], _partner(names, first)
            looks[:2] = [(name, style) for name, (_, style) in zip(pair, looks, strict=False)]
        return looks

    def scene(self, low: int = 1, high: int = MOST_THINGS) -> ArtScene:
        """Returns a scene of low..high things that this split may have."""
        while True:
            count = self.between(max(low, 1 + self.held_out), high)
            looks = self.looks(count)
            if self.chance(20):  # several of a kind
                looks = [looks[0]] * count
            placed = self.placed([(*look, self.size(count)) for look in looks])
            if placed is None:
                continue
            scene = ArtScene.of(self.background(), placed)
            if is_held_out(scene, self.sheet) == self.held_out:
                return scene

    def crowd(self) -> ArtScene:
        """Returns as many things as find room, as far as training may show them together."""
        background, things = self.background(), list[Placed]()
        for _ in range(self.pick((1, *[ATTEMPTS] * 7))):
            added = self.placed([(*self.looks(1)[0], self.size(CROWD))], things)
            if added and not is_held_out(scene := ArtScene.of(background, added), self.sheet):
                things = list(scene.things)
        return ArtScene.of(background, things)

    def background(self) -> str:
        return self.pick(tuple(BACKGROUNDS))

    def size(self, count: int) -> str:
        """Returns a size; in company, things are more often small."""
        return tuple(SIZES)[self.chance(60 if count <= 2 else 25)]

    def facing(self, name: str) -> str:
        faces = self.sheet.things[self.sheet.numbers[name]].drawn
        return self.pick(("left", "right")) if faces else ""

    def placed(
        self, looks: list[tuple[str, str, str]], others: Sequence[Placed] = ()
    ) -> list[Placed] | None:
        """Puts things with a name, style and size at random places; None if there is no room.

        Args:
            others: things that are there already; they come first in the result.
        """
        done = list(others)
        for name, style, size in sorted(looks, key=lambda look: -SIZES[look[2]]):
            facing = self.facing(name)
            for _ in range(ATTEMPTS):
                end = self.steps - SIZES[size] // STEP + 1
                thing = Placed(self.below(end), self.below(end), name, style, size, facing)
                if not any(overlap(thing, other) for other in done):
                    done.append(thing)
                    break
            else:
                return None
        return done


def crowds(
    seed: tuple[int, ...], count: int, sheet: Sheet | None = None
) -> UInt8[np.ndarray, "n h w 3"]:
    """Returns images full of things, from which an image tokenizer learns."""
    stream = "crowd/" + "/".join(map(str, seed))
    scenes = (ArtDice(seed[0], stream, index, sheet=sheet).crowd() for index in range(count))
    return np.stack([render(scene, sheet=sheet) for scene in scenes])
