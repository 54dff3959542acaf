# SPDX-License-Identifier: Apache-2.0
"""Batches of the small world: endless examples of all tasks, mixed by shares from the config."""

import collections
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

import grain
import jax
import numpy as np
from jaxtyping import Float

from sparse_lavida_jax import config
from sparse_lavida_jax.data.batch import Row, RowShape, TrainingRow, longest_of, make_row
from sparse_lavida_jax.data.batches import Batches
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.released_objective import SequenceRow
from sparse_lavida_jax.scenes import tasks
from sparse_lavida_jax.scenes.dice import PhiloxPool
from sparse_lavida_jax.scenes.prompts import ExampleMaker
from sparse_lavida_jax.scenes.task import IMAGE_GROUPS, TEXT_GROUPS, Sample

LENGTH_PROBE = 512  # examples whose lengths decide the static shape of a group
# Packed rows that are padded alike get more room than the probe found: the probe of a large batch
# is a single batch, and one that does not fit is drawn again as a whole.
ROOM, PACKED_MULTIPLE = 1.05, 16
GROUPS = {
    group: members
    for group in (*TEXT_GROUPS, *IMAGE_GROUPS)
    if (members := [name for name, task in tasks.TABLE.items() if task.group == group])
}


class SceneBatches(Batches):
    """The batches of a configuration on scenes.

    Args:
        settings: the whole configuration.
        encoder: turns samples into examples.
        share: process index and count; see `Batches`.

    Raises:
        ConfigError: an unknown task, tasks with nothing to learn, or a batch that does not divide
            evenly.
    """

    remedy = "raise data.max_sequence_len, or leave the tasks with long examples out of data.tasks."
    multiple = 8
    world: ClassVar[Any] = tasks  # the package of its tasks
    stream = ""  # of random numbers: a lesson has its own, so that no example comes twice
    tasks_of = GROUPS

    def __init__(self, settings: config.Config, encoder: ExampleMaker, **share: int):
        self.encoder, self.probe = encoder, LENGTH_PROBE
        self._kinds: list[tuple[SceneBatches, str]] = []  # a group of each shape of the run
        weights = settings.data.tasks
        known = {task for group in self.tasks_of.values() for task in group}
        if unknown := sorted(set(weights) - known):
            raise config.ConfigError(
                f"Data.tasks has no {', '.join(unknown)}. It has: {', '.join(sorted(known))}."
            )
        if unknown := sorted(set(settings.train.eval_tasks) - set(self.world.TASKS)):
            raise config.ConfigError(
                f"Train.eval_tasks has {', '.join(unknown)}, which have no judge. Tasks with a"
                f" judge: {', '.join(self.world.TASKS)}."
            )
        groups = {
            group: [task for task in members if task in weights]
            for group, members in self.tasks_of.items()
        }
        self.groups = {group: members for group, members in groups.items() if members}
        mute = [name for group in TEXT_GROUPS for name in self.groups.get(group, ())]
        if mute and not settings.diffusion.text_loss:
            raise config.ConfigError(
                f"Diffusion.text_loss=False leaves the tasks {', '.join(mute)} nothing to learn:"
                " leave them out of Data.tasks, or train on text too."
            )
        self._takes_one_shape = (
            settings.data.length_buckets == 1 and settings.diffusion.corruption == "blocks"
        )
        if settings.data.shapes == "run" and not self._takes_one_shape:
            raise config.ConfigError(
                'Data.shapes="run" needs data.length_buckets=1 and diffusion.corruption="blocks".'
            )
        self._shares_up_to = {
            group: _cumulated([weights[task] for task in members])
            for group, members in self.groups.items()
        }
        totals = [sum(weights[task] for task in members) for members in self.groups.values()]
        super().__init__(
            settings,
            dict.fromkeys(self.groups, 1.0),
            {group: total / sum(totals) for group, total in zip(self.groups, totals, strict=True)},
            **share,
        )

    def dataset(self) -> grain.MapDataset:
        """Returns this process's rows of batch i at index i; lessons come first."""
        parts, begin, mixed = [], 0, super().dataset()
        for until, batches in self._lessons:
            parts.append(super(SceneBatches, batches).dataset()[begin:until])
            begin = until
        return grain.MapDataset.concatenate([*parts, mixed]) if parts else mixed

    @functools.cached_property
    def _lessons(self) -> "list[tuple[int, SceneBatches]]":
        """The batches of each lesson, with its end; all are padded alike if that is asked for."""
        lessons, data = list[tuple[int, SceneBatches]](), self.settings.data
        share = {"process_index": self.process_index, "process_count": self.process_count}
        for lesson in sorted(data.lessons.values(), key=lambda one: one.until):
            taught = dataclasses.replace(data, tasks=lesson.tasks, lessons={})
            settings = dataclasses.replace(self.settings, data=taught)
            batches = type(self)(settings, self.encoder, **share)
            batches.stream = f"lesson until {lesson.until}/"
            lessons.append((lesson.until, batches))
        shapes = data.shapes or ("lesson" if jax.default_backend() == "cpu" else "run")
        if shapes == "run" and self._takes_one_shape:
            self._kinds = _pad_alike([*(batches for _, batches in lessons), self])
        return lessons

    def samples(self) -> list[Corrupted]:
        """Returns a batch of each shape if shapes are those of the run, else none."""
        return [batches.batch(group, 0) for batches, group in self._kinds]

    def probed(self, group: str) -> list[Row]:
        return [self.made(group, number, 0) for number in range(self.probe)]

    def made(self, group: str, number: int, attempt: int) -> Row:
        return self.made_together(group, [number], attempt)[0]

    def made_together(self, group: str, numbers: Sequence[int], attempt: int) -> list[Row]:
        # Step by step instead of row by row: a processor is faster at what it has just done.
        pool = PhiloxPool() if self.released else _POOL  # then rows keep their generators
        rngs = [
            _generator(self.settings.seed, self.stream + group, number, attempt, pool, place)
            for place, number in enumerate(numbers)
        ]
        draws = [self._drawn(group, rng) for rng in rngs]
        samples = [self.sample(task, index) for task, index in draws]
        names = [task for task, _ in draws]
        examples = [self._example(*one) for one in zip(names, samples, rngs, strict=True)]
        made = zip(examples, rngs, strict=True)
        if self.released:
            return [SequenceRow.of(self.encoder.sequence(example), rng) for example, rng in made]
        return [make_row(example, self.settings, rng) for example, rng in made]

    def first(self, task: str, count: int) -> list[Sample]:
        """Returns the first examples of a task that a run shows after its lessons."""
        group = next(group for group, members in self.groups.items() if task in members)
        rngs = (
            _generator(self.settings.seed, self.stream + group, number, 0)
            for number in itertools.count()
        )
        indices = (
            index for name, index in (self._drawn(group, rng) for rng in rngs) if name == task
        )
        return [self.sample(task, index) for index in itertools.islice(indices, count)]

    def _drawn(self, group: str, rng: np.random.Generator) -> tuple[str, int]:
        """Returns the task of a row, and the number of its example."""
        up_to = self._shares_up_to[group]
        name = self.groups[group][up_to.searchsorted(rng.random(), "right")]
        return name, int(rng.integers(2**40))

    def sample(self, task: str, index: int) -> Sample:
        """Returns a training example of a task."""
        return self.world.sample(task, self.settings.seed, index)

    def _example(self, task: str, sample: Sample, rng: np.random.Generator) -> Example:
        extra_blocks = int(rng.integers(4))
        # Tasks derived from others have no layout to drop, and skip this draw.
        with_layout = (
            bool(self.world.TABLE[task].made_of) or rng.random() >= self.settings.data.layout_drop
        )
        share = self.settings.data.edit_keeps if task == "edit" and with_layout else 0.0
        return self.encoder.scene_example(
            sample,
            extra_blocks=extra_blocks,
            with_layout=with_layout,
            keeps=share > 0 and rng.random() < share,
        )


