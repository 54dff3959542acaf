# SPDX-License-Identifier: Apache-2.0
"""Caches prefixes that requests share: guidance reduces any prompt to masks and headers.

Their keys and values depend on the parameters, on the length of the prompt and on what follows the
response, and on nothing else in a request. So they are computed once for each such pair.
"""

import collections
import hashlib
import threading
from collections.abc import Callable

import jax
import numpy as np

from sparse_lavida_jax.models.cache import KVCache
from sparse_lavida_jax.sampling.prompts import Prompt
from sparse_lavida_jax.sequence import Kind

# Our choice: at the size of LaViDa-O a prompt of 128 tokens takes 34 MB, that of an edit 530 MB.
MOST_BYTES = 2**30


class Prefixes:
    """Least-recently-used cache of the keys and values of prefixes of one model.

    It is thread-safe.

    Args:
        most_bytes: of all entries; a prefix larger than this is computed for every request.
    """

    def __init__(self, most_bytes: int = MOST_BYTES):
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[str, KVCache] = collections.OrderedDict()
        self.num_bytes = 0  # of all entries

    def get(self, prompt: Prompt, kind: Kind, make: Callable[[], KVCache]) -> KVCache:
        """Returns the cached keys and values of a prompt (on the host), or makes them.

        Args:
            kind: of the response; it decides for which stream the split layers write keys.
        """
        name = f"{kind} {_digest(prompt)}"
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        found = make()
        with self._lock:
            if name not in self._kept:
                self._kept[name] = found
                self.num_bytes += _bytes(found)
            while self.num_bytes > self.most_bytes:
                self.num_bytes -= _bytes(self._kept.popitem(last=False)[1])
        return found

    def __len__(self) -> int:
        return len(self._kept)


def _bytes(kept: KVCache) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(kept))


def _digest(prompt: Prompt) -> str:
    digest = hashlib.sha256()
    for array in map(np.asarray, jax.tree.leaves((prompt.understanding, prompt.generation))):
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
