# SPDX-License-Identifier: Apache-2.0
"""A service that gets ever other settings does not grow: it keeps a bounded number of programs."""

import itertools
import pathlib
import statistics

import jax
import numpy as np
import pytest

from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.scenes import tasks, world
from sparse_lavida_jax.server.serving import Limits, Service

PATIENCE, PROGRAMS = 300, 3
MOST_GROWTH = 100 * 2**20  # bytes; one more sampler without a bound takes twice as much
# 20 settings, of which no two share a program.
DRAWN = [
    {"steps": steps, "registers": registers, "sampler": sampler, "layout": False}
    for sampler, steps, registers in itertools.product((None, "dense"), (1, 2, 3, 4), (0, 1))
]
SAID = [{"max_new_tokens": tokens} for tokens in (16, 32, 48, 64)]
SETTINGS = [*(("generate", how) for how in DRAWN), *(("ask", how) for how in SAID)]


@pytest.fixture(scope="module")
def pipe(every_task):
    return SparseLaViDa.from_pretrained(every_task, batch_size=2)


def resident() -> int:
    """Returns the bytes of memory that this process uses."""
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def served(pipe, settings, number):
    """Yields (programs, bytes) after each of `number` requests, which take turns in settings."""
    service = Service(pipe, Limits(programs=PROGRAMS, longest_wait=0.0))
    image = world.render(tasks.sample("edit", 0, 0).image)
    try:
        for i, (task, how) in zip(range(number), itertools.cycle(settings), strict=False):
            shown = image if i % 2 and task == "ask" else None
            ticket = service.submit(task, "a red circle", shown, seed=i, **how)
            ticket.future.result(PATIENCE)
            # A batch is let in while there are fewer than `PROGRAMS`, and has one or two.
            assert len(service._batcher.known) <= PROGRAMS + 1
            yield len(jax.local_devices()[0].client.live_executables()), resident()
        assert service.counts.keys() == {(task, "done") for task, _ in settings}
    finally:
        service.close()


def test_the_programs_of_a_service_are_bounded(pipe):
    settings = [SETTINGS[0], SETTINGS[2], SETTINGS[4], SETTINGS[-1], SETTINGS[6]]
    live = [programs for programs, _ in served(pipe, settings, 3 * len(settings))]
    rounds = np.array(live).reshape(3, -1).max(axis=1)
    assert rounds[2] <= 1.1 * rounds[:2].max()


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_requests_with_twenty_settings(pipe):
    assert len(SETTINGS) == 20
    sizes = [size for _, size in served(pipe, SETTINGS, 1000)]
    early, late = (statistics.median(part) for part in (sizes[100:300], sizes[-200:]))
    assert late - early < MOST_GROWTH
