# SPDX-License-Identifier: Apache-2.0
"""A model that takes a step when a test lets it, to look at what stands in a queue."""

import threading

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.apps.serving import ServedModel
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.inference.results import Result, Source
from sparse_lavida_jax.sample import Progress

PATIENCE = 20  # seconds until a test gives up
TOKENS = (np.array([[5], [0]], np.int32),)  # a word and the end of text


class Staged(ServedModel):
    """Takes a step whenever it is let, three for all, and says what it was asked."""

    settings = config.Config()
    source = Source("runs/staged", "ab")

    def __init__(self):
        self.on_step = None
        self.go = threading.Semaphore(0)
        self.at_step = threading.Semaphore(0)
        self.asked, self.together, self.most_together = [], 0, 0

    def ask(self, shown, question, **more):
        self._take_steps("text", question)
        return self._result("ask", question, texts=("b",), tokens=TOKENS)

    def generate(self, prompt, *, on_segment, **more):
        self._take_steps("image", prompt, on_segment)
        return self._result("generate", prompt, pixels=(np.full((2, 2, 3), 9, np.uint8),))

    def preview(self, cells, rows):
        """An image of how many cells are decoded."""
        return np.full((rows, rows, 3), (cells > 0).sum(), np.uint8)

    def _take_steps(self, making, words, on_segment=None):
        self.asked.append(words)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            for step in range(3):
                self.on_step(making, step, 3)
                if step and on_segment:
                    on_segment(after(step))
                self.at_step.release()
                assert self.go.acquire(timeout=PATIENCE)
            self.tokens = 7
            if words == "wrong":
                raise RequestError("no.")
            if words == "broken":
                raise ZeroDivisionError("x")
        finally:
            self.together -= 1

    def _result(self, task, words, **made):
        return Result(task, (words,), (0,), config.Sampling(), self.source, {}, **made)

    def run_free(self):
        self.go.release(1000)


def after(steps):
    """An image of four cells, of which a step decodes one."""
    decoded = np.arange(4) < steps
    canvas = decoded.astype(np.int32)[None, :, None]
    return Progress(canvas, decoded.astype(np.int32)[None], steps, range(1), mask_id=0)
