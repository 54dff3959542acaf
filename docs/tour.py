# SPDX-License-Identifier: Apache-2.0
"""Runs every task of `sparse-lavida` and writes what it draws and prints to `docs/tour.md`.

    python docs/tour.py                               # docs/tour.md and docs/tour.png
    python docs/tour.py --dense=runs/scenes_dense     # docs/steps.gif too

Uses the bundled model and the first seed. In the animation, the model that
`configs/scenes_dense.py` trains is next to it. Afterwards, look at the results: describe the model
in `MODEL`, and mark wrong results in the page with a line `# wrong: ...` below them.
"""

import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sparse_lavida_jax import SparseLaViDa, sequence
from sparse_lavida_jax.apps import figures
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals import report
from sparse_lavida_jax.inference import engine

HERE = pathlib.Path(__file__).resolve().parent
MODEL = """It is the model that `configs/scenes_long.py` trained for 44,000 steps
([more](training.md#the-bundled-model))."""
PAGE = f"""# Every task, by its command

Results of the bundled model with the first seed, for prompts of kinds that it was trained on, made
by `python docs/tour.py`.
{MODEL}
Wrong results are marked with `# wrong`; the [README](../README.md#how-good-how-fast) has the scores
of all tasks.

![what the commands drew](tour.png)
"""
SCALE = 2  # pixels of the page to a pixel of an image
EDGE, FONT_SIZE = 12, 14  # of a captioned image, in pixels
CAPTION = "a red circle above a blue square"
LAYOUT = " large red circle<LOC_4><LOC_8><LOC_8><LOC_12>"
TOUR = (
    'generate "a red circle above a blue square" --out out.png',
    'edit out.png "make the red circle green" --out edited.png',
    'inpaint out.png "a cyan cross above a blue square" --box=0,0,96,48 --out inpainted.png',
    'generate "two blue squares" --seed=3 --out two.png',
    'generate "two blue squares" --seed=3 --crop=16,16,80,80 --out cut.png',
    'outpaint cut.png "two blue squares" --out outpainted.png',
    'reflect "two blue squares" --rounds=3 --out reflected.png',
    'ground out.png "red circle" "blue square" --out boxes.png',
    'ask out.png "how many squares are there?"',
    'reason out.png "how many circles plus how many squares?"',
    "caption out.png",
    "caption out.png --words red square",
    'caption out.png --template "a ___ red circle and a ___ blue square"',
    'infill "a ___ red circle and a ___ blue square" --image out.png',
    'generate "three green triangles" --order=halton --steps=12 --out halton.png',
    f'generate "a red circle" --plan "{LAYOUT}" --out planned.png',
    "chat --out turns",
    "replay out.png --out again.png",
)
TURNS = ("generate a green cross", "edit make the cross blue", "ask what colour is the cross?")


def run(folder: pathlib.Path, command: str, typed: str = "") -> str:
    """Runs a command as a person would, who then types some lines; returns what it prints."""
    words = [sys.executable, "-m", "sparse_lavida_jax.cli", *shlex.split(command)]
    surroundings = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        words, cwd=folder, env=surroundings, input=typed, check=True, capture_output=True, text=True
    )
    return done.stdout


def drawn_by(words: list[str]) -> list[str]:
    """Returns the files of the images that a command draws."""
    if "--out" not in words:
        return []
    out = words[words.index("--out") + 1]
    if words[0] != "chat":
        return [out]
    drawing = [turn.startswith(("generate", "edit")) for turn in TURNS]
    return [f"{out}/{i}.png" for i, draws in enumerate(drawing, 1) if draws]


def enlarged(image: image_files.Pixels) -> image_files.Pixels:
    """Returns an image with every pixel a small square."""
    return image.repeat(SCALE, axis=0).repeat(SCALE, axis=1)


def unmasking(name: str, folder: str) -> list[image_files.Pixels]:
    """Draws `CAPTION` by a model; returns its steps, each with the tokens it passed so far.

    Those of the layout, which comes first, are counted as if no text ended early.
    """
    pipe, shown = SparseLaViDa.from_pretrained(folder), []
    drawn = pipe.generate(
        CAPTION,
        callback=lambda progress: shown.extend(
            pipe.preview(progress.after(block)[0])
            for block in progress.blocks
            if progress.making == "image"
        ),
    )
    settings, block_len = pipe.settings, pipe.prompts.text_block_len
    laid_out = engine.tokens_passed(
        settings.model, settings.sampling, pipe.prompts.plan(CAPTION, None), block_len
    )
    cells = np.zeros_like(drawn.tokens[0])
    example = pipe.prompts.draw(CAPTION, cells, plan=drawn.plans[0])
    words = sum(sequence.num_tokens(part) for part in example.parts) - len(cells)
    costs = figures.costs(settings.sampling, settings.model, words)
    totals = laid_out + np.cumsum([cost.total for cost in costs])
    shown.insert(0, pipe.preview(np.full_like(cells, settings.model.image_mask_id)))
    # Where the prompt is passed beforehand, that is the first cost.
    before = [laid_out] * (len(shown) - len(totals))
    return [
        _captioned(enlarged(image), f"{name}: {tokens} tokens")
        for image, tokens in zip(shown, [*before, *totals], strict=True)
    ]


def _captioned(image: image_files.Pixels, words: str) -> image_files.Pixels:
    page = Image.new("RGB", (image.shape[1] + 2 * EDGE, image.shape[0] + 3 * EDGE), "white")
    page.paste(Image.fromarray(image), (EDGE, EDGE))
    font = ImageFont.load_default(FONT_SIZE)
    middle = (page.width / 2, page.height - EDGE)
    ImageDraw.Draw(page).text(middle, words, "black", font, "mm")
    return np.asarray(page)


def animate(dense: str) -> None:
    """Writes `docs/steps.gif`: the dense model next to the bundled one, step for step."""
    sides = [unmasking("dense", dense), unmasking("sparse", "scenes")]
    frames = [np.concatenate(pair, axis=1) for pair in zip(*sides, strict=True)]
    image_files.write_animation(HERE / "steps.gif", frames)


def tour() -> None:
    """Runs the tour in an empty folder and puts its images on one page."""
    printed = []
    with tempfile.TemporaryDirectory() as name:
        folder, tiles = pathlib.Path(name), []
        for command in TOUR:
            words = shlex.split(command)
            typed = "".join(f"{turn}\n" for turn in TURNS) if words[0] == "chat" else ""
            printed.append(f"$ sparse-lavida {command}\n{typed}{run(folder, command, typed)}")
            print(printed[-1], end="", flush=True)
            for file in drawn_by(words):
                drawn = image_files.read(folder / file)
                tiles.append(report.Tile(enlarged(drawn), command.partition(" --out")[0]))
        report.sheet(tiles, columns=4).save(HERE / "tour.png")
    (HERE / "tour.md").write_text(f"{PAGE}\n```console\n{''.join(printed)}```\n")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", help="a run of configs/scenes_dense.py, for the animation")
    asked = parser.parse_args()
    tour()
    if asked.dense:
        animate(asked.dense)


if __name__ == "__main__":
    main()
