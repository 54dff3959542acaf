# SPDX-License-Identifier: Apache-2.0
"""The model as a server with OpenAI-shaped endpoints: what `sparse-lavida serve` runs.

    POST /v1/images/generations   prompt, n, size, seed, steps, guidance, registers, sampler
    POST /v1/images/edits         image, prompt, mask (then only what is transparent is drawn), ...
    POST /v1/chat/completions     one user message, with at most one image as a data URI
    GET  /v1/models, /health, /ready, /metrics

Needs the extra packages `sparse-lavida-jax[serve]`. Requests are done in batches
(`serving.Service`); a client that goes away frees the device at the next segment.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import pathlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Literal

import fastapi
import fastapi.exceptions
import prometheus_client
import prometheus_client.registry
import pydantic
from fastapi import HTTPException, responses
from PIL import Image
from prometheus_client import core
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from sparse_lavida_jax.apps.batching import Cancelled, QueueFull, Stopped, Ticket
from sparse_lavida_jax.apps.errors import REFUSED
from sparse_lavida_jax.apps.serving import Service
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.templates import RequestError
from sparse_lavida_jax.inference.requests import LARGEST_SEED, Shown
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.sampling import options
from sparse_lavida_jax.version import __version__

POLL_SECONDS = 0.05  # between two looks whether a client is still there
RETRY_SECONDS = 2  # what a client is told when the queue is full
STOPPED_SECONDS = 60  # when the server stops
CLIENT_LEFT = 499  # nobody reads it: nginx's code for a request whose client went away
FORM_ROOM = 2**20  # bytes of a request besides its images
IMAGES = 2  # most files of one request: an image and a mask


class Body(pydantic.BaseModel):
    """What every request may say; fields of OpenAI's that mean nothing here are passed over."""

    model: str | None = None
    n: int = 1
    seed: int | None = pydantic.Field(None, ge=0, le=LARGEST_SEED)
    steps: int | None = None
    num_inference_steps: int | None = None
    registers: int | None = pydantic.Field(None, ge=0)
    sampler: str | None = None
    temperature: float | None = None


class ImageBody(Body):
    """Of an image."""

    prompt: str
    size: str = "auto"  # width x height, as OpenAI has it
    response_format: Literal["b64_json", "url"] | None = None
    guidance: float | None = None
    guidance_scale: float | None = None


class ChatBody(Body):
    """Of an answer."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False


def make_app(service: Service, hosts: tuple[str, ...] = ()) -> fastapi.FastAPI:
    """Returns the server.

    Args:
        hosts: names it answers to; other `Host` headers are refused, so that no web page that is
            open in a browser on the machine reaches it by a name of its own. Empty: any.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = fastapi.FastAPI(title="sparse-lavida", version=__version__, lifespan=lifespan)
    app.state.service = service
    app.include_router(router)
    most = FORM_ROOM + IMAGES * service.limits.upload * 4 // 3  # base64 makes three bytes four
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=most)
    if hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts])
    app.add_exception_handler(fastapi.exceptions.RequestValidationError, _misread)
    app.add_exception_handler(HTTPException, _refused)
    registry = prometheus_client.registry.CollectorRegistry()
    registry.register(_Metrics(service))
    app.state.registry = registry
    return app


def model_name(service: Service) -> str:
    """Returns what clients call the model: the last part of its folder."""
    return pathlib.Path(service.pipe.source.name).name or "model"


# ---------------------------------------------------------------------------------------------
# Endpoints.

router = fastapi.APIRouter()


def _service(request: fastapi.Request) -> Service:
    return request.app.state.service


@router.post("/v1/images/generations")
async def generate(asked: ImageBody, request: fastapi.Request):
    """Draws images of a prompt."""
    return await _images(request, "generate", asked)


@router.post("/v1/images/edits")
async def edit(request: fastapi.Request):
    """Changes an image as told; with a mask, draws what is transparent in it again."""
    async with request.form(max_files=2 * IMAGES) as form:
        files = {
            key: [value for value in form.getlist(key) if not isinstance(value, str)]
            for key in ("image", "image[]", "mask")
        }
        words = {key: value for key, value in form.items() if isinstance(value, str)}
        shown = files["image"] + files["image[]"]
        if len(shown) != 1 or len(files["mask"]) > 1 or "mask" in words:
            raise HTTPException(400, "send one file named image, and at most one file named mask.")
        contents, *masks = [await one.read() for one in shown + files["mask"]]
    try:
        asked = ImageBody.model_validate(words)
    except pydantic.ValidationError as error:
        raise fastapi.exceptions.RequestValidationError(error.errors()) from error
    if asked.size != "auto":
        raise HTTPException(400, "an edited image has the size of the model's own: leave size out.")
    with _refusing():
        image = _service(request).image(contents)
        more = {"mask": _mask(_service(request), masks[0])} if masks else {}
    return await _images(request, "inpaint" if masks else "edit", asked, image, **more)


