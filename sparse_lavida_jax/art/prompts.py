# SPDX-License-Identifier: Apache-2.0
"""The prompts of a model of the art world: those of the small world, about other scenes."""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge, tasks, vocabulary
from sparse_lavida_jax.art.sheet import SIZES, Sheet, load
from sparse_lavida_jax.art.tasks import caption
from sparse_lavida_jax.art.world import (
    BACKGROUNDS,
    CELL,
    IMAGE_SIZE,
    STEP,
    ArtScene,
    Placed,
    render,
)
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.images import resize
from sparse_lavida_jax.prompting.protocol import Grid, Pixels
from sparse_lavida_jax.prompting.vocabulary import Vocabulary
from sparse_lavida_jax.scenes.prompts import Codec, ExampleMaker, ScenePrompts
from sparse_lavida_jax.scenes.task import Sample
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

COMMANDS = {task.command: name for name, task in tasks.TABLE.items() if task.command}
EMPTY = ArtScene("white", ())
WIDE = CELL // STEP  # steps per cell


@dataclasses.dataclass(frozen=True)
class ArtEncoder(ExampleMaker):
    """Turns samples of a task of the art world into examples.

    Attributes:
        codec: the image tokenizer, whose codes of a cell depend on that cell alone.
        sheet: what scenes are drawn with.
    """

    codec: Codec | None = None
    sheet: Sheet = dataclasses.field(default_factory=load, repr=False, compare=False)

    def seen(self, scene: Any) -> UInt8[np.ndarray, "h w 3"]:
        side = self.model.vision.image_size
        pixels = render(EMPTY if self.data.blind else scene, IMAGE_SIZE, self.sheet)
        return resize(pixels, (side, side))

    def scene_example(self, sample: Sample, **how: Any) -> Example:
        example = super().scene_example(sample, **how)
        if sample.window is None:
            return example
        sides = IMAGE_SIZE // CELL
        learned = np.zeros((sides, sides), bool)
        learned[sample.window] = True
        return dataclasses.replace(example, learned=learned.reshape(-1))

    def scene_codes(self, scene: Any) -> Int[np.ndarray, "l g"]:
        """Returns the codes of a scene, put together from those of its things."""
        sides = IMAGE_SIZE // CELL
        empty = self._codes_of(scene.background, None)
        grid = np.broadcast_to(empty, (sides, sides, *empty.shape[2:])).copy()
        for thing in scene.things:
            # Where it begins in a cell counts, and not in which.
            moved = dataclasses.replace(thing, y=thing.y % WIDE, x=thing.x % WIDE)
            grid[thing.cells] = self._codes_of(scene.background, moved)
        return grid.reshape(sides**2, -1)

    def _codes_of(self, background: str, thing: Placed | None) -> Int[np.ndarray, "y x g"]:
        """Returns the codes of an empty cell of a background, or of the cells of a thing."""
        key = (background, thing)
        if key not in self._kept:
            assert self.codec is not None
            scene = ArtScene(background, (thing,) if thing else ())
            sides = -(-(max(SIZES.values()) + STEP) // CELL)  # cells that hold any thing
            codes = self.codec.encode(render(scene, CELL * sides, self.sheet)[None])[0]
            grid = codes.astype(np.int32).reshape(sides, sides, -1)
            self._kept[key] = grid[thing.cells] if thing else grid[:1, :1]
        return self._kept[key]

    @functools.cached_property
    def _kept(self) -> dict[tuple[str, Placed | None], Int[np.ndarray, "y x g"]]:
        return {}


def encoder_of(tokenizer: Tokenizer, settings: config.Config, codec: Codec) -> ArtEncoder:
    """Returns the encoder of a model with this image tokenizer."""
    return ArtEncoder(tokenizer, settings.data, settings.model, None, codec)


@dataclasses.dataclass(frozen=True)
class ArtPrompts(ScenePrompts):
    """The prompts of the art world."""

    describe = caption.PROMPT

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: config.Config, codec: Codec) -> "ArtPrompts":
        return cls(encoder_of(tokenizer, settings, codec))

    @property
    def vocabulary(self) -> Vocabulary:
        return vocabulary.of_sheet(load())

    def refusal(self, task: str) -> str:
        trained = self.encoder.data.tasks
        if COMMANDS.get(task, task) in trained:
            return ""
        return f"this checkpoint was not trained to {task}: it was trained on {', '.join(trained)}."

    def lays_out(self, task: str) -> bool:
        return task == "generate" and "layout" in self.encoder.data.tasks

    def erased(self, canvas: Pixels, mask: Grid) -> Pixels:
        """Returns a canvas whose masked cells have the colour of its background."""
        sides = canvas.shape[0] // mask.shape[0], canvas.shape[1] // mask.shape[1]
        pixels = mask.repeat(sides[0], axis=0).repeat(sides[1], axis=1)
        colour = np.array(BACKGROUNDS[judge.background_of(canvas)], np.uint8)
        return np.where(pixels[..., None], colour, canvas)
