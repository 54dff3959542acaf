# SPDX-License-Identifier: Apache-2.0
"""Reads scenes from pixels: the nearest drawing at every place, of all things, styles and facings.

A drawing explains a part of an image by its *gain*: how much nearer the pixels are to it than to
the background. Things are found one after another, the largest gain first; boxes do not overlap.
A first pass compares blocks of `STEP` pixels, a second one the pixels of the nearest drawings.
Then each cell of a thing is compared alone: with the other drawings of that thing, and with
nothing. So half a thing is noticed, and a thing whose halves are of two styles.
"""

import dataclasses
import functools
import itertools

import einops
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from sparse_lavida_jax.art.sheet import SIZES, STYLES, Sheet, load
from sparse_lavida_jax.art.world import BACKGROUNDS, CELL, STEP, ArtScene, Placed

# How far off a drawing may be and still be found, our choice: squared error over the squared
# contrast of the drawing, and over the squared error of the nearest drawing of another thing.
MAX_ERROR = 0.4
MAX_AMBIGUITY = 0.9
LEAST_STRENGTH = 0.65  # of a drawing in the pixels: 1 as it is, 0.5 half transparent
LEAST_CONTRAST = 8.0  # levels, root mean square: fainter blocks and differences are not judged
GHOST = 24.0  # levels: a block outside of all things differs so much from the background
MARGIN = 0.3  # of a cell between two drawings: 1 on the other one, 0 in the middle, -1 on its own
CANDIDATES = 12  # drawings of the first pass that the second one compares
LEAST_APART = 0.1  # squared difference of two drawings that can be told apart, over their contrast


@dataclasses.dataclass(frozen=True)
class Detection:
    """A thing that was found in an image.

    Attributes:
        thing: the nearest drawing.
        mixed: (row, column) of the cells that are nearer to another drawing of the thing, of
            another style or facing.
        missing: (row, column) of the cells that are nearer to the background.
    """

    thing: Placed
    mixed: tuple[tuple[int, int], ...] = ()
    missing: tuple[tuple[int, int], ...] = ()

    @property
    def is_coherent(self) -> bool:
        """Whether all its cells are of one style and facing, and none is missing."""
        return not self.mixed and not self.missing


@dataclasses.dataclass(frozen=True)
class SceneReading:
    """What was read of an image.

    Attributes:
        background: a key of `world.BACKGROUNDS`.
        found: the things, in the order of a scene.
        ghosts: (row, column) of the cells that show something which is not a thing.
    """

    background: str
    found: tuple[Detection, ...]
    ghosts: tuple[tuple[int, int], ...] = ()

    @property
    def scene(self) -> ArtScene:
        return ArtScene(self.background, tuple(one.thing for one in self.found))

    @property
    def fault(self) -> str:
        """What is wrong with the image as an image of a scene; "" if nothing is."""
        for one in self.found:
            if one.missing:
                return f"the {one.thing} lacks a part: {_cell_name(one.missing[0])} is empty"
            if one.mixed:
                return f"the {one.thing} is mixed: {_cell_name(one.mixed[0])} is of another drawing"
        if self.ghosts:
            return f"{_cell_name(self.ghosts[0])} shows something that is not a thing"
        return ""


def read(pixels: UInt8[np.ndarray, "h w 3"], sheet: Sheet | None = None) -> SceneReading:
    """Reads an image of any size that `world.render` can draw.

    Raises:
        ValueError: the image is not square, or not a whole number of cells wide.
    """
    height, width = pixels.shape[:2]
    if height != width or height % CELL:
        raise ValueError(
            f"an image of a scene is square and a multiple of {CELL} pixels wide; this one is"
            f" {width}x{height}."
        )
    sheet = sheet or load()
    background = background_of(pixels)
    image = pixels.astype(np.float32) - np.array(BACKGROUNDS[background], np.float32)
    blocks = _pooled(image)
    free = np.ones(blocks.shape[:2], bool)
    gains = {size: _largest_gains(blocks, size, background, sheet) for size in SIZES}
    found = []
    while (one := _best(image, blocks, gains, background, sheet)) is not None:
        found.append(one)
        x1, y1, x2, y2 = one.thing.box
        free[y1:y2, x1:x2] = False
        for size, gain in gains.items():
            side = SIZES[size] // STEP
            gain[max(0, y1 - side + 1) : y2, max(0, x1 - side + 1) : x2] = -np.inf
    strange = (np.square(blocks).mean(axis=-1) > GHOST**2) & free
    found.sort(key=lambda one: one.thing)
    return SceneReading(background, tuple(found), _cells(_by_cell(strange)))


@functools.cache
def unclear(sheet: Sheet) -> frozenset[tuple[str, str]]:
    """Lists what cannot be told from pixels: (name, "style") and (name, "facing") pairs.

    Tasks about styles and facings leave these out.
    """
    found = set()
    for size in SIZES:
        drawn = _contrasts(size, "white", sheet).reshape(len(sheet.things), len(STYLES), 2, -1)
        contrast = np.square(drawn).sum(axis=-1)
        for number, thing in enumerate(sheet.things):
            mirrored = np.square(drawn[number, :, 0] - drawn[number, :, 1]).sum(axis=-1)
            if thing.drawn and (mirrored < LEAST_APART * contrast[number, :, 0]).any():
                found.add((thing.name, "facing"))
            for one, other in itertools.combinations(range(len(STYLES)), 2):
                apart = np.square(drawn[number, one, :1] - drawn[number, other]).sum(axis=-1)
                if apart.min() < LEAST_APART * contrast[number, (one, other), 0].min():
                    found.add((thing.name, "style"))
    return frozenset(found)


