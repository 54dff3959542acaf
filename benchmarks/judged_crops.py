# SPDX-License-Identifier: Apache-2.0
"""Crops around boxes of true scenes, for the second judge: as they are, changed, or with faults."""

import dataclasses
import math
import zlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageFilter

from sparse_lavida_jax.art import sheet
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.world import (
    BACKGROUNDS,
    IMAGE_SIZE,
    MIRRORED,
    STEP,
    ArtScene,
    Placed,
    render,
)

SEED = 55
SIDE, FILLED = 32, 24  # pixels per side of a crop, and of the box in it
TURN, SHIFT, SCALE, BLUR = 2.0, 1.5, 0.05, 0.8  # most degrees, pixels, share, pixels; ours
NOISE = 5.0  # most levels, standard deviation; ours
CROWD = 12  # things that are tried in a scene
FAULTS = ("style", "mirrored", "ghost")

Box = tuple[int, int, int, int]  # left, top, right and bottom, in steps


def padded(pixels: UInt8[np.ndarray, "h w 3"]) -> Image.Image:
    """Returns an image with a border, so that a crop may reach beyond its edges."""
    border = ((FILLED, FILLED), (FILLED, FILLED), (0, 0))
    return Image.fromarray(np.pad(pixels, border, mode="edge"))


def crop(
    bordered: Image.Image,
    box: Box,
    turn: float = 0.0,
    scale: float = 1.0,
    shift: tuple[float, float] = (0.0, 0.0),
) -> Image.Image:
    """Returns a box with its surroundings, [32 32 3], turned by degrees and shifted by pixels."""
    left, top, right, bottom = (STEP * at for at in box)
    size = scale * (right - left) / FILLED
    across, down = size * math.cos(math.radians(turn)), size * math.sin(math.radians(turn))
    x = (left + right) / 2 + FILLED + shift[0] - (across - down) * SIDE / 2
    y = (top + bottom) / 2 + FILLED + shift[1] - (down + across) * SIDE / 2
    matrix = (across, -down, x, down, across, y)
    kind = Image.Transform.AFFINE
    return bordered.transform((SIDE, SIDE), kind, matrix, Image.Resampling.BILINEAR)


def examples(
    stream: str, count: int, is_changed: bool = True
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], list[Placed | None]]:
    """Returns crops of random true scenes, and the things in them; None: there is nothing.

    Args:
        stream: scenes of two streams differ.
        is_changed: whether they are turned, shifted, scaled, blurred and on other backgrounds.
    """
    crops, things = np.empty((count, SIDE, SIDE, 3), np.uint8), list[Placed | None]()
    for index in range(count):
        rng = np.random.default_rng((SEED, zlib.crc32(stream.encode()), index))
        scene = crowded(stream, index)
        image = _on_another(scene, rng) if is_changed and rng.random() < 0.6 else render(scene)
        bordered = padded(image)
        shown: list[tuple[Placed | None, Box]] = [(thing, thing.box) for thing in scene.things]
        shown += [(None, box) for box in _empty_box(scene, rng)]
        for thing, box in shown[: count - len(things)]:
            one = _changed(bordered, box, rng) if is_changed else crop(bordered, box)
            crops[len(things)] = np.asarray(one)
            things.append(thing)
        if len(things) == count:
            break
    return crops, things


def crowded(stream: str, index: int) -> ArtScene:
    """Returns a scene of as many things as find room, all looks equally often."""
    dice, things = ArtDice(SEED, f"second judge/{stream}", index), list[Placed]()
    names = tuple(thing.name for thing in sheet.load().things)
    for _ in range(1 + dice.below(CROWD)):
        look = (dice.pick(names), dice.pick(tuple(sheet.STYLES)), dice.pick(tuple(sheet.SIZES)))
        things = dice.placed([look], things) or things
    return ArtScene.of(dice.background(), things)


