# SPDX-License-Identifier: Apache-2.0
"""A text tokenizer for prepared records: byte-level BPE with the tokens of `lavida_o/chat.py`.

A model trained from scratch has the prompts of LaViDa-O, so that records, tasks and commands are
the same for both. Its tokenizer is trained on the texts of the records and of the prompts.
"""

import itertools
import pathlib
from collections.abc import Iterable, Iterator

from sparse_lavida_jax.data import byte_pairs, files
from sparse_lavida_jax.data.vocabulary import words_of
from sparse_lavida_jax.lavida_o import chat
from sparse_lavida_jax.mixture.records import Record

LOCATIONS = 65  # LOC coordinates: boxes in 64ths of an image; 1025 in the release
LARGEST_VOCABULARY = 8192
TEXTUAL = (
    *(f"<LOC_{edge}>" for edge in range(LOCATIONS)),
    chat.LOC_BEGIN, chat.LOC_END, chat.PHRASE_BEGIN, chat.PHRASE_END,
)  # fmt: skip
# Words of the prompts around the users' texts.
TEMPLATES = (
    chat.SYSTEM, "system", "user", "assistant", "\n\n", chat.DRAW, chat.LAYOUT, chat.FEEDBACK,
    "Please locate something in this image. " + chat.BOXES_WANTED, chat.verdict_asked("something"),
)  # fmt: skip


def train(path: pathlib.Path, records: Iterable[Record]) -> None:
    """Trains a tokenizer on the texts of records and writes its `tokenizer.json`.

    Raises:
        OSError: it cannot be trained or written (`byte_pairs.train`).
    """
    texts = (text for record in records for text in texts_of(record))
    texts = itertools.chain(TEMPLATES, texts)
    spoken = byte_pairs.train(texts, chat.CONTROL, TEXTUAL, LARGEST_VOCABULARY)
    files.write_text(path, spoken)


def learned(records: Iterable[Record]) -> frozenset[str]:
    """Returns the words of the texts of records."""
    return frozenset(word for one in records for text in texts_of(one) for word in words_of(text))


def texts_of(record: Record) -> Iterator[str]:
    """Yields the texts of a record, each with a leading space, as in a prompt."""
    for text in (*record.asked, *record.answered, record.layout, *record.feedback, *record.phrases):
        if text:
            yield f" {text}"
