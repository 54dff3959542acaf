# SPDX-License-Identifier: Apache-2.0
"""Rehearsals: requests that make the programs of all requests like them, before those come.

A program depends on the number of rows and on what prompts are padded to, not on words. So for each
task a rehearsal runs for every number of rows and every length that prompts may be padded to.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.inference import batch_shapes
from sparse_lavida_jax.inference.batch_shapes import Bucket, Padding
from sparse_lavida_jax.inference.requests import TASK_SPECS, Request, grid_of
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import presets
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.sampling.progress import Progress
from sparse_lavida_jax.sampling.prompts import PROMPT_BUCKET, sample_input
from sparse_lavida_jax.scenes.grammar import Layout

REHEARSED = ("generate", "edit", "ask")


class LayoutWritten(Exception):
    """Ends the rehearsal of a layout: its image has rehearsals of its own."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rehearsal:
    """Requests of a task that are decoded as one batch.

    Attributes:
        kind: what is rehearsed, for people: "generate 1024x1024", "ask about an image".
        task, words, image, options: of the requests (`SparseLaViDa.requests`).
        rows: how many requests.
        length: tokens that the text of the prompt is padded to.
        bucket: shapes that an image is padded to; None: the words have the length.
        layout: whether it ends when the layout is written (`watch`).
    """

    kind: str
    task: str
    words: str
    rows: int
    length: int
    image: Pixels | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    bucket: Bucket | None = None
    layout: bool = False

    def requests(self, pipe: Any) -> list[Request]:
        """Returns the requests."""
        options = {**self.options, "as_written": True}
        return pipe.requests(self.task, [self.words] * self.rows, self.image, **options)

    def watch(self, state: Progress) -> None:
        """Is called with the progress.

        Raises:
            LayoutWritten: what is rehearsed has been done.
        """
        if self.layout and state.stage == "image":
            raise LayoutWritten


def tasks_of(pipe: Any, asked: Sequence[str] = ()) -> list[str]:
    """Returns the tasks to rehearse: those asked for, or all that the model can do.

    Raises:
        RequestError: there are no rehearsals for a task, or the model cannot do it.
    """
    for task in asked:
        if task not in REHEARSED:
            raise RequestError(
                f"there is no warm-up for {task!r}: choose from {', '.join(REHEARSED)}."
            )
        pipe.prompts.check_task(task)
    return [task for task in asked or REHEARSED if asked or not pipe.prompts.refusal(task)]


def rehearsals(
    pipe: Any, task: str, rows: Sequence[int], padding: Padding, **options: Any
) -> list[Rehearsal]:
    """Returns the rehearsals of a task, by kind, number of rows, and length of the prompt.

    Args:
        pipe: a `SparseLaViDa`.
        rows: numbers of requests that are decoded together.
        padding: of the requests to come.
        options: of the requests.

    Raises:
        RequestError, ConfigError: the model does not support an option.
    """
    found = []
    for image in _images(pipe, task):
        kind, size = task, options.get("size")
        if size:
            kind = f"{task} {size[0]}x{size[1]}"
        elif image is not None and task == "ask":
            kind = "ask about an image"
        prompts = _Prompts(pipe, task, image, padding, options)
        batch = prompts.drawn() if TASK_SPECS[task].draws else prompts.written()
        for number in rows:
            for one in batch:
                bucket = one.bucket and dataclasses.replace(one.bucket, rows=number)
                found.append(dataclasses.replace(one, kind=kind, rows=number, bucket=bucket))
    return found


def _images(pipe: Any, task: str) -> list[Pixels | None]:
    """Returns an image for each way to ask for a task, or None where it has none."""
    if TASK_SPECS[task].image == "" or pipe.codec is None:
        return [None]
    side = pipe.codec.image_size
    blank = np.zeros((side, side, 3), np.uint8)
    return [blank] if TASK_SPECS[task].image == "needed" else [None, blank]


