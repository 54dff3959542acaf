# SPDX-License-Identifier: Apache-2.0
"""Draws the images of `docs/method.md` with the code that they explain.

python docs/method.py              # writes docs/method_*.png, and the table of samplers
python docs/method.py --no-model   # only what the bundled model need not draw
"""

import dataclasses
import pathlib
import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sparse_lavida_jax import SparseLaViDa, config
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.page import figures
from sparse_lavida_jax.sampling import costs
from sparse_lavida_jax.sampling.prompts import PromptTokens
from sparse_lavida_jax.tags import make_tags

HERE = pathlib.Path(__file__).resolve().parent
# Prompt, two clean blocks, two masked blocks with a register each; M = 2.
BLOCKS = np.array([[0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4]], np.int32)
NAMES = ("P", "P", "P", "1", "1", "2", "2", "3", "3", "R", "4", "4", "R")
LAST_CLEAN = 2
PROMPT_TOKENS = 26  # of `CAPTION` with its layout
CAPTION = "a red circle above a blue square"
# Those that give the same image.
EXACT_PRESETS = tuple(name for name in config.PRESETS if name != "dense")
BEGIN, END = "<!-- written by docs/method.py -->", "<!-- up to here -->"
BAR, SIDE = 24, 192  # pixels: the height of a bar with its gap; the side of the image


def main() -> None:
    """Writes all images."""
    training = make_tags(np.arange(BLOCKS.shape[1])[None], BLOCKS, LAST_CLEAN)
    figures.visibility_matrix(training, NAMES).save(HERE / "method_training.png")
    held = np.flatnonzero(BLOCKS[0] <= LAST_CLEAN + 1)
    sampling = make_tags(held[None], BLOCKS[:, held], LAST_CLEAN)
    names = [NAMES[i] for i in held]
    figures.visibility_matrix(sampling, names).save(HERE / "method_sampling.png")
    folder = model_folder.find_model("scenes")
    settings = model_folder.read_config(folder)
    phases, _ = figures.plan_of(settings.sampling, settings.model)
    figures.order_grid(phases, settings.model.grid_size).save(HERE / "method_order.png")
    runs = {
        preset: costs.costs(
            *figures.plan_of(with_preset(settings, preset), settings.model),
            PromptTokens((PROMPT_TOKENS,)),
        )
        for preset in ("dense", "sparse")
    }
    figures.cost_bars(runs).save(HERE / "method_costs.png")
    if "--no-model" not in sys.argv:
        unmasking().save(HERE / "method_unmasking.png")
        drawn = samplers(SparseLaViDa.from_pretrained("scenes"))
        sampler_bars(drawn).save(HERE / "method_samplers.png")
        page = (HERE / "method.md").read_text()
        (HERE / "method.md").write_text(markdown.with_part(page, BEGIN, END, table(drawn)))


def with_preset(settings: config.Config, preset: str) -> config.Sampling:
    """Returns the sampling settings of a checkpoint with another preset."""
    return dataclasses.replace(settings.sampling, preset=preset)


def unmasking() -> Image.Image:
    """Draws a prompt with the dense and the sparse sampler; returns a row of steps for each."""
    pipe, rows = SparseLaViDa.from_pretrained("scenes"), []
    for preset in ("dense", "sparse"):
        frames: list[np.ndarray] = []
        pipe.generate(
            CAPTION,
            sampling=with_preset(pipe.settings, preset),
            callback=lambda progress, kept=frames: kept.extend(
                pipe.preview(progress.after(block)[0])
                for block in progress.blocks
                if progress.stage == "image"
            ),
        )
        rows.append(np.asarray(figures.strip(frames)))
    return Image.fromarray(np.concatenate(rows))


def samplers(pipe: SparseLaViDa) -> dict[str, Result]:
    """Draws `CAPTION` with each of `EXACT_PRESETS`.

    Raises:
        ValueError: two of the images differ.
    """
    drawn = {
        name: pipe.generate(CAPTION, sampling=with_preset(pipe.settings, name))
        for name in EXACT_PRESETS
    }
    first = drawn["none"]
    for name, result in drawn.items():
        if result.layouts != first.layouts or not np.array_equal(result.pixels[0], first.pixels[0]):
            raise ValueError(f"the sampler {name!r} draws another image than 'none'.")
    return drawn


def table(drawn: dict[str, Result]) -> str:
    """Returns the tokens of each sampler, in Markdown."""
    rows = [
        ["tokens of the image", *(result.passed[0] for result in drawn.values())],
        ["tokens of its layout", *(result.layout_passed[0] for result in drawn.values())],
    ]
    return markdown.table(["sampler", *(f"`{name}`" for name in drawn)], rows)


def sampler_bars(drawn: dict[str, Result]) -> Image.Image:
    """Draws the image, next to one bar of tokens for each sampler."""
    left, width = SIDE + 80, 300
    page = Image.new("RGB", (left + width + 50, len(drawn) * BAR), figures.PAPER)
    side = Image.fromarray(drawn["none"].pixels[0]).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    page.paste(side, (0, (page.height - SIDE) // 2))
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(figures.TEXT)
    most = max(result.passed[0] for result in drawn.values())
    for row, (name, result) in enumerate(drawn.items()):
        y, end = (row + 0.5) * BAR, left + result.passed[0] / most * width
        pen.text((left - 8, y), name, figures.INK, font, "rm")
        pen.rectangle((left, y - BAR / 3, end, y + BAR / 3), fill=figures.MASKED)
        pen.text((end + 6, y), str(result.passed[0]), figures.INK, font, "lm")
    return page


if __name__ == "__main__":
    main()
