# SPDX-License-Identifier: Apache-2.0
"""Keeps what further requests need again: codes and features of images, and rows of prompts.

A row of a prompt is found by its content: its tokens, their positions and tags, and the pixels of
the images that it sees. So the same question, another seed of an edit, and masks and headers, to
which guidance reduces any prompt of one length, are not passed again. The same image next to other
words is: all tokens of a prompt see each other.

What is kept is found only by the program that would make it, with as many rows in a batch, since
their number may change the rounding. So a result has the same bits with and without this cache.
"""

import collections
import hashlib
import math
import threading
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from sparse_lavida_jax import runtime
from sparse_lavida_jax.sampling.prompts import Prompt
from sparse_lavida_jax.visibility import PAD_BLOCK

Content = Literal["codes", "vision", "prefill"]

# Our choice. At the size of LaViDa-O a guidance row of an image's prompt takes 36 MB, and the three
# of an edit 2.2 GB.
DEFAULT_BYTES, DEFAULT_FRACTION = 4e9, 1 / 20  # whichever is less; of the device's memory
MOST_GB = 10_000


def default_bytes() -> int:
    """Returns the bytes that are kept if nobody says how many."""
    memory = runtime.memory_of(jax.devices()[0]) or math.inf
    return int(min(DEFAULT_BYTES, DEFAULT_FRACTION * memory))


class ContentCache:
    """Least-recently-used cache of arrays by their content, bounded by their bytes.

    It is thread-safe, and holds no model: an entry is found only for the model that made it.

    Args:
        most_bytes: of all entries; 0: nothing is kept; None: `default_bytes`.

    Attributes:
        hits, misses: how many entries were found and not found, by kind: "codes" and "vision" of
            images, "prefill" of guidance rows. Those that are used together are found together.
        tokens: of the prompts that were not passed because their rows were found.
        evicted: entries that were dropped for others, by kind.
        num_bytes: of all entries.
    """

    def __init__(self, most_bytes: int | None = None):
        self.most_bytes = default_bytes() if most_bytes is None else most_bytes
        self.hits: collections.Counter[Content] = collections.Counter()
        self.misses: collections.Counter[Content] = collections.Counter()
        self.evicted: collections.Counter[Content] = collections.Counter()
        self.tokens = self.num_bytes = 0
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def get(
        self, kind: Content, names: Sequence[Hashable], tokens: int = 0
    ) -> tuple[Any, ...] | None:
        """Returns the entries with these names; None if one is missing.

        Args:
            tokens: that need not be passed if they are there.
        """
        keys = [(kind, name) for name in names]
        with self._lock:
            if not self.most_bytes:
                return None
            if not all(key in self._entries for key in keys):
                self.misses[kind] += len(keys)
                return None
            for key in keys:
                self._entries.move_to_end(key)
            self.hits[kind] += len(keys)
            self.tokens += tokens
            return tuple(self._entries[key] for key in keys)

    def add(self, kind: Content, names: Sequence[Hashable], values: Sequence[Any]) -> None:
        """Keeps arrays under these names, and drops what was used longest ago.

        Nothing is kept of arrays that together are larger than the bound.

        Args:
            values: trees of arrays that nobody changes or donates.
        """
        if sum(map(_bytes, values)) > self.most_bytes:
            return
        with self._lock:
            for key, value in zip([(kind, name) for name in names], values, strict=True):
                if key not in self._entries:
                    self._entries[key] = value
                    self.num_bytes += _bytes(value)
            while self.num_bytes > self.most_bytes:
                (evicted, _), value = self._entries.popitem(last=False)
                self.num_bytes -= _bytes(value)
                self.evicted[evicted] += 1

    def clear(self) -> None:
        """Drops all entries."""
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)


def _bytes(value: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(value))


def digest(*arrays: Any) -> str:
    """Returns the SHA-256 of the shapes, types and values of arrays on the host."""
    found = hashlib.sha256()
    for array in map(np.ascontiguousarray, arrays):
        found.update(f"{array.shape} {array.dtype}".encode())
        found.update(array.data)
    return found.hexdigest()


def row_digests(prompt: Prompt, images: Sequence[str]) -> list[str]:
    """Returns for each row of a prompt (on the host) the digest of all that its keys depend on.

    Args:
        images: digests of the images of each request; a row that sees none depends on none.
    """
    streams = jax.tree.leaves((prompt.understanding, prompt.generation))
    assert prompt.understanding is not None  # before it is cached
    seen = [np.any(row >= 0) for row in np.asarray(prompt.understanding.index)]
    own = [digest(*(stream[row] for stream in streams)) for row in range(len(seen))]
    return [one + images[row % len(images)] * bool(seen[row]) for row, one in enumerate(own)]


def num_tokens(prompt: Prompt) -> int:
    """Returns the tokens of all rows of a prompt (on the host), without padding."""
    streams = (prompt.understanding, prompt.generation)
    return sum(int((s.tags.block != PAD_BLOCK).sum()) for s in streams if s is not None)
