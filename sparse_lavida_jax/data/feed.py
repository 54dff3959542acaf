# SPDX-License-Identifier: Apache-2.0
"""The batches of a run in order, made ahead of time."""

from typing import Any

import grain

from sparse_lavida_jax.diffusion import Corrupted


class Feed:
    """The batches of a run in order, prefetched by a thread or by worker processes.

    The batches do not depend on the number of workers.

    Args:
        dataset: batch i at index i.
        step: the first batch.
        workers: processes that make batches; 0: one thread.
        saved: `position` before that batch, from an earlier process. A feed with the same number
            of workers continues there; with another number it starts at `step`.
    """

    def __init__(
        self,
        dataset: grain.MapDataset,
        step: int,
        workers: int = 0,
        saved: dict[str, Any] | None = None,
    ):
        if saved is not None and saved["workers"] != workers:
            saved = None
        self._begun = {"workers": workers, "begin": step if saved is None else saved["begin"]}
        batches = dataset[self._begun["begin"] :].to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        )
        if workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        self._iterator = iter(batches)
        if saved is not None:
            self._iterator.set_state(saved["iterator"])

    def __next__(self) -> Corrupted:
        return next(self._iterator)

    def close(self) -> None:
        """Ends the worker processes."""
        self._iterator.close()

    @property
    def position(self) -> dict[str, Any]:
        """The current position, serializable as JSON."""
        return self._begun | {"iterator": self._iterator.get_state()}
