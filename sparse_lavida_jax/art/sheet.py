# SPDX-License-Identifier: Apache-2.0
r"""The sheet: drawings of the same things in three styles, at the sizes that are used.

    npm install emoji-datasource-google emoji-datasource-twitter @lobehub/fluent-emoji-3d \
        emojibase-data
    python -m sparse_lavida_jax.art.sheet --packages=node_modules \
        --out=sparse_lavida_jax/assets/art

makes the shipped sheet; `--things` names another list of things than `things.txt`, of 8 or more.
Models of another sheet are trained with `data.sheet=FOLDER`, the image tokenizer first
(docs/training.md). The authors and licences of the drawings are in `NOTICE`.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from sparse_lavida_jax import config
from sparse_lavida_jax.data import files, image_files

SHIPPED = pathlib.Path(__file__).parents[1] / "assets" / "art"
SIZES = {"small": 24, "large": 40}  # pixels per side of the box of a thing
LANGUAGES = ("en", "de", "ja")
# Where each package has the drawing of the code points {0}.
STYLES = {
    "noto": "emoji-datasource-google/img/google/64/{0}.png",
    "twemoji": "emoji-datasource-twitter/img/twitter/64/{0}.png",
    "fluent": "@lobehub/fluent-emoji-3d/assets/{0}.webp",
}
NAMES = "emojibase-data/{0}/data.json"
FACINGS = {"": "", "<": "left", ">": "right"}  # as `things.txt` writes them
FEWEST = 8  # things of a sheet: with fewer, nothing can be held out
LEAST_ALPHA = 16  # of 255: fainter pixels at the edge of a drawing are no part of it

Sprites = UInt8[np.ndarray, "n s side side 4"]


@dataclasses.dataclass(frozen=True)
class Thing:
    """What is drawn.

    Attributes:
        code: its Unicode code points, such as "1F43B".
        group: such as "animals".
        names: in the order of `LANGUAGES`.
        drawn: where its drawings face, "left" or "right"; "": no side of it is its front.
    """

    code: str
    group: str
    names: tuple[str, ...]
    drawn: str

    @property
    def name(self) -> str:
        return self.names[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Sheet:
    """Things, and their drawings by size: red, green, blue and alpha, by thing and style.

    Attributes:
        part_of: the sheet that a few of its things were chosen from; None: it is whole.
    """

    things: tuple[Thing, ...]
    sprites: dict[str, Sprites] = dataclasses.field(repr=False)
    part_of: "Sheet | None" = dataclasses.field(default=None, repr=False)

    @property
    def whole(self) -> "Sheet":
        """What a judge compares with."""
        return self.part_of or self

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each thing, by its English name."""
        return {thing.name: number for number, thing in enumerate(self.things)}

    def spoken(self, name: str, language: str) -> str:
        """Returns what the thing with an English name is called in a language."""
        return self.things[self.numbers[name]].names[LANGUAGES.index(language)]

    def sprite(
        self, name: str, style: str, size: str, facing: str
    ) -> UInt8[np.ndarray, "side side 4"]:
        """Returns the drawing of a thing that faces `facing`.

        Raises:
            KeyError: an unknown name, style or size.
        """
        number = self.numbers[name]
        sprite = self.sprites[size][number, tuple(STYLES).index(style)]
        return sprite if facing == self.things[number].drawn else sprite[:, ::-1]


def load(folder: pathlib.Path = SHIPPED) -> Sheet:
    """Returns a sheet that `write` wrote: always the same one of a folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: the files do not belong together.
    """
    return _loaded(folder)


