# SPDX-License-Identifier: Apache-2.0
"""Every look of every thing of the sheet in blocks, and how far each is from other looks."""

import dataclasses

import einops
import numpy as np
from jaxtyping import Bool, Float, Shaped, UInt8

from sparse_lavida_jax.art.cells import BLOCK
from sparse_lavida_jax.art.judge import LEAST_CONTRAST
from sparse_lavida_jax.art.sheet import STYLES, Sheet
from sparse_lavida_jax.art.world import BACKGROUNDS

SMOOTH = 8.0  # levels, root mean square: nearer drawings weigh no more than about this; ours
MOST_APART = 4000.0  # squared levels: blocks farther from all others weigh the same; ours
USUAL_APART = 600.0  # squared levels: weights of such blocks are about 1; ours
COLOURS = np.array([*BACKGROUNDS.values()], np.float32)
MEAN = COLOURS.mean(axis=0)
SPREAD = float(np.sqrt(COLOURS.var(axis=0).sum()))


@dataclasses.dataclass(frozen=True)
class Looks:
    """All looks in one size: things in each style, as drawn, and mirrored if they have a front.

    Attributes:
        drawings: red, green, blue and alpha.
        points: blocks such that squared distances are those of pixels, averaged over the
            backgrounds: colours relative to the mean background, opacities scaled.
        apart: squared distance of a block, per pixel and channel, to the nearest other look of its
            thing, or to nothing; those that are not judged do not count.
        names: of their things.
    """

    drawings: UInt8[np.ndarray, "n side side 4"]
    points: Float[np.ndarray, "n y x d"]
    apart: Float[np.ndarray, "n y x"]
    names: Shaped[np.ndarray, " n"]

    @staticmethod
    def of(sheet: Sheet, size: str) -> "Looks":
        sprites = sheet.sprites[size]
        looks = np.stack([sprites, sprites[..., ::-1, :]], axis=2)
        looks = looks.reshape(len(sprites), -1, *sprites.shape[2:])
        cut = "n v (y i) (x j) c -> n v y x (i j) c"
        points = _scaled(einops.rearrange(looks, cut, i=BLOCK, j=BLOCK))
        nearest = np.full(points.shape[:-1], MOST_APART, np.float32)
        turns = range(1, looks.shape[1])
        for other in (np.zeros_like(points), *(np.roll(points, turn, axis=1) for turn in turns)):
            apart = np.square(points - other).sum(axis=-1) / (3 * BLOCK**2)
            nearest = np.where(apart > LEAST_CONTRAST**2, np.minimum(nearest, apart), nearest)
        has_front = np.array([bool(thing.drawn) for thing in sheet.things])
        used = np.stack([np.ones_like(has_front), has_front], axis=1)
        used = np.tile(used, (1, len(STYLES)))
        names = np.repeat([thing.name for thing in sheet.things], used.sum(axis=1))
        return Looks(looks[used], points[used], nearest[used], names)

    @property
    def is_drawn(self) -> Bool[np.ndarray, "n y x"]:
        """Which blocks show something."""
        return (self.points != 0).any(axis=-1)


def care(apart: Float[np.ndarray, "*n"], power: float) -> Float[np.ndarray, "*n"]:
    """Returns weights that are larger where a small error is taken for another drawing."""
    return ((apart + SMOOTH**2) / USUAL_APART) ** -power


def unscaled(points: Float[np.ndarray, "*n 4"]) -> Float[np.ndarray, "*n 4"]:
    """Returns colours weighted by opacity, and opacities, in levels."""
    opacity = points[..., 3:] / SPREAD
    return np.concatenate([points[..., :3] + opacity * MEAN, 255 * opacity], axis=-1)


def _scaled(pixels: UInt8[np.ndarray, "*n p 4"]) -> Float[np.ndarray, "*n _d"]:
    opacity = pixels[..., 3:].astype(np.float32) / 255
    parts = [pixels[..., :3] * opacity - opacity * MEAN, opacity * SPREAD]
    return np.concatenate(parts, axis=-1).reshape(*pixels.shape[:-2], -1)