def background_of(pixels: UInt8[np.ndarray, "side side 3"]) -> str:
    """Returns the background that most pixels are near to."""
    colours = np.array([*BACKGROUNDS.values()], np.int32)
    far = np.square(pixels[::2, ::2, None].astype(np.int32) - colours).sum(axis=-1)
    nearest = np.where(far.min(axis=-1) < 3 * GHOST**2, far.argmin(axis=-1), len(colours))
    counts = np.bincount(nearest.reshape(-1), minlength=len(colours))[: len(colours)]
    return tuple(BACKGROUNDS)[int(counts.argmax())]


def _pooled(image: Float[np.ndarray, "*n h w c"]) -> Float[np.ndarray, "*n y x c"]:
    return einops.reduce(image, "... (y i) (x j) c -> ... y x c", "mean", i=STEP, j=STEP)


@functools.lru_cache(maxsize=32)
def _drawings(size: str, sheet: Sheet) -> Float[np.ndarray, "v side side 4"]:
    """Returns all drawings of a size: things, styles, and left or right, which varies fastest.

    Their colours are weighted by alpha, so that a drawing on a background differs from it by
    colour - alpha * background.
    """
    sprites = sheet.sprites[size]
    alpha = sprites[..., 3:].astype(np.float32) / 255
    weighted = np.concatenate([sprites[..., :3] * alpha, alpha], axis=-1)
    flipped = np.stack([weighted, weighted[..., ::-1, :]], axis=2)
    for number, thing in enumerate(sheet.things):
        if thing.drawn == "right":
            flipped[number] = flipped[number, :, ::-1].copy()
    return flipped.reshape(-1, *sprites.shape[2:])


def _contrasts(
    size: str, background: str, sheet: Sheet, variants: Int[np.ndarray, " k"] | slice = slice(None)
) -> Float[np.ndarray, "k side side 3"]:
    """Returns by how much drawings differ from a background."""
    drawings = _drawings(size, sheet)[variants]
    colour = np.array(BACKGROUNDS[background], np.float32)
    return drawings[..., :3] - drawings[..., 3:] * colour


@functools.lru_cache(maxsize=32)
def _pooled_drawings(
    size: str, background: str, sheet: Sheet
) -> tuple[Float[np.ndarray, "d v"], Float[np.ndarray, " v"]]:
    """Returns the blocks of all drawings as columns, and their squared norms."""
    pooled = _pooled(_contrasts(size, background, sheet))
    columns = np.ascontiguousarray(pooled.reshape(len(pooled), -1).T)
    return columns, np.square(columns).sum(axis=0)


def _gains(
    windows: Float[np.ndarray, "*n d"], size: str, background: str, sheet: Sheet
) -> Float[np.ndarray, "*n v"]:
    """Returns the gain of every drawing in windows of blocks."""
    columns, norms = _pooled_drawings(size, background, sheet)
    return 2 * (windows @ columns) - norms


def _largest_gains(
    blocks: Float[np.ndarray, "y x 3"], size: str, background: str, sheet: Sheet
) -> Float[np.ndarray, "h w"]:
    """Returns the largest gain of a drawing at each place; -inf where there is next to nothing."""
    side = SIZES[size] // STEP
    windows = np.lib.stride_tricks.sliding_window_view(blocks, (side, side), axis=(0, 1))
    windows = einops.rearrange(windows, "y x c i j -> y x (i j c)")
    gains = np.full(windows.shape[:2], -np.inf, np.float32)
    # No gain is larger than what the window holds.
    least = LEAST_STRENGTH**2 * _pooled_drawings(size, background, sheet)[1].min()
    filled = np.square(windows).sum(axis=-1) > least
    if filled.any():
        gains[filled] = _gains(windows[filled], size, background, sheet).max(axis=-1)
    return gains


