# SPDX-License-Identifier: Apache-2.0
"""Makes the pictures of the README by the commands that stand in it.

    python docs/tour.py      # writes docs/tour.png and docs/steps.gif, prints what is printed

Every task of `sparse-lavida` on the bundled model, with its own seeds; nothing is picked.
"""

import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import numpy as np
from PIL import Image, ImageSequence

from sparse_lavida_jax import pictures, report

HERE = pathlib.Path(__file__).resolve().parent
SCALE = 2  # pixels of the page to a pixel of a picture
CUT = slice(16, 80)  # what is kept of a picture for outpainting, along both sides
TOUR = (
    'generate "a red circle above a blue square" --out out.png --save-steps steps.gif',
    'edit out.png "make the red circle green" --out edited.png',
    'inpaint out.png "a cyan cross above a blue square" --box=0,0,96,48 --out inpainted.png',
    'outpaint cut.png "a red circle above a blue square" --out outpainted.png',
    'reflect "two blue squares and a red circle" --rounds=3 --out reflected.png',
    'ground out.png "red circle" "blue square" --out boxes.png',
    'ask out.png "how many squares are there?"',
    'reason out.png "how many circles plus how many squares?"',
    "caption out.png",
    'caption out.png --template "a ___ red circle and a ___ blue square"',
    'infill "a red circle is ___ a blue square" --picture out.png',
    'generate "three green triangles" --sampler=dense --steps=12 --out dense.png',
    "replay out.png --out again.png",
)


def run(folder: pathlib.Path, command: str) -> str:
    """Runs a command as a person would, and returns what it prints."""
    words = [sys.executable, "-m", "sparse_lavida_jax.cli", *shlex.split(command)]
    surroundings = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        words, cwd=folder, env=surroundings, check=True, capture_output=True, text=True
    )
    return done.stdout


def enlarged(picture: pictures.Picture) -> pictures.Picture:
    """Returns a picture with every pixel a small square."""
    return picture.repeat(SCALE, axis=0).repeat(SCALE, axis=1)


def main() -> None:
    """Runs the tour in an empty folder and puts its pictures on one page."""
    with tempfile.TemporaryDirectory() as name:
        folder, tiles = pathlib.Path(name), []
        for command in TOUR:
            print(f"$ sparse-lavida {command}\n{run(folder, command)}", end="", flush=True)
            words = shlex.split(command)
            if "--out" in words:
                drawn = pictures.read(folder / words[words.index("--out") + 1])
                tiles.append(report.Tile(enlarged(drawn), command.partition(" --out")[0]))
                if words[0] == "generate":
                    pictures.write(folder / "cut.png", drawn[CUT, CUT])
        report.sheet(tiles, columns=4).save(HERE / "tour.png")
        with Image.open(folder / "steps.gif") as film:
            frames = [np.asarray(one.convert("RGB")) for one in ImageSequence.Iterator(film)]
        pictures.write_animation(HERE / "steps.gif", [enlarged(frame) for frame in frames])


if __name__ == "__main__":
    main()
