# SPDX-License-Identifier: Apache-2.0
"""The server of `sparse-lavida serve` on a Ray cluster: replicas of one model and a router.

    pip install 'sparse-lavida-jax[ray]'
    export SPARSE_LAVIDA_API_KEY=...
    serve run --app-dir launch ray_serve:app checkpoint=models/mine gpus=1 most=8

Arguments are the fields of `Settings`. Every node needs the package, and the model folder at the
same path. Ray's proxy listens on port 8000 of this machine; `serve start --http-host 0.0.0.0`
before lets other machines in.

Every replica has the queue of `sparse_lavida_jax.server.batching`. Ray's own `@serve.batch` would
combine whatever calls arrive together and run one batch after another; but only rows of one kind
share a compiled program, kinds take turns at the ends of phases, and a row may be cancelled or
streamed by itself.

The router passes each request to a replica. If that replica dies before its answer has begun,
another one gets the request; the result is the same, since it depends on the request only.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import pydantic
from ray import cloudpickle, serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import Message, Receive, Scope, Send

from sparse_lavida_jax.cli.arguments import DEFAULT_MODEL
from sparse_lavida_jax.cli.hosting import KEY
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.server import endpoints
from sparse_lavida_jax.server.batching import Ticket
from sparse_lavida_jax.server.openai import http_errors
from sparse_lavida_jax.server.openai.guards import Guard, Rules
from sparse_lavida_jax.server.serving import Limits, Service

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not find this file

ATTEMPTS = 3  # at a request, each on another replica
FAILURES = 5  # requests in a row that failed for no reason of theirs: the replica is replaced
HEALTH_SECONDS = 10.0  # between two checks of a replica
ROUTER_REQUESTS = 10_000  # that a router passes on at the same time
# What the server reads of a request; the rest cannot be sent to another process.
SCOPE = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
    "root_path", "headers", "client", "server",
)  # fmt: skip


class Settings(pydantic.BaseModel, extra="forbid"):
    """What is served, and where.

    Attributes:
        checkpoint, adapters, convert, batch_size: as for `sparse-lavida serve`.
        mesh: sizes of the axes over which every replica splits its model, as tensor=4; by default
            a replica uses one device.
        waiting: requests that may wait at a replica; further ones get 429.
        warmup: compiles before a replica gets its first request.
        least, most: replicas. Ray starts more when each has more than a batch of requests.
        routers: processes that pass requests to replicas.
        cpus, gpus, tpus: of a replica; TPUs are chips.
        grace: seconds that a replica that is taken away has to finish.
        key: that clients must send; by default $SPARSE_LAVIDA_API_KEY.
        insecure: serves without a key.
    """

    checkpoint: str = DEFAULT_MODEL
    adapters: str = ""
    convert: bool = False
    batch_size: int = pydantic.Field(16, ge=1, le=1024)
    mesh: str = ""
    waiting: int = pydantic.Field(64, ge=1)
    warmup: bool = True
    least: int = pydantic.Field(1, ge=1)
    most: int = pydantic.Field(1, ge=1)
    routers: int = pydantic.Field(2, ge=1)
    cpus: float = pydantic.Field(1, ge=0)
    gpus: float = pydantic.Field(0, ge=0)
    tpus: int = pydantic.Field(0, ge=0)
    grace: float = pydantic.Field(60, ge=0)
    key: str = pydantic.Field("", repr=False)
    insecure: bool = False


class Replica:
    """A model with its queue, in a process of its own."""

    def __init__(self, settings: Settings):
        keep_programs()
        sizes = (part.split("=") for part in settings.mesh.split(",") if part)
        pipe = SparseLaViDa.from_pretrained(
            settings.checkpoint,
            settings.batch_size,
            mesh={axis: int(size) for axis, size in sizes} or None,
            adapters=settings.adapters,
            convert=settings.convert,
        )
        self.service = Service(pipe, Limits(waiting=settings.waiting))
        self.app = endpoints.make_app(self.service, key=settings.key)
        self.failures = 0
        self.service.watchers.append(self._count)
        self._running: set[asyncio.Task[None]] = set()
        if settings.warmup:
            self.service.warm_up().join()

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yields the messages of the response to a request."""
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        bodies: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Message:
            if bodies:
                return bodies.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self.app(scope, receive, said.put)
            finally:
                said.put_nowait(None)

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            while (message := await said.get()) is not None:
                yield message
        finally:
            left.set()

    def check_health(self) -> None:
        """Raises if the device seems to be broken; Ray then replaces this replica."""
        if self.failures >= FAILURES:
            raise RuntimeError(f"the last {self.failures} requests failed.")

    def _count(self, _: Ticket, outcome: str) -> None:
        if outcome in ("done", "failed"):
            self.failures = self.failures + 1 if outcome == "failed" else 0

    def __del__(self):
        if hasattr(self, "service"):
            self.service.close()


class Router:
    """What clients reach: hands each request to a replica, and if that dies, to another one."""

    def __init__(self, replicas: Any, rules: Rules):
        self.replicas = replicas.options(method_name="answer", stream=True)
        self.rules = rules

    def __serve_build_asgi_app__(self) -> fastapi.FastAPI:
        app = fastapi.FastAPI(openapi_url=None)
        app.mount("/", self.forward)
        app.add_middleware(Guard, rules=self.rules)
        http_errors.handle(app)
        return app

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request.

        Raises:
            HTTPException: no replica survived it.
        """
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        plain = {name: scope[name] for name in SCOPE if name in scope}
        for _ in range(ATTEMPTS):
            begun, response = False, self.replicas.remote(plain, bytes(body))
            try:
                async for message in response:
                    begun = True
                    await send(message)
                return
            except asyncio.CancelledError:  # the client left
                response.cancel()
                raise
            except (RayActorError, DeploymentUnavailableError):
                if begun:
                    raise
        retry = {"Retry-After": str(http_errors.RETRY_SECONDS)}
        raise fastapi.HTTPException(503, "the machine that did this has stopped: try again.", retry)


def app(settings: Settings) -> serve.Application:
    """Returns what `serve run` deploys.

    Raises:
        ValueError: neither a key nor `insecure` is given.
    """
    settings = settings.model_copy(update={"key": settings.key or os.environ.get(KEY, "")})
    if not settings.key and not settings.insecure:
        raise ValueError(f"clients need a key: set {KEY}, or insecure=true to let everybody in.")
    model = serve.deployment(
        Replica,
        name="model",
        max_ongoing_requests=settings.waiting + settings.batch_size,
        autoscaling_config={
            "min_replicas": settings.least,
            "max_replicas": max(settings.least, settings.most),
            "target_ongoing_requests": settings.batch_size,
        },
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.grace,
        ray_actor_options={
            "num_cpus": settings.cpus,
            "num_gpus": settings.gpus,
            "resources": {"TPU": settings.tpus} if settings.tpus else {},
        },
    )
    router = serve.deployment(
        serve.ingress()(Router),
        name="router",
        num_replicas=settings.routers,
        max_ongoing_requests=ROUTER_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )
    body = endpoints.body_limit(Limits())
    return router.bind(model.bind(settings), Rules(body=body, key=settings.key))