def _best(
    image: Float[np.ndarray, "side side 3"],
    blocks: Float[np.ndarray, "y x 3"],
    gains: dict[str, Float[np.ndarray, "h w"]],
    background: str,
    sheet: Sheet,
) -> Detection | None:
    """Returns the thing with the largest gain; places where there is none are struck from gains."""
    while True:
        size = max(gains, key=lambda size: gains[size].max())
        y, x = np.unravel_index(int(gains[size].argmax()), gains[size].shape)
        if gains[size][y, x] <= 0:
            return None
        place, side = (int(y), int(x)), SIZES[size]
        seen = blocks[y : y + side // STEP, x : x + side // STEP].reshape(-1)
        nearest = np.argpartition(-_gains(seen, size, background, sheet), CANDIDATES)[:CANDIDATES]
        window = image[STEP * y : STEP * y + side, STEP * x : STEP * x + side]
        things = np.unique(nearest // _VARIANTS)
        variants = (things[:, None] * _VARIANTS + np.arange(_VARIANTS)).reshape(-1)
        drawn = _contrasts(size, background, sheet, variants)
        errors = np.square(window - drawn).sum(axis=(1, 2, 3)).reshape(-1, _VARIANTS)
        which = int(errors.min(axis=1).argmin())
        variant = int(errors[which].argmin())
        error, others = errors[which, variant], np.delete(errors, which, axis=0)
        own = drawn.reshape(-1, _VARIANTS, *drawn.shape[1:])[which]
        contrast = np.square(own[variant]).sum()
        strength = (window * own[variant]).sum() / contrast
        fits = error <= MAX_ERROR * contrast and strength >= LEAST_STRENGTH
        if fits and error <= MAX_AMBIGUITY * others.min(initial=np.inf):
            thing = _placed(int(things[which]), variant, size, place, sheet)
            return _compared(thing, variant, window, own)
        gains[size][place] = -np.inf


_VARIANTS = 2 * len(STYLES)


def _placed(number: int, variant: int, size: str, place: tuple[int, int], sheet: Sheet) -> Placed:
    thing = sheet.things[number]
    facing = ("left", "right")[variant % 2] if thing.drawn else ""
    return Placed(*place, thing.name, tuple(STYLES)[variant // 2], size, facing)


def _compared(
    thing: Placed,
    variant: int,
    window: Float[np.ndarray, "side side 3"],
    drawn: Float[np.ndarray, "v side side 3"],
) -> Detection:
    """Compares each cell of a thing with its other drawings, and with nothing."""
    others = np.concatenate([drawn, np.zeros_like(drawn[:1])])
    own = drawn[variant]
    errors = _per_cell(np.square(window - others), thing)
    apart = _per_cell(np.square(own - others), thing)
    pixels = _per_cell(np.ones_like(others), thing)
    # -1 where the pixels are those of the drawing, 1 where they are those of the other one.
    between = (errors[variant] - errors) / np.maximum(apart, 1e-6)
    odd = (between > MARGIN) & (apart > LEAST_CONTRAST**2 * pixels)
    top, left = thing.cells[0].start, thing.cells[1].start
    mixed = odd[:-1].any(axis=0) & ~odd[-1]
    return Detection(thing, _cells(mixed, top, left), _cells(odd[-1], top, left))


def _per_cell(
    values: Float[np.ndarray, "v side side 3"], thing: Placed
) -> Float[np.ndarray, "v rows columns"]:
    """Adds values up over the cells of an image, which the box of a thing may fill unevenly."""
    rows, columns = thing.cells
    wide = CELL // STEP
    padded = np.zeros(
        (len(values), CELL * (rows.stop - rows.start), CELL * (columns.stop - columns.start)),
        np.float32,
    )
    top, left = STEP * (thing.y % wide), STEP * (thing.x % wide)
    side = values.shape[1]
    padded[:, top : top + side, left : left + side] = values.sum(axis=-1)
    return einops.reduce(padded, "v (y i) (x j) -> v y x", "sum", i=CELL, j=CELL)


def _by_cell(blocks: Bool[np.ndarray, "y x"]) -> Bool[np.ndarray, "_y _x"]:
    return einops.reduce(blocks, "(y i) (x j) -> y x", "any", i=CELL // STEP, j=CELL // STEP)


def _cells(
    which: Bool[np.ndarray, "y x"], top: int = 0, left: int = 0
) -> tuple[tuple[int, int], ...]:
    return tuple((int(y) + top, int(x) + left) for y, x in np.argwhere(which))


def _cell_name(cell: tuple[int, int]) -> str:
    return f"the cell in row {cell[0] + 1}, column {cell[1] + 1}"


def naming(
    images: UInt8[np.ndarray, "n h w 3"],
    copies: UInt8[np.ndarray, "n h w 3"],
    sheet: Sheet | None = None,
) -> dict[str, float]:
    """Says how well copies of images can be read, as shares of the things in the images.

    Returns:
        named: found at its place, with its name and size.
        same: of the right style and facing, too.
        coherent: in every cell.
        ghosts: share of the images that show something which is not a thing.
        right: share of the images that show the same scene without any fault.
    """
    counts, things, ghosts, right = [0, 0, 0], 0, 0, 0
    for image, copy in zip(images, copies, strict=True):
        reading, shown = read(copy, sheet), read(image, sheet)
        by_place = {(one.thing.name, one.thing.box): one for one in reading.found}
        ghosts += bool(reading.ghosts)
        right += reading.scene == shown.scene and not reading.fault
        for one in shown.found:
            things += 1
            if (copied := by_place.get((one.thing.name, one.thing.box))) is not None:
                same = copied.thing == one.thing
                for place, holds in enumerate((True, same, same and copied.is_coherent)):
                    counts[place] += holds
    shares = [count / max(things, 1) for count in counts]
    return dict(zip(("named", "same", "coherent"), shares, strict=True)) | {
        "ghosts": ghosts / len(images),
        "right": right / len(images),
    }
