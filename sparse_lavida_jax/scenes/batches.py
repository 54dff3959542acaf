# SPDX-License-Identifier: Apache-2.0
"""Batches of training passes: random access by index, mixed, shuffled and resumed by grain.

Every random bit of an example comes from (seed, index), never from a host, a worker or a device.
A batch holds examples of one group, so that its arrays have one static shape: as in the base
model's batching (spec Sec. 9.4).
"""

import dataclasses
import functools
import zlib

import grain
import numpy as np

from sparse_lavida_jax import config, diffusion
from sparse_lavida_jax.data import packing
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.rows import Row, laid_out
from sparse_lavida_jax.diffusion import Blocks, Corrupted, MaskDraws, RowShape, Sequence
from sparse_lavida_jax.scenes import digits, tasks
from sparse_lavida_jax.scenes.encoder import Encoder
from sparse_lavida_jax.sequence import Answer

# Tasks whose sequences have about the same length share a group.
GROUPS = {
    "write": ("plan",),
    "answer": ("answer", "arithmetic", "point", "reflect"),
    "tell": (
        "caption",
        "constrained_caption",
        "infill",
        "detect",
        "locate",
        "name",
        "quiz",
        "edit_plan",
        "fill_plan",
    ),
    "draw": ("draw", "digit"),
    "edit": ("edit", "inpaint", "outpaint"),
}
IMAGE_GROUPS = {"draw", "edit"}  # whose responses are images
LENGTH_PROBE = 512  # examples whose lengths decide the static shape of a group
MOST_ATTEMPTS = 64  # to draw an example, or a batch, that fits its shape
LENGTH_MULTIPLE = 8  # tokens; a shape is rounded up to this


