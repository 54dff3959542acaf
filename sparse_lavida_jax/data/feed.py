# SPDX-License-Identifier: Apache-2.0
"""The batches of a run in order, made ahead of time."""

from typing import Any

import grain

from sparse_lavida_jax.data.worker_processes import WorkerProcesses, default_number


class Feed:
    """The items of a dataset in order, made ahead by a thread or by worker processes.

    The items do not depend on the number of workers.

    Args:
        dataset: item i at index i.
        step: the first item.
        workers: processes that make items; 0: one thread; -1: as suits the device.
        saved: `position` before that item, from an earlier process. A feed with the same number
            of workers continues there; with another number it starts at `step`.
    """

    def __init__(
        self,
        dataset: grain.MapDataset,
        step: int,
        workers: int = 0,
        saved: dict[str, Any] | None = None,
    ):
        workers = default_number() if workers < 0 else workers
        if saved is not None and saved["workers"] != workers:
            saved = None
        begin = step if saved is None else saved["begin"]
        self._begun = {"workers": workers, "begin": begin}
        self._dataset, self._taken = dataset, step - begin
        self._processes: WorkerProcesses | None = None
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self._iterator = iter(dataset[begin:].to_iter_dataset(options))
        if saved is not None:
            self._iterator.set_state(saved["iterator"])

    def start(self) -> None:
        """Starts the worker processes, which otherwise start when the first item is taken."""
        if self._begun["workers"] and self._processes is None:
            first = self._begun["begin"] + self._taken
            self._processes = WorkerProcesses(self._dataset, first, self._begun["workers"])

    def __next__(self) -> Any:
        self.start()
        if self._processes is None:
            return next(self._iterator)
        item = next(self._processes)
        self._taken += 1
        return item

    def close(self) -> None:
        """Ends the thread or the processes."""
        self._iterator.close()
        if self._processes is not None:
            self._processes.close()

    @property
    def position(self) -> dict[str, Any]:
        """The current position, serializable as JSON."""
        if self._begun["workers"]:
            return self._begun | {"iterator": {"next_index": self._taken}}
        return self._begun | {"iterator": self._iterator.get_state()}
