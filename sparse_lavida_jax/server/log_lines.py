# SPDX-License-Identifier: Apache-2.0
"""The log of a server that strangers can reach: short lines, and of each kind one a minute."""

import logging
import math
import time
import traceback
from types import TracebackType

MOST = 300  # characters of a line
REPEAT_SECONDS = 60.0
_OWN = "sparse_lavida_jax"


class Brief(logging.Filter):
    """Makes a line of what is logged, without tracebacks, control characters or repeats.

    What comes from the same place, with an exception of the same type from the same place, is a
    repeat within `REPEAT_SECONDS`, whatever else it says; the next line has the number of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[tuple[str, ...], tuple[float, int]] = {}  # when, and repeats since

    def filter(self, record: logging.LogRecord) -> bool:
        line, kind = record.getMessage().strip(), (f"{record.pathname}:{record.lineno}",)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            cause = type(error).__name__, _place(error.__traceback__)
            notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
            line, kind = f"{line}: {' at '.join(cause)}{notes}", kind + cause
        now = time.monotonic()
        written, repeats = self._written.get(kind, (-math.inf, 0))
        if now - written < REPEAT_SECONDS:
            self._written[kind] = written, repeats + 1
            return False
        self._written[kind] = now, 0
        line = repr(line)[1:-1][:MOST] + (f" ({repeats} more like the last)" if repeats else "")
        record.msg, record.args = line, None
        record.exc_info = record.exc_text = record.stack_info = None
        return True


def _place(trace: TracebackType | None) -> str:
    """Returns the file and line of an exception: the last one of this package, if there is any."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
    own = [frame for frame in frames if _OWN in frame[0]]
    file, line = (own or frames or [("?", 0)])[-1]
    _, package, path = file.rpartition(f"{_OWN}/")
    return f"{package}{path}:{line}"


def shorten() -> None:
    """Sends all that is logged in this process to stderr, in such lines."""
    logging.basicConfig(
        format="%(levelname)s: %(message)s", handlers=[logging.StreamHandler()], force=True
    )
    for log in (logging.getLogger(), logging.getLogger(_OWN)):  # the package has its own handler
        for handler in log.handlers:
            handler.addFilter(Brief())
