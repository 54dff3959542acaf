# SPDX-License-Identifier: Apache-2.0
"""What a server counts and measures for Prometheus (`GET /metrics`; docs/serving.md)."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import prometheus_client
import prometheus_client.registry
from prometheus_client import core
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.server.batching import Ticket
from sparse_lavida_jax.server.serving import Service

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = (100, 300, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6)
# Histograms of requests by task: name, description, buckets.
OF_REQUESTS: dict[str, tuple[str, tuple[float, ...]]] = {
    "queue_seconds": ("Seconds from arrival to the beginning of the batch.", SECONDS),
    "compile_seconds": ("Seconds of programs that ran for the first time, where any did.", SECONDS),
    "device_seconds": ("Seconds that the batch had the device.", SECONDS),
    "batch_rows": ("Rows of the batch.", ROWS),
    "request_images": ("Images that were drawn.", ROWS),
    "request_tokens": ("Tokens that passed through the network, layouts included.", TOKENS),
}


class Metrics:
    """Histograms of a service and of its endpoints.

    Attributes:
        registry: all metrics that are exported.
    """

    def __init__(self, service: Service):
        self.registry = prometheus_client.registry.CollectorRegistry()
        self.registry.register(Counts(service))
        self._latency = self._histogram(
            "latency_seconds", "Seconds of an answer.", ("endpoint", "code"), SECONDS
        )
        self._of_requests = {
            name: self._histogram(name, meaning, ("task",), buckets)
            for name, (meaning, buckets) in OF_REQUESTS.items()
        }
        service.watchers.append(self._add)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)

    def answered(self, endpoint: str, code: int, seconds: float) -> None:
        """Records a response."""
        self._latency.labels(endpoint, str(code)).observe(seconds)

    def _histogram(self, name: str, meaning: str, labels, buckets) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            f"sparse_lavida_{name}", meaning, labels, buckets=buckets, registry=self.registry
        )

    def _add(self, ticket: Ticket, outcome: str) -> None:
        if outcome != "done" or ticket.began is None:
            return
        result = ticket.future.result()
        values: dict[str, float] = {
            "queue_seconds": ticket.began - ticket.came,
            "device_seconds": ticket.device,
            "batch_rows": ticket.batch,
            "request_tokens": result.tokens_passed,
        }
        if ticket.first:
            values["compile_seconds"] = ticket.first
        if isinstance(result, Result) and result.pixels:
            values["request_images"] = len(result.pixels)
        for name, value in values.items():
            self._of_requests[name].labels(ticket.task).observe(value)


class Timed:
    """Measures how long each response takes; for a stream, until its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, code = time.monotonic(), 500

        async def watched_send(message: Message) -> None:
            nonlocal code
            code = message.get("status", code)
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        finally:
            route = getattr(scope.get("route"), "path", "other")  # clients may ask for any path
            self.metrics.answered(route, code, time.monotonic() - began)


class Counts(prometheus_client.registry.Collector):
    """The counts of the service."""

    def __init__(self, service: Service):
        self.service = service

    def collect(self) -> Iterator[core.Metric]:
        service, done = self.service, "of requests that were done."
        cache, what = service.pipe.content_cache, "of the content cache."
        counters: list[tuple[str, str, list[str], Mapping[Any, float]]] = [
            ("requests", "Ended requests.", ["task", "outcome"], service.counts),
            ("tokens", f"Device tokens {done}", ["task"], service.tokens),
            ("seconds", f"Device seconds {done}", ["task"], service.seconds),
            ("content_cache_hits", f"Entries found {what}", ["content"], cache.hits),
            ("content_cache_misses", f"Entries not found {what}", ["content"], cache.misses),
            ("content_cache_evicted", f"Dropped entries {what}", ["content"], cache.evicted),
        ]
        for name, meaning, labels, values in counters:
            counter = core.CounterMetricFamily(f"sparse_lavida_{name}", meaning, labels=labels)
            for key, value in sorted(values.items()):
                counter.add_metric([key] if len(labels) == 1 else key, value)
            yield counter
        found = "Tokens of prompts that were found in the content cache, and not passed."
        yield core.CounterMetricFamily("sparse_lavida_content_cache_tokens", found, cache.tokens)
        gauge = core.GaugeMetricFamily
        yield gauge("sparse_lavida_content_cache_bytes", f"Bytes {what}", cache.num_bytes)
        yield gauge("sparse_lavida_waiting", "Requests that wait.", service.waiting)
        yield gauge("sparse_lavida_running", "Requests that run.", int(service.running))
