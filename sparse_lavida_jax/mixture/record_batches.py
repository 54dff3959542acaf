# SPDX-License-Identifier: Apache-2.0
"""Batches of the released mixture from prepared records, by number and the same on every machine.

Groups are mixed by weight, batch by batch; within a group every record comes once per epoch, in a
different order each time (ours: the release draws with replacement). All randomness of a row
depends only on (seed, epoch, number of the record in its group), so each process can make its own
rows of a batch.
"""

import dataclasses
import functools
import itertools
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from sparse_lavida_jax import config
from sparse_lavida_jax.data.batch import Row, make_row
from sparse_lavida_jax.data.batches import Batches
from sparse_lavida_jax.data.corrupted_rows import Corrupted
from sparse_lavida_jax.data.files import has_text_name, read_json
from sparse_lavida_jax.data.released_objective import SequenceRow
from sparse_lavida_jax.lavida_o.chat import ChatTokenizer
from sparse_lavida_jax.mixture import preparation_report, prepare, words
from sparse_lavida_jax.mixture.record_examples import MOST_CAPTION, Mixer
from sparse_lavida_jax.mixture.records import Record, RecordError, ShardedRecords

PROBED = 256  # records of a group whose lengths decide its static shape
FEWEST = 100  # records in a group below which none are held back: all are needed for training
MOST_READ = 100_000  # records up to which words are collected; with more, none are
MOST_HELD = 256  # records held back per group
MEASURED = 2**32  # the epoch number of rows for measuring the loss: training never gets that far


