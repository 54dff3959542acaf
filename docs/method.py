# SPDX-License-Identifier: Apache-2.0
"""Draws the images of `docs/method.md` with the code that they explain.

    python docs/method.py              # writes docs/method_*.png
    python docs/method.py --no-model   # all but the last one

The bundled model draws the last one.
"""

import dataclasses
import pathlib
import sys

import numpy as np
from PIL import Image

from sparse_lavida_jax import SparseLaViDa, config
from sparse_lavida_jax.apps import figures
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.layout import make_layout

HERE = pathlib.Path(__file__).resolve().parent
# Prompt, two clean blocks, two masked blocks with a register each; M = 2.
BLOCKS = np.array([[0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4]], np.int32)
NAMES = ("P", "P", "P", "1", "1", "2", "2", "3", "3", "R", "4", "4", "R")
LAST_CLEAN = 2
PROMPT_TOKENS = 60  # approximately those of a prompt with its layout
CAPTION = "a red circle above a blue square"


def main() -> None:
    """Writes all images."""
    training = make_layout(np.arange(BLOCKS.shape[1])[None], BLOCKS, LAST_CLEAN)
    figures.visibility_matrix(training, NAMES).save(HERE / "method_training.png")
    held = np.flatnonzero(BLOCKS[0] <= LAST_CLEAN + 1)
    sampling = make_layout(held[None], BLOCKS[:, held], LAST_CLEAN)
    names = [NAMES[i] for i in held]
    figures.visibility_matrix(sampling, names).save(HERE / "method_sampling.png")
    folder = model_folder.find_model("scenes")
    settings = model_folder.read_config(folder)
    segments, _ = figures.plan_of(settings.sampling, settings.model)
    figures.order_grid(segments, settings.model.grid_size).save(HERE / "method_order.png")
    runs = {
        preset: figures.costs(with_preset(settings, preset), settings.model, PROMPT_TOKENS)
        for preset in ("dense", "sparse")
    }
    figures.cost_bars(runs).save(HERE / "method_costs.png")
    if "--no-model" not in sys.argv:
        unmasking().save(HERE / "method_unmasking.png")


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
                if progress.making == "image"
            ),
        )
        rows.append(np.asarray(figures.strip(frames)))
    return Image.fromarray(np.concatenate(rows))


if __name__ == "__main__":
    main()