@router.post("/v1/chat/completions")
async def chat(asked: ChatBody, request: fastapi.Request):
    """Answers one question, about an image if there is one."""
    service = _service(request)
    if asked.n != 1 or asked.stream:
        raise HTTPException(400, "one answer is given, whole: leave n and stream out.")
    with _refusing():
        words, image = _question(asked.messages, service)
    most = asked.max_completion_tokens
    most = asked.max_tokens if most is None else most
    ticket, result = await _done(request, "ask", asked, words, image, max_new_tokens=most)
    ended = (result.tokens[0] == service.pipe.settings.model.end_of_text_id).any()
    message = {"role": "assistant", "content": result.text}
    reason = "stop" if ended else "length"
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model_name(service),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "sparse_lavida": _notes(ticket, result),
    }


@router.get("/v1/models")
def models(request: fastapi.Request) -> dict[str, Any]:
    """Lists the one model."""
    name = model_name(_service(request))
    card = {"id": name, "object": "model", "created": 0, "owned_by": "local"}
    return {"object": "list", "data": [card]}


@router.get("/ready")
def ready(request: fastapi.Request) -> dict[str, Any]:
    """Says that nothing has to be compiled before usual requests; until then 503."""
    if not _service(request).ready:
        raise HTTPException(503, "not ready: it is compiling, or it stops.")
    return {"status": "ready"}


@router.get("/health")
@router.get("/healthz")
def health(request: fastapi.Request) -> dict[str, Any]:
    """Says that it is up, and how long the queue is."""
    service = _service(request)
    queue = {"running": service.running, "waiting": service.waiting}
    return {"status": "ok", "model": model_name(service), **queue}


@router.get("/metrics")
def metrics(request: fastapi.Request) -> responses.Response:
    """Returns counts in Prometheus' text format."""
    text = prometheus_client.generate_latest(request.app.state.registry)
    return responses.Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


class _Metrics(prometheus_client.registry.Collector):
    """What the service counted, for Prometheus."""

    def __init__(self, service: Service):
        self.service = service

    def collect(self) -> Iterator[core.Metric]:
        service, done = self.service, "of requests that were done."
        counters: list[tuple[str, str, list[str], Mapping[Any, float]]] = [
            ("requests", "Ended requests.", ["task", "outcome"], service.counts),
            ("tokens", f"Device tokens {done}", ["task"], service.tokens),
            ("seconds", f"Device seconds {done}", ["task"], service.seconds),
        ]
        for name, meaning, labels, values in counters:
            counter = core.CounterMetricFamily(f"sparse_lavida_{name}", meaning, labels=labels)
            for key, value in sorted(values.items()):
                counter.add_metric([key] if len(labels) == 1 else key, value)
            yield counter
        gauge = core.GaugeMetricFamily
        yield gauge("sparse_lavida_waiting", "Requests that wait.", service.waiting)
        yield gauge("sparse_lavida_running", "Requests that run.", int(service.running))


# ---------------------------------------------------------------------------------------------
# What is asked.


def _mask(service: Service, contents: bytes) -> Image.Image:
    """Returns a mask as OpenAI has it, transparent where to draw, as we have it: white there.

    A mask without transparency is read as ours.
    """
    service.image(contents, "the mask")  # looks at size and format first
    with Image.open(io.BytesIO(contents)) as image:
        if not image.has_transparency_data:
            return image.convert("RGB")
        return image.convert("RGBA").getchannel("A").point(lambda alpha: 255 - alpha).convert("RGB")


def _question(messages: list[dict[str, Any]], service: Service) -> tuple[str, Any]:
    """Returns the words and the image of the one message.

    Raises:
        RequestError: several messages, several images, or parts of other kinds.
        ImageError: see `Service.image_of_uri`.
    """
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise RequestError(
            "the model answers one question at a time, without instructions of a system: send one"
            ' message with the role "user".'
        )
    content: Any = messages[0].get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise RequestError("the content of a message must be a text, or a list of parts.")
    words, uris = [], []
    for part in parts:
        kind = part.get("type")
        if kind == "text":
            words.append(str(part.get("text", "")))
        elif kind == "image_url":
            named = part.get("image_url")
            uris.append(str(named.get("url", "") if isinstance(named, dict) else named))
        else:
            raise RequestError(f"a part of type {kind!r} is not known: text or image_url.")
    if len(uris) > 1:
        raise RequestError(f"{len(uris)} images were sent: a question is about one at most.")
    return "\n".join(words), service.image_of_uri(uris[0]) if uris else None


