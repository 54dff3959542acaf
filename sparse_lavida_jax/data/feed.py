# SPDX-License-Identifier: Apache-2.0
"""The batches of a run in their order, made ahead of time."""

from typing import Any

import grain

from sparse_lavida_jax.diffusion import Corrupted


class Feed:
    """The batches of a run in their order, prefetched by a thread or by worker processes.

    They are the same however many workers make them.

    Args:
        dataset: batch i at index i.
        step: the batch to begin with.
        workers: processes that make batches; 0: one thread.
        saved: `position` before that batch, of an earlier process. A feed with as many workers is
            set to it; one with others begins at `step`.
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
        """Where it stands, as JSON can hold it."""
        return self._begun | {"iterator": self._iterator.get_state()}
