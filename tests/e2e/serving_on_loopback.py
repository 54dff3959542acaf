# SPDX-License-Identifier: Apache-2.0
"""A server on a free port of this machine, for as long as a test needs it."""

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn

from sparse_lavida_jax.cli import hosting

START_SECONDS = 30


@contextlib.contextmanager
def served(make_app) -> Iterator[str]:
    """Yields the address of what `make_app(host, port)` returns."""
    with hosting.listen("127.0.0.1", 0) as door:
        host, port = door.getsockname()
        server = uvicorn.Server(hosting.settings_of(make_app(host, port), 1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
        thread.start()
        try:
            deadline = time.monotonic() + START_SECONDS
            while not server.started and time.monotonic() < deadline:
                time.sleep(0.01)
            assert server.started
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)
