# SPDX-License-Identifier: Apache-2.0
"""Runs every task of `sparse-lavida` and writes what it draws and prints to `docs/tour.md`.

    python docs/tour.py            # docs/tour.md, docs/tour.png and docs/steps.gif
    python docs/tour.py --steps    # only docs/steps.gif

Uses the bundled model of real art, with prompts and seeds for which it is right: the exact judge
of the art world refuses a wrong image. Afterwards, look at all results: replace questions that get
wrong answers, or mark those in the page with a line `# wrong: ...` below.
"""

import argparse
import dataclasses
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sparse_lavida_jax import SparseLaViDa
from sparse_lavida_jax.art import judge, tasks
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.evals import training_report
from sparse_lavida_jax.sampling import costs
from sparse_lavida_jax.scenes.task import Sample
from sparse_lavida_jax.tags import FIRST_BLOCK

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "art"
PAGE = f"""# Every task, by its command

Results of the bundled model `{MODEL}`, made by `python docs/tour.py`. Prompts, questions and seeds
are chosen so that all results are right; an exact judge checks the images. Often the model is
wrong: its scores are in [evaluation.md](evaluation.md#real-art). The model of coloured shapes,
`scenes`, has the same commands, without `--checkpoint`.

![what the commands drew](tour.png)
"""
SCALE = 2  # pixels of the page to a pixel of an image
EDGE, FONT_SIZE = 12, 12  # of a captioned image, in pixels
CAPTION = "a lion and a camera in twemoji style"
LAYOUT = " carrot<LOC_7><LOC_7><LOC_17><LOC_17>"
PRETZEL = "a pretzel in twemoji style"
ASKED = (
    f'generate "{CAPTION}" --out out.png',
    'edit out.png "replace the camera with a drum" --out replaced.png',
    'edit out.png "remove the camera" --out removed.png',
    'generate "a penguin and a carrot in twemoji style" --out pair.png',
    'inpaint pair.png "a penguin and a tulip" --box=48,28,96,84 --out inpainted.png',
    f'generate "{PRETZEL}" --seed=2 --out pretzel.png',
    f'generate "{PRETZEL}" --seed=2 --crop=16,16,80,80 --out cut.png',
    f'outpaint cut.png "{PRETZEL}" --out outpainted.png',
    'reflect "a butterfly and a sun" --rounds=3 --out reflected.png',
    'ground out.png "camera" --out boxes.png',
    'ask out.png "how many lions are there?"',
    'ask out.png "is there a key?"',
    'reason out.png "which is further left, the lion or the camera?"',
    'generate "Pinguin und Karotte im Stil noto" --out german.png',
    'generate "a penguin and a carrot" --order=halton --steps=20 --out halton.png',
    f'generate "a carrot on a pink background" --layout "{LAYOUT}" --out laid_out.png',
    "caption laid_out.png",
    "chat --out turns",
)
TOUR = (*(f"{command} --checkpoint={MODEL}" for command in ASKED), "replay out.png --out again.png")
TURNS = (
    "generate a camera",
    "edit add a carrot below the camera",
    "ask how many cameras are there?",
)


def run(folder: pathlib.Path, command: str, typed: str = "") -> str:
    """Runs a command as a person would, who then types some lines; returns what it prints."""
    words = [sys.executable, "-m", "sparse_lavida_jax", *shlex.split(command)]
    surroundings = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        words, cwd=folder, env=surroundings, input=typed, check=True, capture_output=True, text=True
    )
    return done.stdout


class Drawn(NamedTuple):
    """An image that a command draws, as a file; "" where something is not said.

    Attributes:
        prompt: what it should show. Nothing for a part of an image, a copy, or one with frames.
        source: what was edited.
    """

    file: str
    prompt: str = ""
    source: str = ""

    def fault(self, folder: pathlib.Path) -> str:
        """Says what is wrong with the image, by the exact judge; "" if nothing is."""
        if not self.prompt:
            return ""
        shown = judge.read(image_files.read(folder / self.source)).scene if self.source else None
        sample = Sample(self.prompt, shown, task="edit" if self.source else "draw")
        return tasks.score(sample, image_files.read(folder / self.file)).reason


def drawn_by(words: list[str]) -> list[Drawn]:
    """Returns the images that a command draws."""
    if "--out" not in words:
        return []
    out = words[words.index("--out") + 1]
    match words:
        case ["chat", *_]:
            turns = [(i, *turn.split(" ", 1)) for i, turn in enumerate(TURNS, 1)]
            return [
                Drawn(f"{out}/{i}.png", said, f"{out}/{i - 1}.png" if task == "edit" else "")
                for i, task, said in turns
                if task in ("generate", "edit")
            ]
        case ["edit", source, said, *_]:
            return [Drawn(out, said, source)]
        case ["generate" | "reflect", said, *_] if not any("--crop" in word for word in words):
            return [Drawn(out, said)]
        case ["inpaint" | "outpaint", _, said, *_]:
            return [Drawn(out, said)]
    return [Drawn(out)]


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
    """Runs the tour in an empty folder and puts its images, all right, on one page."""
    printed = []
    with tempfile.TemporaryDirectory() as name:
        folder, tiles = pathlib.Path(name), []
        for command in TOUR:
            words = shlex.split(command)
            typed = "".join(f"{turn}\n" for turn in TURNS) if words[0] == "chat" else ""
            printed.append(f"$ sparse-lavida {command}\n{typed}{run(folder, command, typed)}")
            print(printed[-1], end="", flush=True)
            for drawn in drawn_by(words):
                if fault := drawn.fault(folder):
                    raise SystemExit(f"{drawn.file} is wrong: {fault}. Choose another seed.")
                pixels = enlarged(image_files.read(folder / drawn.file))
                tiles.append(training_report.Tile(pixels, command.partition(" --out")[0]))
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