# ---------------------------------------------------------------------------------------------
# What is done.


async def _images(
    request: fastapi.Request, task: str, asked: ImageBody, image: Shown | None = None, **more: Any
) -> dict[str, Any]:
    if asked.response_format == "url":
        raise HTTPException(400, "images come as b64_json: nothing is kept here for a URL to name.")
    if asked.size != "auto":
        width, _, height = asked.size.partition("x")
        if not (width.isdecimal() and height.isdecimal()):
            raise HTTPException(400, f"size={asked.size!r} must be such as 512x512, width first.")
        more["size"] = (int(height), int(width))
    more["num_images"] = asked.n
    ticket, result = await _done(request, task, asked, asked.prompt, image, **more)
    name = model_name(_service(request))
    return {
        "created": int(time.time()),
        "data": [{"b64_json": png} for png in _pngs(result, name)],
        "sparse_lavida": _notes(ticket, result),
    }


async def _done(
    request: fastapi.Request, task: str, asked: Body, words: str, image: Shown | None, **more: Any
) -> tuple[Ticket, Result]:
    """Waits for a request's turn and its result; cancels it when the client goes away."""
    service = _service(request)
    if asked.model not in (None, "", name := model_name(service)):
        raise HTTPException(404, f"there is no model {asked.model!r} here, only {name!r}.")
    # Without a seed, OpenAI's clients expect another image every time; the reply names it.
    more["seed"] = secrets.randbelow(LARGEST_SEED // 2) if asked.seed is None else asked.seed
    named = {*options.OPTIONS, "num_inference_steps", "guidance_scale"}
    more |= asked.model_dump(include=named, exclude_none=True)
    with _refusing():
        ticket = service.submit(task, words, image, **more)
        waited = asyncio.wrap_future(ticket.future)
        while not (await asyncio.wait([waited], timeout=POLL_SECONDS))[0]:
            if await request.is_disconnected():
                ticket.cancel()
                break
        return ticket, await waited


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns what goes wrong with a request into an answer with a code."""
    try:
        yield
    except REFUSED as error:
        raise HTTPException(400, str(error)) from error
    except QueueFull as error:
        raise HTTPException(429, str(error), {"Retry-After": str(RETRY_SECONDS)}) from error
    except Stopped as error:
        raise HTTPException(503, str(error), {"Retry-After": str(STOPPED_SECONDS)}) from error
    except (Cancelled, asyncio.CancelledError) as error:
        raise HTTPException(CLIENT_LEFT, "the request was cancelled.") from error
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise HTTPException(503, "the device has not enough memory: ask for less.") from error
        raise HTTPException(500, f"an error of the program: {type(error).__name__}.") from error


def _notes(ticket: Ticket, result: Result) -> dict[str, Any]:
    """Returns what OpenAI's replies have no field for."""
    return {
        "seeds": list(result.seeds),
        "plans": list(result.plans),
        "seconds": round(ticket.seconds, 4),
        "tokens_passed": result.tokens_passed,
        "batch": ticket.batch,
    }


def _pngs(result: Result, model: str) -> Iterator[str]:
    """Yields images that say how they were drawn, by a model of that name: not by its folder."""
    for pixels, record in itertools.zip_longest(result.pixels, result.records):
        if record is not None:
            record = record | {"checkpoint": record["checkpoint"] | {"name": model}}
        yield base64.b64encode(image_files.png(pixels, record)).decode()


# ---------------------------------------------------------------------------------------------
# What is refused.


_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


async def _refused(_: fastapi.Request, error: Exception) -> responses.JSONResponse:
    assert isinstance(error, HTTPException)
    kind = _KINDS.get(error.status_code, "invalid_request_error")
    said = {"message": error.detail, "type": kind, "param": None, "code": None}
    return responses.JSONResponse({"error": said}, error.status_code, error.headers)


async def _misread(request: fastapi.Request, error: Exception) -> responses.JSONResponse:
    assert isinstance(error, fastapi.exceptions.RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    sentence = f"{where or 'the request'}: {first['msg']}."
    return await _refused(request, HTTPException(400, sentence))
