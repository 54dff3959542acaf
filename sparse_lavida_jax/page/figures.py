# SPDX-License-Identifier: Apache-2.0
"""Drawings of the method, made by the code that does the work: `docs/method.md`, notebooks.

Every function returns a Pillow image. Nothing here computes the mask, the order or the cost of a
step: they are read from `visibility.visible`, a plan and a checkpoint's settings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sparse_lavida_jax import config
from sparse_lavida_jax.sampling import plans, presets
from sparse_lavida_jax.sampling.costs import StepCost, total
from sparse_lavida_jax.tags import TokenTags
from sparse_lavida_jax.visibility import visible

PAPER, INK, FAINT = (255, 255, 255), (30, 30, 30), (222, 222, 226)
# Prompt, clean and masked blocks, in Okabe and Ito's palette, which is safe for colour blindness.
PROMPT, CLEAN, MASKED = (0, 114, 178), (0, 158, 115), (230, 159, 0)
EARLY, LATE = np.array([0, 60, 110]), np.array([250, 220, 120])  # of an order, first to last
SQUARE = 22  # pixels per side of a matrix entry
CELL = 34  # pixels per side of a grid cell
MARGIN = 30
TEXT = 12


# Colour and name of each part of a cost.
PARTS = {
    "prompt": (PROMPT, "prompt"),
    "newest": (CLEAN, "decoded before"),
    "decode": (MASKED, "decoded now"),
    "rest": ((170, 170, 176), "other masks"),
    "registers": ((204, 121, 167), "registers"),
}


def plan_of(
    sampling: config.Sampling, model: config.Model
) -> tuple[list[plans.Steps], presets.StepSettings]:
    """Returns the plan of one image of the model's own size, and the settings of its steps."""
    settings = presets.step_settings(sampling, model, "image")
    given = np.zeros((1, model.grid_size**2), bool)
    return presets.plan(sampling, settings, model, given, 0, seeds=[0]), settings


# ---------------------------------------------------------------------------------------------
# Drawings.


def visibility_matrix(tags: TokenTags, names: Sequence[str] = ()) -> Image.Image:
    """Draws which tokens see which in the first row of a batch: queries down, keys across.

    Blue: the key is a prompt token; green: a clean one; orange: a masked one or a register. A clean
    token sees up to its own block, a masked one less.

    Args:
        names: of the tokens; by default their block numbers.
    """
    block, horizon = np.asarray(tags.block[0]), np.asarray(tags.horizon[0])
    sees = np.asarray(visible(block[:, None], horizon[:, None], block[None]))
    names = names or [str(number) for number in block]
    kinds = np.where(block == 0, 0, np.where(block <= horizon, 1, 2))
    colours = [(PROMPT, CLEAN, MASKED)[kind] for kind in kinds]
    side = len(names) * SQUARE + MARGIN + 1
    image, pen, font = _page(side, side)
    for i, name in enumerate(names):
        middle = MARGIN + (i + 0.5) * SQUARE
        pen.text((middle, MARGIN - 5), name, colours[i], font, "ms")
        pen.text((MARGIN - 6, middle), name, colours[i], font, "rm")
    for (query, key), seen in np.ndenumerate(sees):
        x, y = MARGIN + key * SQUARE, MARGIN + query * SQUARE
        colour = colours[key] if seen else PAPER
        pen.rectangle((x, y, x + SQUARE, y + SQUARE), fill=colour, outline=FAINT)
    return image


def order_grid(phases: Sequence[plans.Steps], rows: int) -> Image.Image:
    """Draws the step that decodes each cell of the first row of a plan: dark early, light late."""
    first = {}
    for part in phases:
        for block, positions in zip(part.block, part.decode[:, 0], strict=True):
            for cell in positions[positions != plans.PAD_POSITION]:
                first.setdefault(int(cell), int(block))
    steps, earliest = sorted(set(first.values())), min(first.values())
    columns = len(first) // rows
    image, pen, font = _page(columns * CELL + 1, rows * CELL + 1)
    for cell, block in first.items():
        x, y = cell % columns * CELL, cell // columns * CELL
        share = steps.index(block) / max(len(steps) - 1, 1)
        colour = tuple(int(c) for c in EARLY + (LATE - EARLY) * share)
        pen.rectangle((x, y, x + CELL, y + CELL), fill=colour, outline=PAPER)
        ink = PAPER if share < 0.5 else INK
        pen.text((x + CELL / 2, y + CELL / 2), str(block - earliest + 1), ink, font, "mm")
    return image


def cost_bars(runs: Mapping[str, Sequence[StepCost]], width: int = 620) -> Image.Image:
    """Draws the tokens that each step passes, one row of bars per sampler, on one scale.

    Args:
        runs: results of `costs.costs`, by name.
        width: of the image, in pixels.
    """
    height, foot = 110, 40
    image, pen, font = _page(width, len(runs) * (height + foot) + MARGIN)
    most = max(step.total for steps in runs.values() for step in steps)
    longest = max(map(len, runs.values()))
    room = (width - 2 * MARGIN) / longest
    for row, (name, steps) in enumerate(runs.items()):
        floor = MARGIN + row * (height + foot) + height
        whole = total(steps)
        pen.text((MARGIN, floor - height - 4), f"{name}: {whole} tokens", INK, font, "ls")
        for i, step in enumerate(steps):
            x, y = MARGIN + i * room, float(floor)
            for part, (colour, _) in PARTS.items():
                if tall := getattr(step, part) / most * (height - 20):
                    pen.rectangle((x, y - tall, x + room - 3, y), fill=colour)
                    y -= tall
            pen.text((x + room / 2, y - 2), str(step.total), INK, font, "ms")
        pen.line((MARGIN, floor + 1, width - MARGIN, floor + 1), INK)
        first = "prompt, then step by step" if steps[0].decode == 0 else "step by step"
        pen.text((MARGIN, floor + 4), first, INK, font)
    x = MARGIN
    for colour, meaning in PARTS.values():
        pen.rectangle((x, image.height - 20, x + 10, image.height - 10), fill=colour)
        pen.text((x + 14, image.height - 22), meaning, INK, font)
        x += 24 + int(font.getlength(meaning)) + 12
    return image


def strip(frames: Sequence[np.ndarray], scale: int = 1, most: int = 8) -> Image.Image:
    """Draws up to `most` images side by side, evenly chosen, including the first and the last."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(most, len(frames))).round().astype(int))
    tiles = [frames[i].repeat(scale, axis=0).repeat(scale, axis=1) for i in chosen]
    gap = np.full((tiles[0].shape[0], 4, 3), 255, np.uint8)
    parts = [part for tile in tiles for part in (tile, gap)][:-1]
    return Image.fromarray(np.concatenate(parts, axis=1))


def _page(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw, Any]:
    """Returns an empty page, with a pen and a font to draw on it."""
    image = Image.new("RGB", (width, height), PAPER)
    return image, ImageDraw.Draw(image), ImageFont.load_default(TEXT)
