# SPDX-License-Identifier: Apache-2.0
"""Batches of the small worlds: endless examples of all tasks, mixed by shares from the config."""

import dataclasses
import zlib
from collections.abc import Sequence

import grain
import numpy as np
from jaxtyping import Float

from sparse_lavida_jax import config
from sparse_lavida_jax.data.batch import Row, make_row
from sparse_lavida_jax.data.batches import Batches
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.lavida_o.objective import SequenceRow
from sparse_lavida_jax.scenes import digits, tasks
from sparse_lavida_jax.scenes.dice import PhiloxPool
from sparse_lavida_jax.scenes.prompts import Encoder
from sparse_lavida_jax.scenes.task import IMAGE_GROUPS, TEXT_GROUPS, Sample

LENGTH_PROBE = 512  # examples whose lengths decide the static shape of a group
GROUPS = {
    group: [name for name, task in tasks.TABLE.items() if task.group == group]
    for group in (*TEXT_GROUPS, *IMAGE_GROUPS)
}
GROUPS["draw"].append(DIGIT := "digit")


class SceneBatches(Batches):
    """The batches of a configuration on scenes or digits.

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

    def __init__(self, settings: config.Config, encoder: Encoder, **share: int):
        self.encoder, self.probe = encoder, LENGTH_PROBE
        weights = settings.data.tasks
        known = {task for group in GROUPS.values() for task in group}
        if unknown := sorted(set(weights) - known):
            raise config.ConfigError(
                f"Data.tasks has no {', '.join(unknown)}. It has: {', '.join(sorted(known))}."
            )
        if unknown := sorted(set(settings.train.eval_tasks) - set(tasks.TASKS)):
            raise config.ConfigError(
                f"Train.eval_tasks has {', '.join(unknown)}, which nothing judges. Judged are"
                f" {', '.join(tasks.TASKS)}."
            )
        groups = {
            group: [task for task in members if task in weights]
            for group, members in GROUPS.items()
        }
        self.groups = {group: members for group, members in groups.items() if members}
        mute = [name for group in TEXT_GROUPS for name in self.groups.get(group, ())]
        if mute and not settings.diffusion.text_loss:
            raise config.ConfigError(
                f"Diffusion.text_loss=False leaves the tasks {', '.join(mute)} nothing to learn:"
                " leave them out of Data.tasks, or train on text too."
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
        share = {"process_index": self.process_index, "process_count": self.process_count}
        for lesson in sorted(self.settings.data.lessons.values(), key=lambda one: one.until):
            data = dataclasses.replace(self.settings.data, tasks=lesson.tasks, lessons={})
            settings = dataclasses.replace(self.settings, data=data)
            batches = SceneBatches(settings, self.encoder, **share)
            parts.append(batches.dataset()[begin : lesson.until])
            begin = lesson.until
        return grain.MapDataset.concatenate([*parts, mixed]) if parts else mixed

    def probed(self, group: str) -> list[Row]:
        return [self.made(group, number, 0) for number in range(self.probe)]

    def made(self, group: str, number: int, attempt: int) -> Row:
        return self.made_together(group, [number], attempt)[0]

    def made_together(self, group: str, numbers: Sequence[int], attempt: int) -> list[Row]:
        # Step by step instead of row by row: a processor is faster at what it has just done.
        pool = PhiloxPool() if self.released else _POOL  # then rows keep their generators
        rngs = [
            _generator(self.settings.seed, group, number, attempt, pool, place)
            for place, number in enumerate(numbers)
        ]
        up_to = self._shares_up_to[group]
        names = [self.groups[group][up_to.searchsorted(rng.random(), "right")] for rng in rngs]
        indices = [int(rng.integers(2**40)) for rng in rngs]
        seed, draws = self.settings.seed, zip(names, indices, strict=True)
        samples = [
            digits.sample(seed, index) if task == DIGIT else tasks.sample(task, seed, index)
            for task, index in draws
        ]
        examples = [self._example(*one) for one in zip(names, samples, rngs, strict=True)]
        made = zip(examples, rngs, strict=True)
        if self.released:
            return [SequenceRow.of(self.encoder.sequence(example), rng) for example, rng in made]
        return [make_row(example, self.settings, rng) for example, rng in made]

    def _example(
        self, task: str, sample: Sample | digits.Digit, rng: np.random.Generator
    ) -> Example:
        if isinstance(sample, digits.Digit):
            return self.encoder.digit_example(sample)
        extra_blocks = int(rng.integers(4))
        # Tasks derived from others have no plan to drop, and skip this draw.
        with_plan = bool(tasks.TABLE[task].made_of) or rng.random() >= self.settings.data.plan_drop
        share = self.settings.data.edit_keeps if task == "edit" and with_plan else 0.0
        return self.encoder.scene_example(
            sample,
            extra_blocks=extra_blocks,
            with_plan=with_plan,
            keeps=share > 0 and rng.random() < share,
        )


def _cumulated(weights: list[float]) -> Float[np.ndarray, " n"]:
    """Returns cumulative shares, rounded as in `Generator.choice`."""
    shares = np.cumsum(np.array(weights) / np.sum(weights))
    return shares / shares[-1]


_POOL = PhiloxPool()


def _generator(
    seed: int, group: str, index: int, attempt: int, pool: PhiloxPool = _POOL, place: int = 0
) -> np.random.Generator:
    """Returns an independent counter-based generator for a row, from a place of a pool.

    The low words of the counter advance within a row: with `index` there, a row would get the
    numbers of the one before it.
    """
    high, low = divmod((seed << 32) ^ zlib.crc32(group.encode()), 2**64)
    return np.random.Generator(pool.at(place, (low, high), (0, 0, index, attempt)))
