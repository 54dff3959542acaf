# SPDX-License-Identifier: Apache-2.0
"""The load generator, against a fake server with fixed answers."""

import http.server
import itertools
import json
import os
import threading
import time

import pytest

from benchmarks import serving
from benchmarks.serving import Answered, Load

SECONDS = 0.05  # per answer


@pytest.fixture
def asked():
    """A server whose every third answer is 429: its address and its requests."""
    bodies, count = [], itertools.count()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, json.loads(body)))
            time.sleep(SECONDS)
            contents = b'{"sparse_lavida": {"batch": 4}}'
            self.send_response(429 if next(count) % 3 == 2 else 200)
            self.send_header("Retry-After", "0.2")
            self.send_header("Content-Length", str(len(contents)))
            self.end_headers()
            self.wfile.write(contents)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()


def test_clients_ask_again_when_they_are_answered(asked):
    address, bodies = asked
    load = Load(2, 1.0, mix=(("generate:3", 1.0), ("ask:3", 1.0)))
    found = serving.summary(serving.drive(address, load), load)
    assert 2 <= found["requests"] == len(bodies)
    assert len(bodies) < 2 * 3 * 1.0 / (3 * SECONDS + 0.2) + 4  # it waits after a refusal
    assert found["answered"] + found["rejected"] == found["requests"]
    assert found["rejected"] == found["requests"] // 3
    assert found["failed"] == 0 and set(found["batches"]) == {4}
    assert {path for path, _ in bodies} <= {"/v1/images/generations", "/v1/chat/completions"}
    assert all(body["num_inference_steps"] == 3 for _, body in bodies)
    assert len({body["seed"] for _, body in bodies}) == len(bodies)


def test_a_latency_counts_from_when_a_request_was_due(asked):
    address, _ = asked
    load = Load(1, 0.5, rate=100.0)  # five times what the server answers to one client
    answers = serving.drive(address, load)
    assert all(answer.latency >= SECONDS for answer in answers)
    assert answers[-1].latency > 5 * SECONDS
    assert answers[-1].due < load.seconds
    dues = [due for due, *_ in itertools.islice(serving._arrivals(load), 2000)]
    assert dues == sorted(dues) and 18 < dues[-1] < 22


def test_a_server_that_is_not_there_is_counted():
    load = Load(1, 0.1)
    found = serving.summary(serving.drive("http://127.0.0.1:9", load), load)
    assert found["answered"] == 0 and found["failed"] == found["requests"] > 0
    assert found["images_a_minute"] == 0


def test_rows_hold_percentiles_and_what_was_answered_in_a_minute():
    load = Load(1, 60.0, before=10.0)
    answers = [Answered("generate", 10.0 + i, (i + 1) / 10, 200, 1 + i % 2) for i in range(50)]
    answers.append(Answered("ask", 65.0, 5.0, 200, 1))
    found = serving.summary(answers, load)
    assert found["images_a_minute"] == pytest.approx(50)
    assert found["generate_s"]["p50"] == pytest.approx(2.5)
    assert found["generate_s"]["p99"] == pytest.approx(5.0)
    assert found["batches"] == {1: 26, 2: 25}


def test_memory_of_a_process_is_read():
    held = serving.memory(os.getpid())
    assert 0.01 < held["rss_gb"] <= held["peak_rss_gb"]