def _on_another(scene: ArtScene, rng: np.random.Generator) -> UInt8[np.ndarray, "h w 3"]:
    """Returns a scene on a random colour that fades into another one."""
    first = rng.uniform(100, 255, 3)
    second = np.clip(first + rng.normal(0, 20, 3), 0, 255)
    fade = np.linspace(0, 1, IMAGE_SIZE)[:, None]
    colours = (1 - fade) * first + fade * second
    return on_ground(scene, colours[:, None] if rng.random() < 0.5 else colours[None])


def on_ground(scene: ArtScene, ground: Float[np.ndarray, "#h #w 3"]) -> UInt8[np.ndarray, "h w 3"]:
    """Draws a scene on other colours than those of the world.

    How much of the background shows in a pixel is read from renderings on white and on yellow.
    """
    on_white, on_yellow = (
        render(dataclasses.replace(scene, background=name)).astype(np.float32)
        for name in ("white", "yellow")
    )
    white, yellow = (np.array(BACKGROUNDS[name], np.float32) for name in ("white", "yellow"))
    shows = np.clip((on_white - on_yellow)[..., 2:] / (white - yellow)[2], 0, 1)
    return np.clip(on_white + shows * (ground - white), 0, 255).astype(np.uint8)


def _empty_box(scene: ArtScene, rng: np.random.Generator) -> Iterator[Box]:
    """Yields a box that shows a quarter of a thing at most, if there is one to be found soon."""
    side = sheet.SIZES[str(rng.choice(tuple(sheet.SIZES)))] // STEP
    for _ in range(4):
        x, y = (int(one) for one in rng.integers(0, IMAGE_SIZE // STEP - side + 1, 2))
        shared = 0
        for thing in scene.things:
            left, top, right, bottom = thing.box
            wide, high = min(right, x + side) - max(left, x), min(bottom, y + side) - max(top, y)
            shared += max(wide, 0) * max(high, 0)
        if 4 * shared <= side * side:
            yield x, y, x + side, y + side
            return


def _changed(bordered: Image.Image, box: Box, rng: np.random.Generator) -> UInt8[np.ndarray, "*n"]:
    """Returns a crop with a small rotation, shift, change of scale, blur and noise."""
    turn, x, y, scale = rng.uniform(-1, 1, 4) * (TURN, SHIFT, SHIFT, SCALE)
    image = crop(bordered, box, turn, 1 + scale, (x, y))
    if rng.random() < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, BLUR)))
    noise = rng.normal(0, rng.uniform(0, NOISE), (SIDE, SIDE, 3))
    return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)


def faulty(scene: ArtScene, thing: Placed, fault: str) -> UInt8[np.ndarray, "h w 3"] | None:
    """Draws a scene in which a thing has a fault; None where a thing cannot have it.

    Args:
        fault: "style" or "mirrored": its right half is in another style, or mirrored. "ghost": all
            of it is half transparent.

    Raises:
        ValueError: an unknown fault.
    """
    if fault not in FAULTS:
        raise ValueError(f"'{fault}' is not a fault: choose one of {', '.join(FAULTS)}.")
    if fault == "mirrored" and not thing.facing:
        return None
    others = tuple(one for one in scene.things if one != thing)
    styles = tuple(sheet.STYLES)
    changed = {
        "style": {"style": styles[(styles.index(thing.style) + 1) % len(styles)]},
        "mirrored": {"facing": MIRRORED[thing.facing]},
        "ghost": {},
    }[fault]
    added = () if fault == "ghost" else (dataclasses.replace(thing, **changed),)
    image, other = render(scene), render(ArtScene.of(scene.background, [*others, *added]))
    left, top, right, bottom = (STEP * at for at in thing.box)
    if fault == "ghost":
        return ((image.astype(np.int32) + other) // 2).astype(np.uint8)
    half = slice((left + right) // 2, right)
    image[top:bottom, half] = other[top:bottom, half]
    return image
