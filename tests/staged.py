# SPDX-License-Identifier: Apache-2.0
"""A model that steps only when a test allows it, to inspect a queue.

The requests of a batch are named by their words, in order: "a b".
"""

import threading
import time
import types

import numpy as np

from sparse_lavida_jax import config
from sparse_lavida_jax.inference.requests import TASK_SPECS, Request
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.sampling import plans, presets
from sparse_lavida_jax.sampling.content_cache import ContentCache
from sparse_lavida_jax.sampling.progress import Progress
from sparse_lavida_jax.sampling.prompts import PromptTokens
from sparse_lavida_jax.sampling.state import NOT_DECODED
from sparse_lavida_jax.tags import FIRST_BLOCK

CELLS = 4
SETTINGS = presets.step_settings(config.Sampling(), config.Config().model, "image")
PATIENCE = 20  # seconds; time limit of a test
TOKENS = (np.array([[5], [0]], np.int32),)  # a word and the end of text


class Staged(SparseLaViDa):
    """Takes a step whenever allowed, three in all, and records its requests."""

    settings = config.Config()
    source = Origin("runs/staged", "ab")
    prompts = types.SimpleNamespace(
        refusal=lambda task: "",
        answer=lambda ids: "b" * (len(ids) > 0),
        vocabulary=None,
        ends=lambda: {0},
        tokenizer=types.SimpleNamespace(encode=str.split),
    )
    codec = None
    content_cache = ContentCache(0)
    batch_size, mesh = 1, None  # not properties here

    def __init__(self, batch_size=1):
        self.batch_size = batch_size
        self.go = threading.Semaphore(0)
        self.at_step = threading.Semaphore(0)
        self.asked, self.together, self.most_together = [], 0, 0

    def requests(self, task, words, shown=None, **options):
        asked = [words] if isinstance(words, str) else words
        most = options.get("max_new_tokens")
        warning = "unknown: 'hexagon'." if "hexagon" in asked else ""
        return [
            Request(task=task, words=one, max_new_tokens=most, warning=warning) for one in asked
        ]

    def run(self, requests, callback, **_):
        task, number = requests[0].task, len(requests)
        draws, words = TASK_SPECS[task].draws, tuple(request.words for request in requests)
        self._take_steps("image" if draws else "text", words, callback)
        made = {"texts": tuple("b" for _ in words), "tokens": TOKENS * number}
        if draws:
            made = {
                "pixels": (np.full((2, 2, 3), 9, np.uint8),) * number,
                "tokens": TOKENS * number,
            }
        settings = self.settings.sampling, self.source
        counts = {"passed": (7,) * number, "prompted": ((2, 0),) * number}
        return Result(task, words, (0,) * number, *settings, {}, **counts, **made)

    def preview(self, cells, rows):
        """An image filled with the number of decoded cells."""
        return np.full((rows, rows, 3), (cells > 0).sum(), np.uint8)

    def _take_steps(self, stage, words, callback):
        self.asked.append(" ".join(words))
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            for step in range(3):
                callback(after(stage, step, len(words)))
                self.at_step.release()
                assert self.go.acquire(timeout=PATIENCE)
            if "wrong" in words:
                raise RequestError("no.")
            if "broken" in words:
                raise ZeroDivisionError("x")
        finally:
            self.together -= 1

    def run_free(self):
        self.go.release(1000)


def after(stage, steps, rows=1, total=3):
    """Images of four cells; each step decodes one. Prompts have two tokens."""
    cells, blocks = np.arange(CELLS), FIRST_BLOCK + np.arange(CELLS, dtype=np.int32)
    responses = np.repeat(cells[None] < steps, rows, axis=0).astype(np.int32)[..., None]
    decoded_at = np.where(responses[..., 0] > 0, blocks, NOT_DECODED)
    step = np.arange(total, dtype=np.int32)
    decode = np.where(step < CELLS, step, plans.PAD_POSITION)[:, None, None].repeat(rows, axis=1)
    plan = plans.SamplingPlan(decode, blocks[None].repeat(rows, axis=0))
    phases = plans.phases(plan, passes_clean="newest", passes_rest=False)
    phases = plans.with_steps(phases, registers=np.array([SETTINGS.num_registers]))
    more = {"plan": phases, "settings": SETTINGS, "prompted": (PromptTokens((2,)),) * rows}
    return Progress(
        stage, steps, total, responses, decoded_at, range(1), 0, (*range(rows),), **more
    )


def until(condition):
    """Waits for a condition, at most `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()
