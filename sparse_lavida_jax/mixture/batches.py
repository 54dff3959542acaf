# SPDX-License-Identifier: Apache-2.0
"""Batches of the released mixture from prepared records, by number and the same on every machine.

Groups are mixed by weight, batch by batch; within a group every record comes once an epoch, in
another order each (ours: the release draws with replacement). What is random in a row depends on
(seed, epoch, number of the record in its group), never on a host, a worker or a device: of a batch
each process makes its own rows.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import zlib
from typing import Any

import grain
import numpy as np

from sparse_lavida_jax import config, diffusion
from sparse_lavida_jax.data import packing
from sparse_lavida_jax.data.rows import laid_out
from sparse_lavida_jax.diffusion import Corrupted, Predicts, RowShape
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.mixture import prepare
from sparse_lavida_jax.mixture.examples import Mixer
from sparse_lavida_jax.mixture.records import Record, RecordError, ShardedRecords
from sparse_lavida_jax.sequence import Answer, Text, Views

PROBED = 256  # records of a group whose lengths decide its static shape
LENGTH_MULTIPLE = 64  # tokens; a shape is rounded up to this
MOST_ATTEMPTS = 64  # records that are tried for one row


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static shape of a group.

    Attributes:
        tokens: of an example in both streams.
        views: of the vision tower, likewise.
        predicts: the streams that hold responses.
        buckets: tokens of the rows of a batch, where they are not those of an example.
    """

    tokens: RowShape
    views: int
    predicts: Predicts
    buckets: tuple[RowShape, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row before it is padded: what a batch stacks, how long it is, what it shows."""

    made: tuple[Any, ...]
    tokens: RowShape
    views: tuple[Views, ...]
    kinds: frozenset[str]

    @property
    def num_views(self) -> int:
        return sum(map(len, self.views))


class MixtureBatches:
    """The batches of a prepared folder.

    Args:
        folder: what `prepare` wrote.
        settings: the whole configuration.
        tokenizer: the one that lies beside the model.
        process_index, process_count: of the processes that train together, each of which makes
            its share of every batch.

    Raises:
        RecordError: the folder is not whole.
        ConfigError: it does not fit the model, or its batches do not divide.
    """

    def __init__(
        self,
        folder: pathlib.Path | str,
        settings: config.Config,
        tokenizer: ChatTokenizer,
        *,
        process_index: int = 0,
        process_count: int = 1,
    ):
        folder = pathlib.Path(folder)
        self.settings, self.mixer = settings, Mixer(tokenizer, settings)
        self.process_index, self.process_count = process_index, process_count
        self.released = settings.diffusion.corruption == "released"
        self.index = read_index(folder)
        self._check_tokenizer()
        shards: dict[str, list[tuple[pathlib.Path, int, int]]] = {}
        for dataset in self.index["datasets"]:
            files = shards.setdefault(dataset["group"], [])
            files += [(folder / f["file"], f["records"], f["bytes"]) for f in dataset["shards"]]
        self.records = {group: ShardedRecords(files) for group, files in shards.items()}
        if empty := [group for group, found in self.records.items() if not len(found)]:
            raise RecordError(
                f"{folder} has no records of {', '.join(empty)}: every row was bad or left out."
                f" {folder / prepare.READABLE} says why."
            )
        self.sizes = {group: self._size(group) for group in shards}
        self.orders = {
            group: grain.MapDataset.range(len(found)).shuffle(_seed(settings.seed, group)).repeat()
            for group, found in self.records.items()
        }
        self.shapes = {group: self._shape(group) for group in shards}

    def dataset(self) -> grain.MapDataset:
        """Returns this process's rows of batch i at index i; a slice from step s resumes there."""
        batches = [
            grain.MapDataset.range(2**40).map(functools.partial(self.batch, group))
            for group in self.records
        ]
        weights = np.array([self.index["weights"][group] for group in self.records])
        return grain.MapDataset.mix(batches, weights=(weights / weights.sum()).tolist())

    def prompts(self, count: int) -> list[str]:
        """Returns captions of images to draw, of the first records that have one."""
        found = (
            record.asked[0]
            for records in self.records.values()
            for record in map(records.__getitem__, range(min(len(records), count)))
            if record.kind == "text_to_image"
        )
        return list(itertools.islice(found, count))

    def batch(self, group: str, index: int) -> Corrupted:
        """Returns this process's rows of the batch number `index` of a group."""
        share = self.sizes[group] // self.process_count
        start = index * self.sizes[group] + self.process_index * share
        for again in range(MOST_ATTEMPTS):
            rows = [self.row(group, start + i, again) for i in range(share)]
            batch = self._stacked(rows, self.shapes[group])
            if batch is not None:
                return batch
        raise RecordError(
            f"{MOST_ATTEMPTS} batches of group {group} are longer than"
            f" {self.shapes[group].buckets[-1]} tokens a row: records of another length need a"
            " length_group of their own."
        )

    def row(self, group: str, number: int, again: int = 0) -> _Row:
        """Returns the row of a group by its number, counted through all epochs.

        Of a record that is too long for the group another is taken, chosen by the same numbers.

        Args:
            again: how many times its batch was drawn before, and was too long as a whole.

        Raises:
            RecordError: so many are too long in a row that the group's shape must be wrong.
        """
        found, shape = self.records[group], self.shapes[group]
        index = self.orders[group][number]
        assert index is not None
        epoch = number // len(found)
        for attempt in range(again * MOST_ATTEMPTS, (again + 1) * MOST_ATTEMPTS):
            rng = self._generator(group, epoch, index, attempt)
            chosen = index if not attempt else int(rng.integers(len(found)))
            row = self._made(found[chosen], rng)
            if _fits(row, shape):
                return row
        raise RecordError(
            f"{MOST_ATTEMPTS} records of group {group} are too long for it ({shape}): give long"
            " ones a length_group of their own, or raise data.max_sequence_len."
        )

    def _generator(self, group: str, epoch: int, index: int, attempt: int) -> np.random.Generator:
        # The counter's low word runs within a row.
        counter = [0, attempt, index, epoch]
        return np.random.Generator(
            np.random.Philox(key=_seed(self.settings.seed, group), counter=counter)
        )

    def _made(self, record: Record, rng: np.random.Generator) -> _Row:
        try:
            if self.released:
                sequence = self.mixer.sequence(record, rng)
                text = sequence.length - len(sequence.codes)
                kinds = frozenset({"image"} if len(sequence.codes) else ()) | {"text"}
                return _Row(
                    (sequence, rng), RowShape(text, sequence.num_cells), sequence.views, kinds
                )
            example = self.mixer.example(record, rng)
            row, blocks = laid_out(example, self.settings, rng)
        except ValueError as error:
            raise RecordError(f"{record.source} {record.name}: {error}") from error
        tokens = RowShape(*(len(stream.block) for stream in row))
        kinds = frozenset({example.kind})
        return _Row((row, blocks, example.kind), tokens, example.views, kinds)

    # Shapes.

    def _shape(self, group: str) -> Shape:
        """The longest of the probed rows that are not too long, rounded up; views likewise."""
        found = self.records[group]
        numbers = np.unique(np.linspace(0, len(found) - 1, min(PROBED, len(found))).astype(int))
        rows = [self._made(found[int(i)], self._generator(group, 0, int(i), 0)) for i in numbers]
        most = self.settings.data.max_sequence_len
        short = [row for row in rows if row.tokens.understanding + row.tokens.generation <= most]
        if not short:
            raise RecordError(
                f"every sequence of group {group} is longer than data.max_sequence_len={most}:"
                " raise it, or show smaller images."
            )
        kinds = frozenset().union(*(row.kinds for row in rows))
        predicts: Predicts = "both"
        if kinds == {"text"}:
            predicts = "understanding"
        elif kinds == {"image"} or not self.settings.diffusion.text_loss:
            predicts = "generation"
        lengths, data = [row.tokens for row in short], self.settings.data
        buckets: tuple[RowShape, ...] = ()
        if data.packing > 1 or data.length_buckets > 1:
            share = self.sizes[group] // self.process_count
            buckets = packing.buckets(
                lengths, share, data.packing, data.length_buckets, LENGTH_MULTIPLE
            )
        return Shape(
            packing.longest_of(lengths, LENGTH_MULTIPLE),
            max(row.num_views for row in short),
            predicts,
            buckets,
        )

    def _size(self, group: str) -> int:
        """Examples of a batch of a group, over all processes."""
        factor, data = self.index["batch_sizes"][group], self.settings.data
        rows = max(1, round(self.settings.train.batch_size * factor))
        what = f"a batch of group {group} (train.batch_size={self.settings.train.batch_size} times"
        packing.check_shared(f"{what} {factor:g})", rows, self.process_count, data)
        return rows

    # Batches.

    def _stacked(self, rows: list[_Row], shape: Shape) -> Corrupted | None:
        """Stacks the rows; None where together they are too long."""
        vision = self.settings.model.vision
        views = [packing.with_blanks(row.views, shape.views, vision) for row in rows]
        stack = self._stacked_sequences if self.released else self._stacked_examples
        batch = stack(rows, views, shape)
        return batch and dataclasses.replace(batch, predicts=shape.predicts)

    def _stacked_sequences(self, rows, views, shape: Shape) -> Corrupted:
        sequences, draws, tokens = [], [], shape.tokens
        for row, shown in zip(rows, views, strict=True):
            sequence, rng = row.made
            # Padding is learned where the row's text is (spec Sec. 9.1).
            clean = not any(isinstance(part, Answer) for part in sequence.parts)
            padding = np.full(
                tokens.understanding - row.tokens.understanding, self.settings.model.end_of_text_id
            )
            pad = Text(padding, keep=True) if clean else Answer(padding)
            padded = dataclasses.replace(sequence, parts=(*sequence.parts, pad), views=shown)
            sequences.append(padded)
            draws.append(diffusion.draw(rng, padded))
        return diffusion.batch_sequences(sequences, draws, tokens, self.settings)

    def _stacked_examples(self, rows, views, shape: Shape) -> Corrupted | None:
        packed = packing.pack(
            [row.made[0] for row in rows], views, self.settings, shape.buckets or (shape.tokens,)
        )
        if packed is None:
            return None
        batch = diffusion.batch_rows(
            packed.rows,
            [row.made[1] for row in rows],
            [row.made[2] for row in rows],
            [None] * len(rows),
            packed.shape,
            self.settings.model,
            full_attention=self.settings.diffusion.attention != "step_causal",
            shared=packed.shared,
        )
        return dataclasses.replace(batch, pixels=packed.pixels)

    def _check_tokenizer(self) -> None:
        made, model = self.index["tokenizer"], self.settings.model
        codes, wanted = made["side"] // made["factor"], model.grid_size * model.codes_side
        if (codes, made["codebook_size"]) != (wanted, model.codebook_size):
            raise config.ConfigError(
                f"the records hold {codes}x{codes} codes of {made['codebook_size']} kinds, and the"
                f" model takes {wanted}x{wanted} of {model.codebook_size}: prepare the data with"
                " the image tokenizer of the model."
            )


def read_index(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what `prepare` wrote of a folder when it was done.

    Raises:
        RecordError: nothing is there, or it is damaged or of another version.
    """
    path = folder / prepare.INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{path} cannot be read ({error}): is the preparation of {folder} finished? Run it"
            " again; it goes on where it was."
        ) from error
    if index.get("format") != prepare.FORMAT:
        raise RecordError(
            f"{path} has format {index.get('format')!r}; this version reads {prepare.FORMAT!r}."
            " Prepare the data again."
        )
    return index


def _seed(seed: int, group: str) -> int:
    """Returns a seed of its own for each group, of 32 bits as grain wants it."""
    return zlib.crc32(f"{seed} {group}".encode())


def _fits(row: _Row, shape: Shape) -> bool:
    return (
        row.tokens.understanding <= shape.tokens.understanding
        and row.tokens.generation <= shape.tokens.generation
        and row.num_views <= shape.views
    )