@dataclasses.dataclass(frozen=True, eq=False)
class _Prompts:
    """The prompts of a task with all numbers of words, and what they are padded to."""

    pipe: Any
    task: str
    image: Pixels | None
    padding: Padding
    options: dict[str, Any]

    @functools.cached_property
    def sampling(self) -> config.Sampling:
        """The settings of the requests."""
        one = {**self.options, "as_written": True}
        (request,) = self.pipe.requests(self.task, _words(1), self.image, **one)
        return request.sampling

    def written(self) -> list[Rehearsal]:
        """Returns the rehearsals of a text, each with one row."""
        prompts, seen = self.pipe.prompts, () if self.image is None else (self.image,)

        def example(words: str) -> Example:
            return prompts.ask(words, seen, prompts.answer_tokens)

        return [*self._texts(example)]

    def drawn(self) -> list[Rehearsal]:
        """Returns the rehearsals of an image and of its layout, each with one row."""
        prompts, written = self.pipe.prompts, 0
        found: list[Rehearsal] = []
        if self.sampling.layout and prompts.lays_out(self.task) and self._writes:

            def layout_example(words: str) -> Example:
                return prompts.layout(words, self.image)

            written = len(layout_example(_words(1)).response) + self._around_layout
            found += [dataclasses.replace(one, layout=True) for one in self._texts(layout_example)]
        most = self._most_words(self._image_example) - 1
        for layout in (False, *self._layouts(written)):
            example = self._image_example(_words(1), layout or None)
            own, cells = self._tokens(example)
            used = self._layout_tokens(layout) if layout else 0
            for text, image in self._lengths(own, own + most + max(written - used, 0), cells):
                bucket = Bucket(1, (text, image))
                options = self.options | {"layout": layout}
                found.append(self._one(_words(1), text, options=options, bucket=bucket))
        return sorted(found, key=lambda one: one.length)

    @property
    def _writes(self) -> bool:
        """Whether the parameters are not for images alone (`fuse.for_inference`)."""
        return getattr(self.pipe.model, "task", "both") != "image"

    @property
    def _around_layout(self) -> int:
        """The tokens that a prompt has with a layout, besides those of the layout."""
        (without, _), (within, _) = (
            self._tokens(self._image_example(_words(1), layout)) for layout in (None, _words(1))
        )
        return within - without - self._layout_tokens(_words(1))

    def _layouts(self, most: int) -> Iterator[str]:
        """Yields layouts of up to `most` tokens that leave different numbers of cells to draw."""
        for number in range(1, self.pipe.settings.model.num_cells + 1):
            layout = str(Layout(tuple((cell, None) for cell in range(number))))
            if self._layout_tokens(layout) > most:
                return
            if not self._image_example(_words(1), layout).given.any():
                return  # this model draws all cells, whatever the layout
            yield layout

    def _layout_tokens(self, layout: str) -> int:
        return len(self.pipe.prompts.tokenizer.encode(layout))

    def _image_example(self, words: str, layout: str | None = None) -> Example:
        prompts, model = self.pipe.prompts, self.pipe.settings.model
        cells = grid_of(self.options.get("size"), self.pipe.codec.image_size, model)
        blank = np.zeros((math.prod(cells), model.codes_per_token), np.int32)
        if self.image is None:
            example = prompts.draw(words, blank, layout=layout, grid=cells)
        else:
            example = prompts.change(words, blank, self.image, None, layout)
        return dataclasses.replace(example, grid=cells)

    def _texts(self, example: Callable[[str], Example]) -> Iterator[Rehearsal]:
        """Yields a rehearsal for each length of the prompt of a text."""
        own, cells = self._tokens(example(_words(1)))
        most = self._most_words(example) - 1
        for (text, _), tokens in self._lengths(own, own + most, cells).items():
            yield self._one(_words(tokens - own + 1), text, options=self.options)

    def _most_words(self, example: Callable[[str], Example]) -> int:
        """Returns the number of words in the longest usual prompt that is taken."""
        for number in range(self.pipe.prompts.usual_words, 1, -1):
            with contextlib.suppress(RequestError):
                example(_words(number))
                return number
        return 1

    def _one(self, words: str, length: int, **more: Any) -> Rehearsal:
        return Rehearsal(self.task, self.task, words, 1, length, self.image, **more)

    def _tokens(self, example: Example) -> tuple[int, int]:
        """Returns the tokens of both streams of a prompt, in its longest row."""
        model, has_source = self.pipe.model.settings, self.task == "edit"
        settings = presets.step_settings(
            self.sampling,
            model,
            example.modality,
            has_source=has_source and example.modality == "image",
        )
        one = sample_input(example, RowRequest(), model, settings)
        text, image = (max(len(row.index) for row in rows) for rows in (one.text, one.image))
        return text, image

    def _lengths(self, least: int, most: int, cells: int) -> dict[tuple[int, int], int]:
        """Returns what prompts are padded to, and the fewest tokens of text that are padded so.

        Args:
            least, most: tokens of the text.
            cells: tokens of the image.
        """
        found: dict[tuple[int, int], int] = {}
        for tokens in range(least, most + 1):
            text, image = (-(-n // PROMPT_BUCKET) * PROMPT_BUCKET for n in (tokens, cells))
            found.setdefault(batch_shapes.padded((text, image), self.padding), tokens)
        return found


def _words(number: int) -> str:
    """Returns words of so many tokens."""
    return " ".join(["a"] * number)
