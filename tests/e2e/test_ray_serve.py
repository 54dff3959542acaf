# SPDX-License-Identifier: Apache-2.0
"""Two replicas behind Ray Serve: one is killed under load, and no request is lost."""

import base64
import concurrent.futures
import importlib
import io
import os
import pathlib
import signal
import socket
import sys
import time

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

# Ray gives its processes a few seconds to start, too few on a busy machine; it reads this early.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
WHY = "pip install 'sparse-lavida-jax[ray]' httpx2 to test the replicas"
ray = pytest.importorskip("ray", reason=WHY)
pytest.importorskip("ray.serve", reason=WHY)
httpx = pytest.importorskip("httpx2", reason=WHY)

from ray import serve  # noqa: E402

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
KEY, PATIENCE, CLIENTS = "a key", 240, 8
WANTED = {"prompt": "a red circle", "num_inference_steps": 2}


@pytest.fixture(scope="module")
def launched():
    sys.path.insert(0, str(LAUNCH))
    yield importlib.import_module("ray_serve")
    sys.path.remove(str(LAUNCH))


@pytest.fixture(scope="module")
def address(launched, every_task):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    path = os.pathsep.join(set(sys.path) - {str(LAUNCH)})  # as with `serve run --app-dir launch`
    here = {"env_vars": {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=here)
    try:
        serve.start(http_options={"port": port})
        how = {"least": 2, "most": 2, "warmup": False, "key": KEY, "routers": 1, "batch_size": 2}
        serve.run(launched.app(launched.Settings(checkpoint=str(every_task), **how)))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def drawn(address, seed):
    """Asks for an image; retries what was answered 503, as OpenAI's client does."""
    headers = {"Authorization": f"Bearer {KEY}"}
    for _ in range(5):
        reply = httpx.post(
            f"{address}/v1/images/generations",
            json=WANTED | {"seed": seed},
            headers=headers,
            timeout=PATIENCE,
        )
        if reply.status_code != 503:
            return reply
        time.sleep(1)
    return reply


def pixels(reply):
    png = base64.b64decode(reply.json()["data"][0]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(png)))


def replicas():
    """Returns the processes of the replicas of the model."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = path.read_bytes()
            if name.startswith(b"ray::") and b"ServeReplica:default:model" in name:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_replica_that_is_killed_under_load_loses_no_request(address):
    assert httpx.get(f"{address}/health", timeout=PATIENCE).json()["status"] == "ok"
    refused = httpx.post(f"{address}/v1/images/generations", json=WANTED, timeout=PATIENCE)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    before = replicas()
    assert len(before) == 2
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(drawn, address, seed) for seed in range(CLIENTS)]
        time.sleep(1)
        assert not all(one.done() for one in asked)
        os.kill(before[0], signal.SIGKILL)
        replies = [one.result(PATIENCE) for one in asked]
    assert [reply.status_code for reply in replies] == [200] * CLIENTS
    # The other replica draws the same pixels; only the record in the PNG may name another batch.
    assert_array_equal(pixels(drawn(address, 0)), pixels(replies[0]))


def test_without_a_key_nothing_is_deployed(launched, monkeypatch):
    monkeypatch.delenv(launched.KEY, raising=False)
    with pytest.raises(ValueError, match="clients need a key"):
        launched.app(launched.Settings())
    assert launched.app(launched.Settings(insecure=True))


def test_a_replica_whose_requests_all_fail_is_not_healthy(launched):
    replica = object.__new__(launched.Replica)
    replica.failures = 0
    for outcome in ["failed"] * 4 + ["done"] + ["failed"] * 5:
        replica.check_health()
        replica._count(None, outcome)
    with pytest.raises(RuntimeError, match="the last 5 requests failed"):
        replica.check_health()
