# SPDX-License-Identifier: Apache-2.0
"""What `sparse-lavida serve` and `demo` do: serve a model at an address until interrupted."""

import argparse
import errno
import importlib.util
import ipaddress
import os
import socket
from typing import Any

from sparse_lavida_jax.cli.commands import load
from sparse_lavida_jax.cli.terminal import say, unsaid
from sparse_lavida_jax.cli.usage_errors import UsageError
from sparse_lavida_jax.inference import requests
from sparse_lavida_jax.programs import side_by_side
from sparse_lavida_jax.server import log_lines
from sparse_lavida_jax.server.serving import Limits, Service

KEY = "SPARSE_LAVIDA_API_KEY"  # the environment variable that holds the key
MOST_KEY = 1000  # characters of a key; all headers of a request have at most 16 kB
BACKLOG = 128  # connections that wait to be accepted
_SERVING = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
PACKAGES: dict[str, tuple[str, ...]] = {"serve": _SERVING, "demo": (*_SERVING, "gradio")}


def run(name: str, asked: argparse.Namespace) -> int:
    """Serves until interrupted.

    Raises:
        UsageError: an extra package is missing, or the address cannot be used.
        CheckpointError: there is no such model.
    """
    _check_packages(name)
    # Clients are told; what strangers ask for stays out of the log.
    with unsaid(requests.__name__), listen(asked.host, asked.port) as door:
        from sparse_lavida_jax.server import endpoints

        host, port = door.getsockname()[:2]
        key = asked.api_key or os.environ.get(KEY, "")
        _check_key(key)
        _check_guarded(name, host, key, insecure=asked.insecure)
        log_lines.shorten()
        pipe = load(asked)
        limits = Limits(
            waiting=asked.max_waiting,
            longest_wait=asked.longest_wait,
            programs=asked.programs,
            only=None if asked.only is None else tuple(asked.only),
        )
        service = Service(pipe, limits)
        app = endpoints.make_app(service, _names(host, asked.host), key)
        if name == "demo":
            from sparse_lavida_jax.page import demo

            app = demo.mounted(app, service, host, port)
        if warms := warms_up(name, asked.warmup):
            service.warm_up()
        _tell(name, host, port, key)
        if warms:
            say("usual requests are compiled meanwhile (--no-warmup: only when they come).")
        server_of(app, service, asked.grace).run(sockets=[door])
    return 0


def warms_up(name: str, asked: bool | None) -> bool:
    """Whether usual requests are compiled first.

    By default not for the page on a CPU: the person who tries a model there asks for little, and
    would share the processor with the compiler.
    """
    return name == "serve" or side_by_side.are_made_ahead() if asked is None else asked


def server_of(app: Any, service: Service, grace: int) -> Any:
    """Returns the `uvicorn.Server` of an app; when stopped, it turns away waiting requests.

    Args:
        grace: seconds that running requests then have to end.
    """
    import uvicorn

    class Stopping(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            service.stop()
            await super().shutdown(sockets)

    return Stopping(settings_of(app, grace))


def settings_of(app: Any, grace: int) -> Any:
    """Returns the `uvicorn.Config` of an app; see `server_of`."""
    import uvicorn

    from sparse_lavida_jax.server.openai.guards import Patient

    return uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        log_config=None,  # see `log_lines`
        log_level="error",  # uvicorn warns of every malformed request
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=grace,
    )


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, opened before a model is loaded, which takes long.

    Raises:
        UsageError: the address cannot be used.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"--port={port} is out of range: 0 to 65535; 0 takes a free one.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except socket.gaierror as error:
        raise UsageError(f"--host={host} is not known: {error.strerror}.") from error
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: "another program has it: choose another with --port, or 0 for any",
            errno.EACCES: "ports below 1024 need an administrator: choose another with --port",
            errno.EADDRNOTAVAIL: "it is no address of this machine: --host=127.0.0.1 always is",
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise UsageError(f"cannot listen at {host}, port {port}: {reason}.") from error


def _check_packages(name: str) -> None:
    missing = [one for one in PACKAGES[name] if importlib.util.find_spec(one) is None]
    if missing:
        raise UsageError(
            f"`sparse-lavida {name}` needs packages that are not installed"
            f" ({', '.join(missing)}): pip install 'sparse-lavida-jax[{name}]'."
        )


def _check_guarded(name: str, host: str, key: str, *, insecure: bool) -> None:
    """Refuses to serve other machines without a key, unless `insecure` is set."""
    if _is_loopback(host) or insecure or (key and name == "serve"):
        return
    wanted = f"a key that clients send (--api-key, or the variable {KEY})"
    if name != "serve":
        wanted = "a proxy that asks for a password, in front of --host=127.0.0.1"
    raise UsageError(
        f"other machines reach {host}: that needs {wanted}, or --insecure to let everybody in."
    )


def _check_key(key: str) -> None:
    """Refuses a key that no client could send; "" is none."""
    if not (key.isascii() and key.isprintable() and key == key.strip() and len(key) <= MOST_KEY):
        raise UsageError(
            f"the key cannot match what clients send: choose one of at most {MOST_KEY} printable"
            " ASCII characters, without spaces at its ends."
        )


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _names(host: str, asked: str) -> tuple[str, ...]:
    """Returns the host names to accept: on loopback its own, elsewhere any."""
    return (host, asked, "localhost") if _is_loopback(host) and ":" not in host else ()


def _tell(name: str, host: str, port: int, key: str = "") -> None:
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    where = {
        "demo": f"the page is at {address}",
        "serve": f"OpenAI's clients find it at {address}/v1",
    }[name]
    print(f"{where} (Ctrl-C ends it)", flush=True)
    if not _is_loopback(host) and (name == "demo" or not key):
        say("everybody who reaches this machine can use it; there is no password.")
