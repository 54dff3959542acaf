# SPDX-License-Identifier: Apache-2.0
"""Runs every task of `sparse-lavida` and writes what it draws and prints to `docs/tour.md`.

    python docs/tour.py            # docs/tour.md, docs/tour.png and docs/steps.gif
    python docs/tour.py --steps    # only docs/steps.gif

Uses the bundled model of real art and the first seed. Afterwards, look at the results, and mark
wrong ones in the page with a line `# wrong: ...` below them.
"""

import argparse
import dataclasses
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sparse_lavida_jax import SparseLaViDa
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.sampling import costs
from sparse_lavida_jax.tags import FIRST_BLOCK

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "art"
PAGE = f"""# Every task, by its command

Results of the bundled model `{MODEL}` with the first seed, for prompts of kinds that it was trained
on, made by `python docs/tour.py`. Wrong results are marked with `# wrong`;
[evaluation.md](evaluation.md#real-art) has the scores of all tasks. The model of coloured shapes,
`scenes`, has the same commands, without `--checkpoint`.

![what the commands drew](tour.png)
"""
SCALE = 2  # pixels of the page to a pixel of an image
EDGE, FONT_SIZE = 12, 12  # of a captioned image, in pixels
CAPTION = "a lion and a camera in twemoji style"
LAYOUT = " robot<LOC_7><LOC_7><LOC_17><LOC_17>"
ASKED = (
    f'generate "{CAPTION}" --out out.png',
    'edit out.png "replace the camera with a key" --out replaced.png',
    'edit out.png "remove the camera" --out removed.png',
    'generate "a penguin and a carrot in twemoji style" --out pair.png',
    'inpaint pair.png "a penguin and a crown" --box=48,28,96,84 --out inpainted.png',
    'generate "two red apples" --seed=3 --out two.png',
    'generate "two red apples" --seed=3 --crop=16,16,80,80 --out cut.png',
    'outpaint cut.png "two red apples" --out outpainted.png',
    'reflect "a butterfly and a sun" --rounds=3 --out reflected.png',
    'ground out.png "camera" --out boxes.png',
    'ask out.png "how many lions are there?"',
    'ask out.png "is there a key?"',
    'reason out.png "are there more lions than cameras?"',
    "caption out.png",
    'generate "Pinguin und Karotte im Stil noto" --out german.png',
    'generate "a penguin and a carrot" --order=halton --steps=20 --out halton.png',
    f'generate "a robot" --layout "{LAYOUT}" --out laid_out.png',
    "chat --out turns",
)
TOUR = (*(f"{command} --checkpoint={MODEL}" for command in ASKED), "replay out.png --out again.png")
TURNS = ("generate a lion", "edit add a key below the lion", "ask is there a key?")


def run(folder: pathlib.Path, command: str, typed: str = "") -> str:
    """Runs a command as a person would, who then types some lines; returns what it prints."""
    words = [sys.executable, "-m", "sparse_lavida_jax", *shlex.split(command)]
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


def unmasking(pipe: SparseLaViDa, preset: str) -> list[image_files.Pixels]:
    """Draws `CAPTION`; returns its steps, with the tokens of the layout and of the image so far."""
    done = []  # the image, then each revision

    def watch(progress):
        if progress.stage in ("image", "revision") and progress.steps == progress.total:
            done.append(progress)

    sampling = dataclasses.replace(pipe.settings.sampling, preset=preset)
    drawn = pipe.generate(CAPTION, sampling=sampling, callback=watch)
    shown, passed = [], np.zeros(1, int)
    for progress in done:
        steps = costs.costs(progress.plan, progress.settings, progress.prompted[0])
        total = passed[-1] + np.cumsum([step.total for step in steps])
        # A cached prompt is passed before the first step.
        passed = np.append(passed, total[-progress.total :])
        blocks = range(FIRST_BLOCK, FIRST_BLOCK + progress.total)
        shown += [pipe.preview(progress.after(block)[0]) for block in blocks]
    passed = passed[1:]
    assert passed[-1] == drawn.passed[0]
    layout = f"layout, written first: {drawn.layout_passed[0]} tokens"
    told = [layout, *(f"layout {drawn.layout_passed[0]} tokens, image {n}" for n in passed)]
    shown.insert(0, pipe.preview(np.full_like(drawn.tokens[0], pipe.settings.model.image_mask_id)))
    return [
        _captioned(enlarged(image), preset, words) for image, words in zip(shown, told, strict=True)
    ]


def _captioned(image: image_files.Pixels, *lines: str) -> image_files.Pixels:
    page = Image.new("RGB", (image.shape[1] + 2 * EDGE, image.shape[0] + 5 * EDGE), "white")
    page.paste(Image.fromarray(image), (EDGE, EDGE))
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(FONT_SIZE)
    for number, words in enumerate(lines):
        middle = page.width / 2, image.shape[0] + EDGE * (2 + 1.5 * number)
        pen.text(middle, words, "black", font, "mm")
    return np.asarray(page)


def animate() -> None:
    """Writes `docs/steps.gif`: the dense twin and the bundled model, step for step."""
    pipes = {"dense": HERE.parent / "benchmarks" / "art_dense", "sparse": MODEL}
    sides = [unmasking(SparseLaViDa.from_pretrained(one), name) for name, one in pipes.items()]
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
                tiles.append(training_report.Tile(enlarged(drawn), command.partition(" --out")[0]))
        training_report.sheet(tiles, columns=4).save(HERE / "tour.png")
    (HERE / "tour.md").write_text(f"{PAGE}\n```console\n{''.join(printed)}```\n")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", action="store_true", help="only the animation")
    if not parser.parse_args().steps:
        tour()
    animate()


if __name__ == "__main__":
    main()
