# SPDX-License-Identifier: Apache-2.0
"""Requests to a server (`sparse-lavida serve`), using only the standard library."""

import dataclasses
import http.client
import json
import os
import re
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any

# Not an input of a node: ComfyUI writes inputs into every image that it saves.
KEY = "SPARSE_LAVIDA_API_KEY"


def address_of(text: str) -> str:
    """Returns the address of a server, given with or without http://, and with or without /v1."""
    found = re.fullmatch(
        r"(?:(https?)://)?((?!https?:/)[^/?#]+(?:/.*?)??)(?:/v1)?/*", text.strip(), re.I
    )
    if not found or "://" in found[2]:
        raise ServerError(
            f"{text!r} is not the address of a server: give one such as http://127.0.0.1:8000."
        )
    return f"{(found[1] or 'http').lower()}://{found[2]}"


class ServerError(RuntimeError):
    """The server cannot be reached, or refused a request; then this is its message."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server; requests include the key in the environment variable `KEY`, if set.

    Attributes:
        address: without /v1, such as http://127.0.0.1:8000.
        timeout: seconds to wait for a response.
    """

    address: str
    timeout: float

    def get(self, path: str) -> dict[str, Any]:
        """Returns the response for a path.

        Raises:
            ServerError: there is none, or the request is refused; likewise for all requests.
        """
        return self._answer(path, None, {})

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the response to JSON."""
        return self._answer(path, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def post_form(
        self, path: str, fields: Mapping[str, Any], pngs: Mapping[str, bytes]
    ) -> dict[str, Any]:
        """Returns the response to a form with images."""
        boundary = uuid.uuid4().hex
        parts = [(f'name="{name}"', str(value).encode()) for name, value in fields.items()]
        parts += [
            (f'name="{name}"; filename="{name}.png"\r\nContent-Type: image/png', png)
            for name, png in pngs.items()
        ]
        body = b"".join(
            f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode()
            + content
            + b"\r\n"
            for head, content in parts
        )
        kind = f"multipart/form-data; boundary={boundary}"
        return self._answer(path, body + f"--{boundary}--\r\n".encode(), {"Content-Type": kind})

    def _answer(self, path: str, body: bytes | None, headers: Mapping[str, str]) -> dict[str, Any]:
        key = os.environ.get(KEY, "").strip()
        own = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self.address + path, body, {**headers, **own})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ServerError(_refusal(error)) from error
        except TimeoutError as error:
            raise ServerError(
                f"no answer within {self.timeout:g} seconds: the first requests compile. Wait"
                " longer (timeout), or start the server with --warmup."
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(
                f"no server answers at {self.address} ({error}): start one with `sparse-lavida"
                " serve`, or correct the address."
            ) from error


def _refusal(error: urllib.error.HTTPError) -> str:
    """Returns the message of a server that refuses a request."""
    try:
        return json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"the server answers {error.code} {error.reason}."
