# SPDX-License-Identifier: Apache-2.0
"""The prompts of a model of the art world: those of the small world, about other scenes."""

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Int, UInt8

from sparse_lavida_jax import config
from sparse_lavida_jax.art import judge, sentences, tasks, vocabulary
from sparse_lavida_jax.art.grammar import Art, ArtLayout
from sparse_lavida_jax.art.sheet import SIZES, Sheet, load, taught
from sparse_lavida_jax.art.tasks import caption
from sparse_lavida_jax.art.world import (
    BACKGROUNDS,
    CELL,
    CELL_STEPS,
    STEP,
    ArtScene,
    Placed,
    cells_of,
    render,
)
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.images import resize
from sparse_lavida_jax.prompting.protocol import Grid, Pixels
from sparse_lavida_jax.prompting.vocabulary import Reading, Vocabulary
from sparse_lavida_jax.scenes.grammar import GrammarError
from sparse_lavida_jax.scenes.prompts import Codec, ExampleMaker, ScenePrompts
from sparse_lavida_jax.scenes.task import Sample
from sparse_lavida_jax.scenes.tokenizer import Tokenizer

COMMANDS = {task.command: name for name, task in tasks.TABLE.items() if task.command}
EMPTY = ArtScene("white", ())
LAYOUTS = {"generate": "layout", "edit": "edit_layout"}  # other tasks: "fill_layout"


@dataclasses.dataclass(frozen=True)
class ArtEncoder(ExampleMaker):
    """Turns samples of a task of the art world into examples.

    Attributes:
        codec: the image tokenizer, whose codes of a cell depend on that cell alone.
        sheet: what scenes are drawn with.
    """

    codec: Codec | None = None
    sheet: Sheet = dataclasses.field(default_factory=load, repr=False, compare=False)
    cell_steps: ClassVar[int] = CELL_STEPS

    def seen(self, scene: Any) -> UInt8[np.ndarray, "h w 3"]:
        side = self.model.vision.image_size
        pixels = render(EMPTY if self.data.blind else scene, CELL * self._cells, self.sheet)
        return resize(pixels, (side, side))

    def scene_example(self, sample: Sample, **how: Any) -> Example:
        example = super().scene_example(sample, **how)
        if sample.window is None:
            return example
        learned = np.zeros((self._cells, self._cells), bool)
        learned[sample.window] = True
        return dataclasses.replace(example, learned=learned.reshape(-1))

    def scene_codes(self, scene: Any) -> Int[np.ndarray, "l g"]:
        """Returns the codes of a scene, put together from those of its things."""
        empty = self._codes_of(scene.background, None)
        grid = np.broadcast_to(empty, (self._cells, self._cells, *empty.shape[2:])).copy()
        for thing in scene.things:
            # Where it begins in a cell counts, and not in which.
            moved = dataclasses.replace(thing, y=thing.y % CELL_STEPS, x=thing.x % CELL_STEPS)
            grid[thing.cells] = self._codes_of(scene.background, moved)
        for cell in scene.hidden:
            grid[cell] = empty[0, 0]
        return grid.reshape(self._cells**2, -1)

    def kept(self, sample: Sample) -> Bool[np.ndarray, " l"] | None:
        return kept_cells(sample.layout or "", self._cells, self.sheet)

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

    @property
    def _cells(self) -> int:
        return self.model.grid_size

    @functools.cached_property
    def _kept(self) -> dict[tuple[str, Placed | None], Int[np.ndarray, "y x g"]]:
        return {}


def encoder_of(tokenizer: Tokenizer, settings: config.Config, codec: Codec) -> ArtEncoder:
    """Returns the encoder of a model with this image tokenizer."""
    sheet = taught(settings.data).whole
    return ArtEncoder(tokenizer, settings.data, settings.model, None, codec, sheet)


def kept_cells(
    layout: str, cells: int, sheet: Sheet | None = None
) -> Bool[np.ndarray, " l"] | None:
    """Returns the cells that no box of a layout touches; None if it is not a layout.

    Args:
        cells: in a row of the image.
    """
    try:
        entries = ArtLayout.parse(layout.strip(), sheet).entries
    except GrammarError:
        return None
    if max(max(box) for _, box in entries) > cells * CELL_STEPS:
        return None
    kept = np.ones((cells, cells), bool)
    for _, (x1, y1, x2, y2) in entries:
        kept[cells_of(y1, y2), cells_of(x1, x2)] = False
    return kept.reshape(-1)


@dataclasses.dataclass(frozen=True)
class ArtPrompts(ScenePrompts):
    """The prompts of the art world."""

    describe = caption.PROMPT
    answer_tokens = 24  # of an answer in two steps
    world = "art"
    example = "a lion and a camera in twemoji style"

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: config.Config, codec: Codec) -> "ArtPrompts":
        return cls(encoder_of(tokenizer, settings, codec))

    @classmethod
    def taught(cls, data: config.Data) -> Vocabulary | None:
        return vocabulary.of_sheet(taught(data)) if data.source == cls.world else None

    def _reader(self, task: str, text: str, seed: int) -> Reading | None:
        return sentences.read(task, text, seed, taught(self.encoder.data))

    def refusal(self, task: str) -> str:
        trained = self.encoder.data.tasks
        if COMMANDS.get(task, task) in trained:
            return ""
        return f"this checkpoint was not trained to {task}: it was trained on {', '.join(trained)}."

    def lays_out(self, task: str) -> bool:
        return LAYOUTS.get(task, "fill_layout") in self.encoder.data.tasks

    def kept_cells(self, layout: str) -> Bool[np.ndarray, " l"] | None:
        return kept_cells(layout, self.encoder.model.grid_size, taught(self.encoder.data).whole)

    def replacement(self, wrong: str, right: str) -> str:
        sheet = taught(self.encoder.data).whole
        shown, wanted = (Art.parse(one, sheet) for one in (wrong, right.partition(" ")[2]))
        if shown.name != wanted.name or shown.size != wanted.size:
            return super().replacement(wrong, right)
        plain = f"the {Art(shown.name, shown.size)}"
        if shown.style != wanted.style:
            return f"draw {plain} in {wanted.style} style"
        return f"mirror {plain}"

    def erased(self, image: Pixels, mask: Grid) -> Pixels:
        """Returns an image whose masked cells have the colour of its background."""
        sides = image.shape[0] // mask.shape[0], image.shape[1] // mask.shape[1]
        pixels = mask.repeat(sides[0], axis=0).repeat(sides[1], axis=1)
        colour = np.array(BACKGROUNDS[judge.background_of(image)], np.uint8)
        return np.where(pixels[..., None], colour, image)
