# SPDX-License-Identifier: Apache-2.0
"""The model as a server with OpenAI's endpoints: what `sparse-lavida serve` runs.

    POST /v1/images/generations   openai/image_endpoints.py
    POST /v1/images/edits, branches
    POST /v1/images/surprise      openai/score_endpoints.py
    POST /v1/images/proofs
    POST /v1/chat/completions     openai/chat_endpoint.py
    GET  /v1/models, /v1/models/NAME, /health, /ready, /metrics

Needs the extra packages `sparse-lavida-jax[serve]`. Requests are done in batches
(`serving.Service`); if a client disconnects, the device is free at the end of the phase.
docs/serving.md lists what is supported.
"""

import asyncio
import contextlib
import pathlib
import weakref
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import prometheus_client
from fastapi import HTTPException, responses

from sparse_lavida_jax import __version__
from sparse_lavida_jax.server.openai import (
    asking,
    chat_endpoint,
    http_errors,
    image_endpoints,
    score_endpoints,
)
from sparse_lavida_jax.server.openai.guards import Guard, Rules
from sparse_lavida_jax.server.openai.metrics_endpoint import Metrics, Timed
from sparse_lavida_jax.server.serving import Limits, Service

FORM_ROOM = 2**20  # bytes in a request besides its images

router = fastapi.APIRouter()


def make_app(
    service: Service, hosts: tuple[str, ...] = (), key: str = "", **limits: Any
) -> fastapi.FastAPI:
    """Returns the server.

    Args:
        hosts, key, limits: see `guards.Rules`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = fastapi.FastAPI(title="sparse-lavida", version=__version__, lifespan=lifespan)
    app.state.service = service
    app.state.turns = weakref.WeakValueDictionary()  # of addresses, see `asking.Client`
    app.state.model = pathlib.Path(service.pipe.source.name).name or "model"
    app.state.metrics = Metrics(service)
    for one in (image_endpoints.router, score_endpoints.router, chat_endpoint.router, router):
        app.include_router(one)
    limits = {"body": body_limit(service.limits), **limits}
    app.add_middleware(Guard, rules=Rules(**limits, hosts=hosts, key=key))
    app.add_middleware(Timed, metrics=app.state.metrics)
    http_errors.handle(app)
    return app


def body_limit(limits: Limits) -> int:
    """Returns the bytes that the body of a request may have."""
    return FORM_ROOM + asking.FILES * limits.upload * 4 // 3  # base64 turns three bytes into four


def _card(request: fastapi.Request) -> dict[str, Any]:
    return {"id": request.app.state.model, "object": "model", "created": 0, "owned_by": "local"}


@router.get("/v1/models")
def models(request: fastapi.Request) -> dict[str, Any]:
    """Lists the served model."""
    return {"object": "list", "data": [_card(request)]}


@router.get("/v1/models/{name:path}")
def model(name: str, request: fastapi.Request) -> dict[str, Any]:
    """Describes the served model."""
    asking.check_model(request, name)
    return _card(request)


@router.get("/ready")
def ready(request: fastapi.Request) -> dict[str, Any]:
    """Says that usual requests need no more compiling; until then 503."""
    if not asking.service_of(request).ready:
        raise HTTPException(503, "not ready: it is compiling, or it stops.")
    return {"status": "ready"}


@router.get("/health")
@router.get("/healthz")
def health(request: fastapi.Request) -> dict[str, Any]:
    """Says that the server is up, and how long the queue is."""
    service = asking.service_of(request)
    queue = {"running": service.running, "waiting": service.waiting}
    return {"status": "ok", "model": request.app.state.model, **queue}


@router.get("/metrics")
def metrics(request: fastapi.Request) -> responses.Response:
    """Returns counts and histograms in Prometheus' text format."""
    text = request.app.state.metrics.text()
    return responses.Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)
