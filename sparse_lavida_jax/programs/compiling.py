# SPDX-License-Identifier: Apache-2.0
"""The seconds that this process spent compiling: in tracing, lowering or the compiler."""

import collections
import time

import jax.monitoring

EVENTS = "/jax/core/compile/"  # how the names of jax's events begin
MOST = 100_000  # events that are remembered; the oldest are forgotten

_spans: collections.deque[tuple[float, float]] = collections.deque(maxlen=MOST)  # begin, end


def _note(event: str, duration_secs: float, **_: object) -> None:
    if event.startswith(EVENTS):
        _spans.append(((end := time.monotonic()) - duration_secs, end))


def seconds(since: float) -> float:
    """Returns how long something was being compiled, counting once what several threads compile.

    Args:
        since: when to begin, in seconds of `time.monotonic`.
    """
    total, reached = 0.0, since
    for begin, end in sorted(span for span in [*_spans] if span[1] > since):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


jax.monitoring.register_event_duration_secs_listener(_note)
