# SPDX-License-Identifier: Apache-2.0
"""Batches by number: mixed by grain from groups of examples, and resumed at any step.

Every random bit of a row comes from (seed, number), never from a host, a worker or a device. A
batch holds examples of one group, so that its arrays have a static shape, as in the base model's
batching (spec Sec. 9.4).
"""

import abc
import functools
from collections.abc import Sequence
from typing import ClassVar

import grain

from sparse_lavida_jax import config
from sparse_lavida_jax.data.batch import GroupShape, Row, buckets, longest_of
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.tags import StreamNames

MOST_ATTEMPTS = 64  # to draw an example, or a batch, that fits its shape


class Batches(abc.ABC):
    """The training data of a configuration; a subclass makes the rows.

    Args:
        factors: by group, multiplies `train.batch_size`.
        process_index, process_count: among the processes that train together; each makes its
            share of every batch.

    Attributes:
        sizes: examples per batch by group, over all processes.
        shares: share of the batches by group.
        shapes: by group, for those already used; `shape_of` computes the others.
    """

    called: ClassVar[str] = "examples"
    remedy: ClassVar[str]  # what a user can do if examples are too long
    error: ClassVar[type[ValueError]] = ValueError
    multiple: ClassVar[int]  # of tokens, to which shapes are rounded up

    def __init__(
        self,
        settings: config.Config,
        factors: dict[str, float],
        shares: dict[str, float],
        *,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self.settings, self.shares = settings, shares
        self.sizes = _sizes(factors, process_count, settings)
        self.process_index, self.process_count = process_index, process_count
        self.released = settings.diffusion.corruption == "released"
        self.shapes: dict[str, GroupShape] = {}

    @abc.abstractmethod
    def made(self, group: str, number: int, attempt: int) -> Row:
        """Returns the row of this number; a different one for every attempt."""

    def made_together(self, group: str, numbers: Sequence[int], attempt: int) -> list[Row]:
        """Returns the rows of these numbers."""
        return [self.made(group, number, attempt) for number in numbers]

    @abc.abstractmethod
    def probed(self, group: str) -> list[Row]:
        """Returns the rows whose lengths decide the shape of a group."""

    def dataset(self) -> grain.MapDataset:
        """Returns this process's rows of batch i at index i; a slice from step s resumes there."""
        batches = [
            grain.MapDataset.range(2**40).map(functools.partial(self.batch, group))
            for group in self.shares
        ]
        return grain.MapDataset.mix(batches, weights=list(self.shares.values()))

    def samples(self) -> list[Corrupted]:
        """Returns a batch of each shape of the run; none if shapes are not known beforehand."""
        if self.settings.data.length_buckets > 1:
            return []
        return [self.batch(group, 0) for group in self.shares]

    def batch(self, group: str, index: int) -> Corrupted:
        """Returns this process's rows of batch number `index` of a group."""
        share, shape = self.sizes[group] // self.process_count, self.shape_of(group)
        start = index * self.sizes[group] + self.process_index * share
        for again in range(MOST_ATTEMPTS):
            numbers = range(start, start + share)
            made = self.made_together(group, numbers, again * MOST_ATTEMPTS)
            rows = [
                row if self.fits(row, shape) else self.row(group, number, again)
                for number, row in zip(numbers, made, strict=True)
            ]
            batch = rows[0].batch(rows, shape, self.settings)
            if batch is not None:
                return batch
        raise self.error(
            f"{MOST_ATTEMPTS} batches of group {group} are longer than {shape.rows[-1]} tokens a"
            f" row: {self.remedy}"
        )

    def row(self, group: str, number: int, again: int = 0) -> Row:
        """Returns the row at `number`, or if it does not fit, its first redraw that does.

        Args:
            again: how many times its batch was drawn before because it was too long as a whole.
        """
        shape = self.shape_of(group)
        for attempt in range(again * MOST_ATTEMPTS, (again + 1) * MOST_ATTEMPTS):
            row = self.made(group, number, attempt)
            if self.fits(row, shape):
                return row
        raise self.error(
            f"{MOST_ATTEMPTS} {self.called} of group {group} are too long for it ({shape}):"
            f" {self.remedy}"
        )

    @staticmethod
    def fits(row: Row, shape: GroupShape) -> bool:
        """Returns whether a row fits a batch of this shape."""
        return shape.example.holds(row.length) and _num_views(row) <= shape.views

    def shape_of(self, group: str) -> GroupShape:
        """Returns the shape of a group: its longest probed row, rounded up; views likewise."""
        if group in self.shapes:
            return self.shapes[group]
        rows, data = self.probed(group), self.settings.data
        most = data.max_sequence_len
        short = [row for row in rows if row.length.understanding + row.length.generation <= most]
        if not short:
            raise self.error(
                f"every sequence of group {group} is longer than data.max_sequence_len={most}:"
                " raise it, or show smaller images."
            )
        found: set[StreamNames] = {row.predicts for row in rows}
        predicts: StreamNames = next(iter(found)) if len(found) == 1 else "both"
        if predicts == "both" and not self.settings.diffusion.text_loss:
            predicts = "generation"
        lengths = [row.length for row in short]
        example = longest_of(lengths, self.multiple)
        shapes = (example,)
        if data.packing > 1 or data.length_buckets > 1:
            share = self.sizes[group] // self.process_count
            shapes = buckets(lengths, share, data.packing, data.length_buckets, self.multiple)
        shape = GroupShape(example, max(map(_num_views, short)), predicts, shapes)
        self.shapes[group] = shape
        return shape


def _sizes(factors: dict[str, float], processes: int, settings: config.Config) -> dict[str, int]:
    """Returns how many examples a batch of each group has.

    Raises:
        ConfigError: processes cannot share the batches: they do not divide evenly, or each
            process would choose a shape of its own.
    """
    data, batch_size, sizes = settings.data, settings.train.batch_size, {}
    rows = f" in rows of data.packing={data.packing}" if data.packing > 1 else ""
    for group, factor in factors.items():
        sizes[group] = examples = max(1, round(batch_size * factor))
        if examples % (processes * data.packing):
            times = f" times {factor:g}" if factor != 1 else ""
            raise config.ConfigError(
                f"a batch of group {group} (train.batch_size={batch_size}{times}):"
                f" {examples} examples do not divide over {processes} processes{rows}: change"
                " train.batch_size."
            )
    if processes > 1 and data.length_buckets > 1:
        raise config.ConfigError(
            f"data.length_buckets={data.length_buckets}: of {processes} processes each would choose"
            " a length of its own for one batch. Set it to 1."
        )
    return sizes


def _num_views(row: Row) -> int:
    return sum(map(len, row.views))
