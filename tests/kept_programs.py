# SPDX-License-Identifier: Apache-2.0
"""Compiled programs of earlier runs of the tests, kept in the user's cache.

A run works on a folder of its own, since processes that tests kill leave half-written files there.
Only whole files are kept at its end, and no more than `MOST_BYTES` of them.
"""

import contextlib
import os
import pathlib

from jax._src import compilation_cache

MOST_BYTES = 2 * 2**30
ENDING = "-cache"  # of jax's files of compiled programs


def folder() -> pathlib.Path:
    """Returns where programs are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(cache).expanduser() / "sparse-lavida-jax-tests"


def take(kept: pathlib.Path, run: pathlib.Path) -> None:
    """Links the kept programs into the folder of a run."""
    for path in kept.glob(f"*{ENDING}"):
        with contextlib.suppress(OSError):  # another run may be deleting it
            (run / path.name).hardlink_to(path)


def keep(kept: pathlib.Path, run: pathlib.Path, most: int = MOST_BYTES) -> None:
    """Keeps the whole programs of a run, and deletes those longest unused beyond `most` bytes."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in run.glob(f"*{ENDING}"):
        if not (kept / path.name).exists() and is_whole(path):
            with contextlib.suppress(OSError):
                (kept / path.name).hardlink_to(path)
    left = most
    for path in sorted(kept.glob(f"*{ENDING}"), key=_last_use, reverse=True):
        left -= path.stat().st_size
        if left < 0:
            path.unlink(missing_ok=True)


def is_whole(path: pathlib.Path) -> bool:
    """Whether a file was written to its end."""
    try:
        return bool(compilation_cache.decompress_executable(path.read_bytes()))
    except Exception:  # of zlib, or of whichever library jax compresses with
        return False


def _last_use(path: pathlib.Path) -> float:
    return max(path.stat().st_atime, path.stat().st_mtime)
