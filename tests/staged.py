# SPDX-License-Identifier: Apache-2.0
"""A model that takes a step when a test lets it, to look at what stands in a queue."""

import threading

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.inference.requests import TASKS, Request
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sample import Progress

PATIENCE = 20  # seconds until a test gives up
TOKENS = (np.array([[5], [0]], np.int32),)  # a word and the end of text


class Staged(SparseLaViDa):
    """Takes a step whenever it is let, three for all, and says what it was asked."""

    settings = config.Config()
    source = Origin("runs/staged", "ab")

    def __init__(self):
        self.go = threading.Semaphore(0)
        self.at_step = threading.Semaphore(0)
        self.asked, self.together, self.most_together = [], 0, 0

    def requests(self, task, words, shown=None, **options):
        return [Request(task=task, words=words)]

    def run(self, requests, callback):
        (request,) = requests
        draws = TASKS[request.task].draws
        self._take_steps("image" if draws else "text", request.words, callback)
        made = {"texts": ("b",), "tokens": TOKENS}
        if draws:
            made = {"pixels": (np.full((2, 2, 3), 9, np.uint8),)}
        sampling = self.settings.sampling
        return Result(
            request.task, (request.words,), (0,), sampling, self.source, {}, tokens_passed=7, **made
        )

    def preview(self, cells, rows):
        """An image of how many cells are decoded."""
        return np.full((rows, rows, 3), (cells > 0).sum(), np.uint8)

    def _take_steps(self, making, words, callback):
        self.asked.append(words)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            for step in range(3):
                callback(after(making, step))
                self.at_step.release()
                assert self.go.acquire(timeout=PATIENCE)
            if words == "wrong":
                raise RequestError("no.")
            if words == "broken":
                raise ZeroDivisionError("x")
        finally:
            self.together -= 1

    def run_free(self):
        self.go.release(1000)


def after(making, steps):
    """An image of four cells, of which a step decodes one."""
    decoded = np.arange(4) < steps
    canvas = decoded.astype(np.int32)[None, :, None]
    return Progress(making, steps, 3, canvas, decoded.astype(np.int32)[None], range(1), mask_id=0)
