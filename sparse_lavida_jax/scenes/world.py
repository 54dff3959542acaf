# SPDX-License-Identifier: Apache-2.0
"""The small world: a grid of cells with objects in them, drawn as pixels and read from pixels.

An image has 6x6 cells; a cell is empty or holds one object, centred. The pixels of a cell depend
only on its content. All drawing is integer arithmetic, so that a scene has the same pixels on every
machine.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import einops
import numpy as np
from jaxtyping import Float, Int, UInt8

GRID = 6  # cells per side
NUM_CELLS = GRID**2
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
EMPTY = 0  # appearances are 1..NUM_APPEARANCES
UNREADABLE = -1  # in `Unreadable.cells`: the cell matches no appearance

IMAGE_SIZE = 96  # pixels per side by default
SMALLEST_IMAGE = 48  # pixels per side; below this, small shapes cannot be distinguished
EXTENT = {"small": 8, "large": 13}  # sixteenths of a cell's side
BACKGROUND = (243, 243, 238)
PAINT = {
    "red": (218, 42, 40),
    "green": (38, 158, 62),
    "blue": (38, 84, 222),
    "yellow": (242, 196, 16),
    "purple": (142, 46, 168),
    "cyan": (30, 190, 212),
}
COLOURS = tuple(PAINT)
NUM_APPEARANCES = len(SHAPES) * len(COLOURS) * len(SIZES)
SUBPIXELS = 8  # samples per side of a pixel

# How far off a cell may be and still be read, our choice: squared error over the squared contrast
# of the most similar appearance, and over the squared error to the second most similar one.
MAX_ERROR = 0.2
MAX_AMBIGUITY = 0.9


@dataclasses.dataclass(frozen=True)
class Object:
    """The content of a cell that is not empty."""

    shape: str
    colour: str
    size: str

    @property
    def index(self) -> int:
        """Its appearance, 1..48: shapes vary slowest, sizes fastest."""
        return _INDEX[self.shape, self.colour, self.size]

    @property
    def pair(self) -> tuple[str, str]:
        return self.shape, self.colour

    @staticmethod
    def of(appearance: int) -> "Object":
        """Returns the object of an appearance 1..48."""
        return OBJECTS[appearance - 1]

    def __str__(self) -> str:
        return f"{self.size} {self.colour} {self.shape}"


OBJECTS = tuple(
    Object(shape, colour, size) for shape in SHAPES for colour in COLOURS for size in SIZES
)
NAMED = {(*thing.pair, thing.size): thing for thing in OBJECTS}
_INDEX = {(*thing.pair, thing.size): number for number, thing in enumerate(OBJECTS, start=1)}


@dataclasses.dataclass(frozen=True)
class Scene:
    """The content of each cell: 36 appearances in raster order, 0 if empty."""

    cells: tuple[int, ...]

    @staticmethod
    def of(objects: Mapping[int, Object]) -> "Scene":
        """Makes a scene with these objects at these raster indices."""
        return EMPTY_SCENE.changed({cell: thing.index for cell, thing in objects.items()})

    def changed(self, appearances: Mapping[int, int]) -> "Scene":
        """Returns the scene with other appearances in some cells."""
        cells = list(self.cells)
        for cell, appearance in appearances.items():
            cells[cell] = appearance
        return Scene(tuple(cells))

    def objects(self) -> Iterator[tuple[int, Object]]:
        """Yields (raster index, object) in raster order."""
        return ((cell, Object.of(index)) for cell, index in enumerate(self.cells) if index)

    def __getitem__(self, cell: int) -> Object | None:
        return Object.of(self.cells[cell]) if self.cells[cell] else None

    def __len__(self) -> int:
        """The number of objects."""
        return NUM_CELLS - self.cells.count(EMPTY)

    @property
    def appearances(self) -> UInt8[np.ndarray, " n"]:
        return np.frombuffer(bytes(self.cells), np.uint8)  # several times as fast as from a tuple


EMPTY_SCENE = Scene((EMPTY,) * NUM_CELLS)


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """An image that is not a scene: what could be read of it, and why it is not a scene."""

    reason: str
    cells: tuple[int, ...]  # appearances, or `UNREADABLE`


def render(
    scene: Scene | Int[np.ndarray, "y x"], size: int = IMAGE_SIZE
) -> UInt8[np.ndarray, "h w 3"]:
    """Draws a scene, or a grid of appearances, `size` pixels per side.

    Raises:
        ValueError: `size` is not a multiple of 6 (cells), or too small.
    """
    cell_size = _cell_size(size, size)
    cells = scene.cells if isinstance(scene, Scene) else scene.reshape(-1).tolist()
    stamps = stamps_of(cell_size)
    image = _blank(cell_size).copy()
    for cell, appearance in enumerate(cells):
        if appearance != EMPTY:
            image[cell // GRID, :, cell % GRID] = stamps[appearance]
    return image.reshape(size, size, 3)


@functools.lru_cache(maxsize=8)
def _blank(cell_size: int) -> UInt8[np.ndarray, "y h x w 3"]:
    return np.full((GRID, cell_size, GRID, cell_size, 3), BACKGROUND, np.uint8)


def read(pixels: UInt8[np.ndarray, "h w 3"]) -> Scene | Unreadable:
    """Reads an image of any size that `render` can draw, cell by cell.

    A cell is read as the appearance with the nearest pixels. Blur and wrong tints, as a lossy image
    tokenizer leaves them, are tolerated; a broken or mixed object is not.

    Raises:
        ValueError: the image is not square, or `render` cannot draw its size.
    """
    cell_size = _cell_size(*pixels.shape[:2])
    errors = _squared_errors(pixels, cell_size)
    best, second = np.argsort(errors, axis=1)[:, :2].T
    cells = np.arange(NUM_CELLS)
    error = errors[cells, best] / _contrasts(cell_size)[best]
    ambiguity = errors[cells, best] / (errors[cells, second] + 1e-6)
    bad = (error > MAX_ERROR) | (ambiguity > MAX_AMBIGUITY)
    read_cells = tuple(np.where(bad, UNREADABLE, best).tolist())
    if not bad.any():
        return Scene(read_cells)
    worst = int(np.argmax(np.where(bad, error, -1.0)))
    first, other = _name(int(best[worst])), _name(int(second[worst]))
    far = error[worst] > MAX_ERROR
    how = f"is far from {first}, the nearest" if far else f"lies between {first} and {other}"
    return Unreadable(f"unreadable: {cell_name(worst)} {how}", read_cells)


def cell_name(cell: int) -> str:
    """Returns the human-readable name of a raster index."""
    return f"the cell in row {cell // GRID + 1}, column {cell % GRID + 1}"


@functools.lru_cache(maxsize=8)
def stamps_of(cell_size: int) -> UInt8[np.ndarray, "a h w 3"]:
    """Returns the pixels of a cell for every appearance, the empty one first."""
    stamps = np.empty((NUM_APPEARANCES + 1, cell_size, cell_size, 3), np.uint8)
    stamps[EMPTY] = BACKGROUND
    paper = np.array(BACKGROUND)
    samples = SUBPIXELS**2
    for thing in OBJECTS:
        cover = _coverage(thing.shape, EXTENT[thing.size], cell_size)[..., None]
        mixed = paper * (samples - cover) + np.array(PAINT[thing.colour]) * cover
        stamps[thing.index] = (mixed + samples // 2) // samples
    stamps.flags.writeable = False
    return stamps


def _coverage(shape: str, extent: int, cell_size: int) -> Int[np.ndarray, "h w"]:
    """Counts the samples of each pixel that lie inside a shape of `extent` 1/16 cells."""
    # Sample positions from the centre of the cell, in quarters of a sample: all are integers.
    axis = 2 * (2 * np.arange(SUBPIXELS * cell_size) + 1 - SUBPIXELS * cell_size)
    x, y = axis[None, :], axis[:, None]
    half = extent * cell_size
    match shape:
        case "circle":
            inside = x**2 + y**2 <= half**2
        case "square":
            inside = np.maximum(abs(x), abs(y)) <= half
        case "triangle":  # the tip is up, the base as wide as the shape is high
            inside = (abs(y) <= half) & (2 * abs(x) <= y + half)
        case _:  # a cross, its arms a third of its width
            inside = (np.maximum(abs(x), abs(y)) <= half) & (3 * np.minimum(abs(x), abs(y)) <= half)
    return einops.reduce(inside.astype(int), "(h i) (w j) -> h w", "sum", i=SUBPIXELS, j=SUBPIXELS)


def _cell_size(height: int, width: int) -> int:
    """Returns the pixels per side of a cell."""
    if height != width or height % GRID or height < SMALLEST_IMAGE:
        raise ValueError(
            f"an image of a scene is square and its side a multiple of {GRID} pixels, at least"
            f" {SMALLEST_IMAGE}; this one is {height}x{width}. Choose {IMAGE_SIZE}."
        )
    return height // GRID


@functools.lru_cache(maxsize=8)
def _templates(cell_size: int) -> tuple[Float[np.ndarray, "d a"], Float[np.ndarray, " a"]]:
    """Returns the stamps as columns relative to the background, and their squared norms."""
    stamps = stamps_of(cell_size).reshape(NUM_APPEARANCES + 1, -1).astype(np.float32)
    columns = (stamps - stamps[EMPTY]).T
    return columns, np.square(columns).sum(axis=0)


def _squared_errors(pixels: UInt8[np.ndarray, "h w 3"], cell_size: int) -> Float[np.ndarray, "n a"]:
    """Returns the squared distance of every cell to every appearance."""
    columns, norms = _templates(cell_size)
    # One product for each row of cells: small enough that BLAS starts no threads for it, which on
    # a busy machine cost ten times as much as the product.
    patches = einops.rearrange(
        pixels.astype(np.float32) - np.array(BACKGROUND, np.float32),
        "(y h) (x w) c -> y x (h w c)", h=cell_size, w=cell_size,
    )  # fmt: skip
    squares = np.square(patches).sum(axis=-1, keepdims=True)
    errors = squares - 2 * patches @ columns + norms
    return np.maximum(errors, 0).reshape(NUM_CELLS, -1)


def _contrasts(cell_size: int) -> Float[np.ndarray, " a"]:
    """Returns the squared contrast of each appearance.

    For an object that is its distance to an empty cell; for an empty cell, to the faintest object.
    """
    norms = _templates(cell_size)[1]
    return np.where(norms > 0, norms, norms[1:].min())


def _name(appearance: int) -> str:
    return f"a {Object.of(appearance)}" if appearance else "an empty cell"