def _pad_alike(lessons: "Sequence[SceneBatches]") -> "list[tuple[SceneBatches, str]]":
    """Pads all batches whose rows have the same streams to one shape: `data.shapes="run"`.

    Which examples fit a group does not change. Every shape is a program, which takes a GPU ten
    seconds to compile; without this, each group has one in every lesson.

    Returns:
        A group of each shape, with its batches.
    """
    alike = collections.defaultdict(list)
    for batches in lessons:
        for group in batches.groups:
            shape, row = batches.shape_of(group), batches.made(group, 0, 0)
            assert isinstance(row, TrainingRow)
            sees = row.example.pixels is not None
            alike[shape.predicts, shape.views, sees].append((batches, group, shape))
    for members in alike.values():
        rows = longest_of([shape.rows[-1] for *_, shape in members], SceneBatches.multiple)
        if lessons[0].settings.data.packing > 1:
            rows = longest_of([RowShape(*(int(ROOM * n) for n in rows))], PACKED_MULTIPLE)
        for batches, group, shape in members:
            batches.shapes[group] = dataclasses.replace(shape, rows=(rows,))
    return [members[-1][:2] for members in alike.values()]


def _cumulated(weights: list[float]) -> Float[np.ndarray, " n"]:
    """Returns cumulative shares, rounded as in `Generator.choice`."""
    shares = np.cumsum(np.array(weights) / np.sum(weights))
    return shares / shares[-1]


_POOL = PhiloxPool()


def _generator(
    seed: int, stream: str, index: int, attempt: int, pool: PhiloxPool = _POOL, place: int = 0
) -> np.random.Generator:
    """Returns an independent counter-based generator for a row, from a place of a pool.

    The low words of the counter advance within a row: with `index` there, a row would get the
    numbers of the one before it.
    """
    high, low = divmod((seed << 32) ^ zlib.crc32(stream.encode()), 2**64)
    return np.random.Generator(pool.at(place, (low, high), (0, 0, index, attempt)))