class MixtureBatches(Batches):
    """The batches of a prepared folder.

    Args:
        folder: written by `prepare`.
        settings: the whole configuration.
        tokenizer: the one next to the model.
        share: process index and count; see `Batches`.

    Attributes:
        held: by group, the numbers of the records held back from training.
        taken: by group, the numbers of all others.
        orders: by group, the record numbers of its rows, epoch after epoch.

    Raises:
        RecordError: the folder is incomplete.
        ConfigError: it does not fit the model, or its batches do not divide evenly.
    """

    called, error, multiple = "records", RecordError, 64
    remedy = "give long records a length_group of their own, or raise data.max_sequence_len."

    def __init__(
        self,
        folder: pathlib.Path | str,
        settings: config.Config,
        tokenizer: ChatTokenizer,
        **share: int,
    ):
        folder = pathlib.Path(folder)
        self.mixer = Mixer(tokenizer, settings)
        index = read_index(folder)
        _check_tokenizer(index["tokenizer"], settings.model)
        self.records = records_of(folder, index)
        if empty := [group for group, found in self.records.items() if not len(found)]:
            raise RecordError(
                f"{folder} has no records of {', '.join(empty)}: every row was bad or left out."
                f" {folder / preparation_report.READABLE} says why."
            )
        self.held: dict[str, list[int]] = {}
        self.taken: dict[str, grain.MapDataset] = {}
        self.orders: dict[str, grain.MapDataset] = {}
        for group, found in self.records.items():
            seed = _seed(settings.seed, group)
            held = _held(len(found), settings.data.held_out, seed)
            numbers = grain.MapDataset.range(len(found) - len(held))
            self.held[group] = held.tolist()
            self.taken[group] = numbers.map(functools.partial(_past, held - np.arange(len(held))))
            self.orders[group] = self.taken[group].shuffle(seed).repeat()
        weights = np.array([index["weights"][group] for group in self.records])
        shares = dict(zip(self.records, (weights / weights.sum()).tolist(), strict=True))
        factors = {group: index["batch_sizes"][group] for group in self.records}
        super().__init__(settings, factors, shares, **share)

    def captioned(self, count: int) -> list[Record]:
        """Returns the first training records, in the order of the first epoch, with captions.

        Captions are cut as for training, and left out if they are too long for it nevertheless.
        """
        found: list[Record] = []
        for group, records in self.records.items():
            order = itertools.islice(self.orders[group], min(count, len(self.taken[group])))
            for record in (one for i in order if (one := records[i]).kind == "text_to_image"):
                words = record.asked[0][:MOST_CAPTION]
                tokens = len(self.mixer.tokenizer.encode(words)) + self.settings.model.num_cells
                if words.strip() and tokens <= self.settings.data.max_sequence_len:
                    found.append(dataclasses.replace(record, asked=(words,)))
        return found[:count]

    def words(self) -> frozenset[str] | None:
        """Returns the words of the training records; None if there are too many records."""
        if sum(map(len, self.taken.values())) > MOST_READ:
            return None
        return words.learned(
            self.records[group][number]
            for group, taken in self.taken.items()
            for i in range(len(taken))
            if (number := taken[i]) is not None
        )

    def prompts(self, count: int) -> list[str]:
        """Returns captions of images to draw, from the first records that have one."""
        return [record.asked[0] for record in self.captioned(count)]

    def probed(self, group: str) -> list[Row]:
        found = self.records[group]
        numbers = np.unique(np.linspace(0, len(found) - 1, min(PROBED, len(found))).astype(int))
        return [self.row_of(found[i], self._generator(group, 0, i, 0)) for i in numbers.tolist()]

    def made(self, group: str, number: int, attempt: int) -> Row:
        """Returns the row of a group by its number, counted through all epochs.

        A record that is too long is replaced by another, chosen by the same numbers.
        """
        taken, index = self.taken[group], self.orders[group][number]
        assert index is not None
        rng = self._generator(group, number // len(taken), index, attempt)
        if attempt:
            index = taken[int(rng.integers(len(taken)))]
            assert index is not None
        return self.row_of(self.records[group][index], rng)

    def measured(self, group: str, numbers: Sequence[int]) -> Iterator[Corrupted]:
        """Yields batches of the records with these numbers, for measuring the loss.

        The last one is filled up with the first records, masked differently. Records that are too
        long are skipped.
        """
        share, shape = self.sizes[group] // self.process_count, self.shape_of(group)
        rows: list[Row] = []
        for place in range(-(-len(numbers) // share) * share):
            index = numbers[place % len(numbers)]
            rng = self._generator(group, MEASURED, index, place)
            row = self.row_of(self.records[group][index], rng)
            if self.fits(row, shape):
                rows.append(row)
        for start in range(0, len(rows) - share + 1, share):
            batch = rows[start].batch(rows[start : start + share], shape, self.settings)
            if batch is not None:
                yield batch

    def row_of(self, record: Record, rng: np.random.Generator) -> Row:
        """Returns the row of a record.

        Raises:
            RecordError: it does not fit the model or the tokenizer.
        """
        try:
            if self.released:
                return SequenceRow.of(self.mixer.sequence(record, rng), rng)
            return make_row(self.mixer.example(record, rng), self.settings, rng)
        except ValueError as error:
            raise RecordError(f"{record.source} {record.name}: {error}") from error

    def _generator(self, group: str, epoch: int, index: int, attempt: int) -> np.random.Generator:
        # The low word of the counter advances within a row.
        counter, key = [0, attempt, index, epoch], _seed(self.settings.seed, group)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _check_tokenizer(made: dict[str, Any], model: config.Model) -> None:
    """Checks that the records were made with the model's image tokenizer."""
    codes, wanted = made["side"] // made["factor"], model.grid_size * model.codes_side
    if (codes, made["codebook_size"]) != (wanted, model.codebook_size):
        raise config.ConfigError(
            f"the records hold {codes}x{codes} codes of {made['codebook_size']} kinds, and the"
            f" model takes {wanted}x{wanted} of {model.codebook_size}: prepare the data with"
            " the image tokenizer of the model."
        )


def read_index(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the index that `prepare` wrote when it finished a folder.

    Raises:
        RecordError: it is missing, damaged or of another version.
    """
    path = folder / prepare.INDEX
    if not has_text_name(folder):
        raise RecordError(f"{folder} is not text in UTF-8: give the folder another name.")
    try:
        index = read_json(path)
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{path} cannot be read ({error}): is the preparation of {folder} finished? Run it"
            " again; it continues where it stopped."
        ) from error
    index = index if isinstance(index, dict) else {}
    if index.get("format") != prepare.FORMAT:
        raise RecordError(
            f"{path} has format {index.get('format')!r}; this version reads {prepare.FORMAT!r}."
            " Prepare the data again."
        )
    return index


def records_of(folder: pathlib.Path, index: dict[str, Any]) -> dict[str, ShardedRecords]:
    """Returns the records of each group of a prepared folder.

    Args:
        index: from `read_index`.

    Raises:
        RecordError: a shard is missing or has another size.
    """
    shards: dict[str, list[tuple[pathlib.Path, int, int]]] = {}
    for dataset in index["datasets"]:
        files = shards.setdefault(dataset["group"], [])
        files += [(folder / f["file"], f["records"], f["bytes"]) for f in dataset["shards"]]
    return {group: ShardedRecords(files) for group, files in shards.items()}


def _held(count: int, share: float, seed: int) -> Int[np.ndarray, " h"]:
    """Returns the numbers of the records held back, out of `count`, in ascending order."""
    number = min(int(share * count), MOST_HELD) if count >= FEWEST else 0
    return np.sort(np.random.default_rng(seed).choice(count, number, replace=False))


def _past(before: Int[np.ndarray, " h"], index: int) -> int:
    """Returns the number, among all records, of record `index` of those not held back.

    Args:
        before: for each held-back record, how many that are not held back precede it.
    """
    return index + int(np.searchsorted(before, index, side="right"))


def _seed(seed: int, group: str) -> int:
    """Returns a different 32-bit seed for each group, as grain requires."""
    return zlib.crc32(f"{seed} {group}".encode())
