# SPDX-License-Identifier: Apache-2.0
"""A server with a staged model that records its requests."""

import base64
import contextlib
import dataclasses
import io

import pytest
import staged
from PIL import Image

WHY = "pip install 'sparse-lavida-jax[serve]' openai to test the server"
pytest.importorskip("fastapi", reason=WHY)
pytest.importorskip("prometheus_client", reason=WHY)
httpx = pytest.importorskip("httpx2", reason=WHY)
openai = pytest.importorskip("openai", reason=WHY)

from serving_on_loopback import served  # noqa: E402

from sparse_lavida_jax.server import endpoints  # noqa: E402
from sparse_lavida_jax.server.serving import Limits, Service  # noqa: E402

KEY = "a key"


class Asked(staged.Staged):
    """A staged model that records its requests, and finds boxes."""

    def __init__(self):
        super().__init__(batch_size=4)
        self.given = []

    def requests(self, task, words, shown=None, **options):
        self.given.append((task, words, shown, options))
        return super().requests(task, words, shown, **options)

    def run(self, requests, callback, **how):
        found = super().run(requests, callback, **how)
        if requests[0].task == "ground":
            boxes = ((1.0, 2.0, 3.0, 4.0), None)[: len(requests)]
            return dataclasses.replace(found, boxes=boxes)
        return found


@contextlib.contextmanager
def serving(limits=None, **rules):
    """A server with a staged model: its service and its address."""
    service = Service(Asked(), limits or Limits(upload=200_000, longest_wait=0.0))
    with served(lambda *_: endpoints.make_app(service, **rules)) as address:
        yield service, address
        service.pipe.run_free()


@pytest.fixture
def service(free):
    free[0].pipe.run_free()
    free[0].pipe.given.clear()
    return free[0]


@pytest.fixture(scope="module")
def address(free):
    return free[1]


def client_of(address, **how):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, **how)


@pytest.fixture(scope="module")
def client(address):
    return client_of(address)


def png(width=8, height=8, mode="RGB", **how) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG", **how)
    return file.getvalue()


def uri(contents: bytes) -> dict:
    url = "data:image/png;base64," + base64.b64encode(contents).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def said(role, *content):
    return {"role": role, "content": content[0] if len(content) == 1 else list(content)}
