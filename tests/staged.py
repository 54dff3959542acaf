# SPDX-License-Identifier: Apache-2.0
"""A model that takes a step when a test lets it, to look at what stands in a queue."""

import threading

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.data.task_prompts import RequestError
from sparse_lavida_jax.results import Result, Source
from sparse_lavida_jax.serving import ServedModel

PATIENCE = 20  # seconds until a test gives up
TOKENS = (np.array([[5], [0]], np.int32),)  # a word and the end of text


class Staged(ServedModel):
    """Takes a step whenever it is let, and says what it was asked."""

    settings = config.Config()
    source = Source("runs/staged", "ab")

    def __init__(self):
        self.on_step = None
        self.go = threading.Semaphore(0)
        self.at_step = threading.Semaphore(0)
        self.asked, self.together, self.most_together = [], 0, 0

    def ask(self, shown, question, **more):
        self.asked.append(question)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            for step in range(3):
                self.on_step("text", step, 3)
                self.at_step.release()
                assert self.go.acquire(timeout=PATIENCE)
            self.tokens = 7
            if question == "wrong":
                raise RequestError("no.")
            if question == "broken":
                raise ZeroDivisionError("x")
        finally:
            self.together -= 1
        return Result(
            "ask",
            (question,),
            (0,),
            config.Sampling(),
            self.source,
            {},
            texts=("b",),
            tokens=TOKENS,
        )

    def run_free(self):
        self.go.release(1000)
