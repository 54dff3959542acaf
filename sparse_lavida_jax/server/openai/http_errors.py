# SPDX-License-Identifier: Apache-2.0
"""Every error in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fastapi
import fastapi.exceptions
from fastapi import HTTPException, responses
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from sparse_lavida_jax import runtime
from sparse_lavida_jax.schema import InputError
from sparse_lavida_jax.server.batching import Cancelled, QueueFull, Stopped
from sparse_lavida_jax.server.openai.bodies import FIELDS

log = logging.getLogger(__name__)

RETRY_SECONDS = 2  # Retry-After when the queue is full
STOPPED_SECONDS = 60  # Retry-After while the server is stopping
CLIENT_LEFT = 499  # nginx's code for a client that has disconnected; no client receives it
HEAD, TAIL = 200, 100  # characters of a longer message that are sent

_KINDS = {
    401: "authentication_error", 403: "permission_error", 429: "rate_limit_error",
    500: "server_error", 503: "server_error",
}  # fmt: skip
ELSEWHERE = "there is nothing at this address, or it is not asked in this way: see docs/serving.md."


def handle(app: fastapi.FastAPI) -> None:
    """Makes an app report errors in this shape."""
    app.add_exception_handler(fastapi.exceptions.RequestValidationError, _misread)
    app.add_exception_handler(AnyHTTPException, _refused)
    app.add_exception_handler(Exception, _failed)


def body(code: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Returns the JSON object of an error."""
    kind = _KINDS.get(code, "invalid_request_error")
    message, param = _shown(message), None if param is None else _shown(param)
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def reply(
    code: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> responses.JSONResponse:
    """Returns an error as a response."""
    return responses.JSONResponse(body(code, message, param), code, headers)


def _shown(text: str) -> str:
    """Returns a text that can be sent, cut in the middle if it is long.

    It may repeat parts of the request, with lone surrogates.
    """
    if len(text) > HEAD + TAIL:
        text = f"{text[:HEAD]}...{text[-TAIL:]}"
    return text.encode("utf-8", "replace").decode()


class Refused(HTTPException):
    """A request that cannot be done, with the field that is wrong; None: it is no single field."""

    def __init__(self, sentence: str, param: str | None):
        super().__init__(400, sentence)
        self.param = param


@contextlib.contextmanager
def refusing(sent: Callable[[str], str] = str) -> Iterator[None]:
    """Turns exceptions that a request raises into responses with a status code.

    `sent` returns the field that the client sent for an option of the pipeline.
    """
    try:
        yield
    except (AnyHTTPException, fastapi.exceptions.RequestValidationError):
        raise
    except InputError as error:
        if error.setting == "size":  # height first, and clients send the width first
            error.value = "x".join(reversed(error.value.split("x")))
        field = sent(error.setting)
        said = error.worded(lambda one: sent(one) if sent(one) in (field, *FIELDS) else "")
        raise Refused(said, field if field in FIELDS else None) from error
    except QueueFull as error:
        raise HTTPException(429, str(error), {"Retry-After": str(RETRY_SECONDS)}) from error
    except Stopped as error:
        raise HTTPException(503, str(error), {"Retry-After": str(STOPPED_SECONDS)}) from error
    except (Cancelled, ClientDisconnect) as error:
        raise HTTPException(CLIENT_LEFT, "the request was cancelled.") from error
    except Exception as error:
        if runtime.out_of_memory(error):
            raise HTTPException(503, "the device has not enough memory: ask for less.") from error
        log.error("an error of the program", exc_info=error)
        raise HTTPException(500, f"an error of the program: {type(error).__name__}.") from error


async def _refused(request: fastapi.Request, error: Exception) -> responses.Response:
    assert isinstance(error, AnyHTTPException)
    code, said = error.status_code, str(error.detail)
    if not said.endswith("."):  # starlette's own messages, such as "Not Found"
        said = ELSEWHERE if code in (404, 405) else f"{said}."
    return reply(code, said, getattr(error, "param", None), headers=error.headers)


async def _misread(request: fastapi.Request, error: Exception) -> responses.Response:
    assert isinstance(error, fastapi.exceptions.RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    said = first["msg"].removeprefix("Value error, ")
    sentence = f"{where}: {said}." if where else f"{said}."
    cause = first.get("ctx", {}).get("error")
    return reply(400, sentence, where or getattr(cause, "setting", "") or None)


async def _failed(_: fastapi.Request, error: Exception) -> responses.Response:
    return reply(500, f"an error of the program: {type(error).__name__}.")