class GroupedBatches:
    """The training data of one configuration.

    Args:
        settings: the whole configuration.
        encoder: makes examples of samples.
        process_index, process_count: of the processes that train together, each of which makes
            its share of every batch.

    Attributes:
        sizes: rows of a batch of each group, over all processes.
    """

    def __init__(
        self,
        settings: config.Config,
        encoder: Encoder,
        *,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self.settings = settings
        self.encoder = encoder
        self.process_index, self.process_count = process_index, process_count
        known = {task for group in GROUPS.values() for task in group}
        if unknown := sorted(set(settings.data.tasks) - known):
            raise config.ConfigError(
                f"Data.tasks has no {', '.join(unknown)}. It has: {', '.join(sorted(known))}."
            )
        self.groups = {
            group: [task for task in members if task in settings.data.tasks]
            for group, members in GROUPS.items()
            if any(task in settings.data.tasks for task in members)
        }
        self.released = settings.diffusion.corruption == "released"
        data, size = settings.data, settings.train.batch_size
        self.sizes = dict.fromkeys(self.groups, size)
        packing.check_shared(f"train.batch_size={size}", size, process_count, data)
        self._check_something_to_learn()
        self.shapes: dict[str, RowShape] = {}  # tokens of one example
        # Tokens of the rows of a batch, where they are not those of one example.
        self.buckets: dict[str, tuple[RowShape, ...]] = {}
        for group in self.groups:
            if self.released:
                self.shapes[group] = self._sequence_shape(group)
                continue
            probed = [
                packing.length_of(self._row_at(group, index)[0]) for index in range(LENGTH_PROBE)
            ]
            self.shapes[group] = packing.longest_of(probed, LENGTH_MULTIPLE)
            if data.packing > 1 or data.length_buckets > 1:
                self.buckets[group] = packing.buckets(
                    probed,
                    size // process_count,
                    data.packing,
                    data.length_buckets,
                    LENGTH_MULTIPLE,
                )

    def dataset(self) -> grain.MapDataset:
        """Returns this process's rows of batch i at index i; a slice from step s resumes there."""
        weights = self.settings.data.tasks
        batches = [
            grain.MapDataset.range(2**40).map(functools.partial(self.batch, group))
            for group in self.groups
        ]
        totals = [sum(weights[task] for task in members) for members in self.groups.values()]
        mixed = grain.MapDataset.mix(batches, weights=[t / sum(totals) for t in totals])
        parts, begin = [], 0
        for lesson in sorted(self.settings.data.lessons.values(), key=lambda one: one.until):
            parts.append(self._of_lesson(lesson).dataset()[begin : lesson.until])
            begin = lesson.until
        return grain.MapDataset.concatenate([*parts, mixed]) if parts else mixed

    def _of_lesson(self, lesson: config.Lesson) -> "GroupedBatches":
        data = dataclasses.replace(self.settings.data, tasks=lesson.tasks, lessons={})
        return GroupedBatches(
            dataclasses.replace(self.settings, data=data),
            self.encoder,
            process_index=self.process_index,
            process_count=self.process_count,
        )

    def batch(self, group: str, index: int) -> Corrupted:
        """Returns this process's rows of the batch number `index` of a group."""
        size = self.sizes[group] // self.process_count
        start = index * self.sizes[group] + self.process_index * size
        if self.released:
            drawn = [self._sequence(group, start + i) for i in range(size)]
            sequences, draws = map(list, zip(*drawn, strict=True))
            return diffusion.batch_sequences(sequences, draws, self.shapes[group], self.settings)
        shapes = self.buckets.get(group, (self.shapes[group],))
        for again in range(MOST_ATTEMPTS):
            rows = [self._row(group, start + i, again) for i in range(size)]
            examples = [example for _, _, example in rows]
            packed = packing.pack(
                [row for row, _, _ in rows],
                [() if e.pixels is None else (e.pixels[None],) for e in examples],
                self.settings,
                shapes,
            )
            if packed is not None:
                break
        else:
            raise ValueError(
                f"{MOST_ATTEMPTS} batches of group {group} are longer than {shapes[-1]}:"
                " LENGTH_PROBE examples do not represent the group."
            )
        batch = diffusion.batch_rows(
            packed.rows,
            [blocks for _, blocks, _ in rows],
            [example.kind for example in examples],
            [None] * len(rows) if packed.shared else [example.pixels for example in examples],
            packed.shape,
            self.settings.model,
            full_attention=self.settings.diffusion.attention != "step_causal",
            shared=packed.shared,
        )
        return dataclasses.replace(batch, pixels=packed.pixels) if packed.shared else batch

    def _row(self, group: str, index: int, again: int = 0) -> tuple[Row, Blocks, Example]:
        """The row at `index`, or the next one of its own stream of retries that fits.

        Args:
            again: how many times its batch was drawn before, and was too long as a whole.
        """
        for attempt in range(again * MOST_ATTEMPTS, (again + 1) * MOST_ATTEMPTS):
            row = self._row_at(group, index, attempt)
            shape = self.shapes[group]
            if len(row[0][0].block) <= shape.understanding and (
                len(row[0][1].block) <= shape.generation
            ):
                return row
        raise ValueError(
            f"{MOST_ATTEMPTS} examples of group {group} in a row are longer than"
            f" {self.shapes[group]}: LENGTH_PROBE examples do not represent the group."
        )

    def _row_at(self, group: str, index: int, attempt: int = 0) -> tuple[Row, Blocks, Example]:
        rng = _generator(self.settings.seed, group, index, attempt)
        example = self._example_of(group, rng)
        return *laid_out(example, self.settings, rng), example

    def _example_of(self, group: str, rng: np.random.Generator) -> Example:
        members = self.groups[group]
        weights = np.array([self.settings.data.tasks[task] for task in members])
        task = members[rng.choice(len(members), p=weights / weights.sum())]
        return self._example(task, int(rng.integers(2**40)), rng)

    def _example(self, task: str, index: int, rng: np.random.Generator) -> Example:
        data = self.settings.data
        if task == "digit":
            return self.encoder.digit_example(digits.sample(self.settings.seed, index))
        if task == "fill_plan":
            drawn = tasks.sample(("inpaint", "outpaint")[index % 2], self.settings.seed, index)
            filled = dataclasses.replace(drawn, answer=drawn.plan, target=None, plan=None)
            return self.encoder.scene_example(filled, extra_blocks=int(rng.integers(4)))
        return self.encoder.scene_example(
            tasks.sample(task, self.settings.seed, index),
            extra_blocks=int(rng.integers(4)),
            with_plan=rng.random() >= data.plan_drop,
        )

    # The released objective: whole sequences, padded with end-of-text to the length of their group.

    def _check_something_to_learn(self) -> None:
        if self.settings.diffusion.text_loss:
            return
        if mute := sorted(set(self.groups) - IMAGE_GROUPS):
            tasks_of = ", ".join(task for group in mute for task in self.groups[group])
            raise config.ConfigError(
                f"Diffusion.text_loss=False leaves the tasks {tasks_of} nothing to learn: leave"
                " them out of Data.tasks, or train on text too."
            )

    def _sequence_shape(self, group: str) -> RowShape:
        """Static token counts; where source cells are dropped they are understanding tokens."""
        found = [self._sequence_at(group, index)[0] for index in range(LENGTH_PROBE)]
        drawn = min(len(sequence.codes) for sequence in found)
        longest = max(sequence.length for sequence in found) - drawn
        cells = max(sequence.num_cells for sequence in found)
        return RowShape(*(-(-n // LENGTH_MULTIPLE) * LENGTH_MULTIPLE for n in (longest, cells)))

    def _sequence(self, group: str, index: int) -> tuple[Sequence, MaskDraws]:
        """The sequence at `index`, or the next one of its stream of retries that fits, padded."""
        for attempt in range(64):
            sequence, rng = self._sequence_at(group, index, attempt)
            left = self.shapes[group].understanding + len(sequence.codes) - sequence.length
            if left >= 0:
                padding = Answer(np.full(left, self.settings.model.end_of_text_id))
                padded = dataclasses.replace(sequence, parts=(*sequence.parts, padding))
                return padded, diffusion.draw(rng, padded)
        raise ValueError(
            f"64 examples of group {group} in a row are longer than {self.shapes[group]}:"
            " LENGTH_PROBE examples do not represent the group."
        )

    def _sequence_at(
        self, group: str, index: int, attempt: int = 0
    ) -> tuple[Sequence, np.random.Generator]:
        rng = _generator(self.settings.seed, group, index, attempt)
        return self.encoder.sequence(self._example_of(group, rng)), rng


def _generator(seed: int, group: str, index: int, attempt: int) -> np.random.Generator:
    """A counter-based generator of its own for every row.

    The counter's low words run within a row: put there, `index` would give a row the numbers of
    the one before it.
    """
    key = (seed << 32) ^ zlib.crc32(group.encode())
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, index, attempt]))