@functools.cache
def _loaded(folder: pathlib.Path) -> Sheet:
    things = tuple(
        Thing(one["code"], one["group"], tuple(one["names"]), one["drawn"])
        for one in files.read_json(folder / "things.json")
    )
    sprites = {}
    for size, side in SIZES.items():
        with Image.open(folder / f"{size}.png") as image:
            pixels = np.asarray(image.convert("RGBA"))
        if pixels.shape != (len(things) * side, len(STYLES) * side, 4):
            raise ValueError(
                f"{folder / size}.png has {pixels.shape[1]}x{pixels.shape[0]} pixels, but"
                f" {len(things)} things in {len(STYLES)} styles are {len(STYLES) * side}x"
                f"{len(things) * side}. Make both with `python -m sparse_lavida_jax.art.sheet`."
            )
        cut = pixels.reshape(len(things), side, len(STYLES), side, 4).swapaxes(1, 2)
        sprites[size] = np.ascontiguousarray(cut)
        sprites[size].flags.writeable = False
    return Sheet(things, sprites)


def shipped(count: int = 0) -> Sheet:
    """Returns so many things of the shipped sheet, spread evenly over it; 0: all."""
    return _chosen(load(), count)


@functools.cache
def _chosen(whole: Sheet, count: int) -> Sheet:
    if count in (0, len(whole.things)):
        return whole
    chosen = [number * len(whole.things) // count for number in range(count)]
    sprites = {size: drawn[chosen] for size, drawn in whole.sprites.items()}
    return Sheet(tuple(whole.things[number] for number in chosen), sprites, whole)


def taught(data: config.Data) -> Sheet:
    """Returns what a model is taught: `data.things` things of `data.sheet`.

    Raises:
        ConfigError: there is no sheet, or it has too few things.
    """
    if not data.sheet:
        return shipped(data.things)
    folder = pathlib.Path(data.sheet)
    try:
        whole = load(folder)
    except (OSError, ValueError, LookupError) as error:
        raise config.ConfigError(
            f"Data.sheet={data.sheet!r} holds no sheet of things: {error}. Make one with `python -m"
            " sparse_lavida_jax.art.sheet --packages=... --things=... --out=FOLDER`; a model needs"
            " the one that it was trained with."
        ) from None
    least = max(FEWEST, data.things)
    if len(whole.things) < least:
        raise config.ConfigError(
            f"Data.sheet={data.sheet!r} has {len(whole.things)} things; {least} are needed. Make it"
            " with more of them, or lower data.things."
        )
    return _chosen(whole, data.things)


def write(sheet: Sheet, folder: pathlib.Path) -> None:
    """Writes `things.json`, and one image of each size with a row for each thing."""
    folder.mkdir(parents=True, exist_ok=True)
    for size, side in SIZES.items():
        rows = sheet.sprites[size].swapaxes(1, 2).reshape(-1, len(STYLES) * side, 4)
        Image.fromarray(rows).save(folder / f"{size}.png", optimize=True)
    things = [dataclasses.asdict(thing) for thing in sheet.things]
    files.write_json(folder / "things.json", things)


def make(packages: pathlib.Path, listed: str) -> Sheet:
    """Makes a sheet from installed packages.

    Args:
        packages: the folder that npm installs into, `node_modules`.
        listed: the things, one a line: group, code points, and perhaps "<" or ">", where all its
            drawings face.

    Raises:
        OSError: a package is not there, or lacks a thing.
        ValueError: a line that names no thing, or two things with one name.
    """
    by_language = [_names(packages, language) for language in LANGUAGES]
    things = []
    for line in filter(None, (line.partition("#")[0].strip() for line in listed.splitlines())):
        group, code, facing = (*line.split(), "")[:3]
        if facing not in FACINGS or any(code not in names for names in by_language):
            raise ValueError(
                f"'{line}' is not a thing: write a group, the code points of an emoji, and perhaps"
                " < or >, such as 'animals 1F408 <'."
            )
        names = tuple(names[code] for names in by_language)
        things.append(Thing(code, group, names, FACINGS[facing]))
    for spoken in zip(*(thing.names for thing in things), strict=True):
        if twice := {name for name in spoken if spoken.count(name) > 1}:
            raise ValueError(f"two things are called {', '.join(sorted(twice))}: leave one out.")
    drawings = [[_drawing(packages, thing, style) for style in STYLES] for thing in things]
    sprites = {
        size: np.stack([[_fitted(one, side) for one in styles] for styles in drawings])
        for size, side in SIZES.items()
    }
    return Sheet(tuple(things), sprites)


def _names(packages: pathlib.Path, language: str) -> dict[str, str]:
    """Returns the name of each emoji in a language, by its code points."""
    emoji = files.read_json(packages / NAMES.format(language))
    return {one["hexcode"]: files.composed(one["label"]) for one in emoji}


def _drawing(packages: pathlib.Path, thing: Thing, style: str) -> Image.Image:
    """Returns a drawing without its transparent margins."""
    names = list(_file_names(thing.code.lower()))
    for path in (packages / STYLES[style].format(name) for name in names):
        if path.exists():
            image = Image.open(path).convert("RGBA")
            seen = image.getchannel("A").point([255 * (a >= LEAST_ALPHA) for a in range(256)])
            return image.crop(seen.getbbox())
    raise FileNotFoundError(
        f"{packages} has no drawing of '{thing.name}' in {style} style. Run `npm install` as"
        " sparse_lavida_jax/art/sheet.py says, or leave the thing out of the list."
    )


def _file_names(code: str) -> Iterator[str]:
    # Packages differ in whether they write the selector of the coloured variant.
    yield code
    yield f"{code}-fe0f"


def _fitted(drawing: Image.Image, side: int) -> UInt8[np.ndarray, "side side 4"]:
    """Scales a drawing so that its longer side fills a square, in whose middle it is."""
    scale = side / max(drawing.size)
    width, height = (max(1, round(scale * length)) for length in drawing.size)
    small = drawing.resize((width, height), Image.Resampling.LANCZOS)  # colours weighted by alpha
    fitted = Image.new("RGBA", (side, side))
    fitted.paste(small, ((side - width) // 2, (side - height) // 2))
    pixels = np.array(fitted)
    pixels[pixels[..., 3] == 0] = 0
    return pixels


def overview(sheet: Sheet, size: str, columns: int = 8) -> UInt8[np.ndarray, "h w 3"]:
    """Returns an image of all things in all styles, to look at."""
    cells, side = sheet.sprites[size], SIZES[size]
    blank = np.zeros((-len(cells) % columns, *cells.shape[1:]), np.uint8)
    grid = np.concatenate([cells, blank]).reshape(-1, columns * len(STYLES), side, side, 4)
    pixels = grid.swapaxes(1, 2).reshape(-1, columns * len(STYLES) * side, 4)
    return blended(np.full((*pixels.shape[:2], 3), 243, np.uint8), pixels)


def blended(
    background: UInt8[np.ndarray, "*n h w 3"], sprite: UInt8[np.ndarray, "*n h w 4"]
) -> UInt8[np.ndarray, "*n h w 3"]:
    """Draws a sprite on a background, in integers: the same on every machine."""
    alpha = sprite[..., 3:].astype(np.uint32)
    mixed = sprite[..., :3] * alpha + background * (255 - alpha)
    return ((mixed + 127) // 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Makes a sheet of drawings in three styles, the setting data.sheet of models."
    )
    parser.add_argument("--packages", type=pathlib.Path, required=True, help="node_modules")
    parser.add_argument(
        "--things", type=pathlib.Path, default=SHIPPED / "things.txt", help="list, a thing a line"
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--overview", type=pathlib.Path, help="image of the sheet to write")
    given = parser.parse_args()
    sheet = make(given.packages, files.read_text(given.things))
    if len(sheet.things) < FEWEST:
        parser.error(
            f"--things={given.things} lists {len(sheet.things)} things; list {FEWEST} or more"
        )
    write(sheet, given.out)
    if given.overview:
        image_files.write(given.overview, overview(sheet, "large"))
    print(f"{given.out}: {len(sheet.things)} things in {len(STYLES)} styles and {len(SIZES)} sizes")


if __name__ == "__main__":
    main()
