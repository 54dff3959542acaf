# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled programs: jax's own cache, and the executables of this package.

jax finds a program there by its lowered module, so that it has to be traced and lowered first. An
executable of `programs.executables` is found by what it was made from.

Commands also compile without XLA's alarm, which asks users to report a slow compilation as a bug.
"""

import contextlib
import functools
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import filelock
import jax
from jax._src import (
    compilation_cache,  # no public function replaces what cannot be read
    compiler,
)
from jaxlib import utils  # pyright: ignore[reportAttributeAccessIssue]  it has no stub

from sparse_lavida_jax import runtime
from sparse_lavida_jax.programs import executables

MOST_BYTES = 5 * 2**30  # of jax's cache; beyond that the oldest programs are deleted
LOCK_SECONDS = 10  # to wait for the lock on jax's cache
FATAL = 3  # the level of XLA's log that leaves only messages of a process that ends


def keep_programs(folder: pathlib.Path | str | None = None) -> None:
    """Keeps compiled programs, so that the next process does not compile them again.

    jax's cache holds at most `MOST_BYTES`, unless `JAX_COMPILATION_CACHE_MAX_SIZE` is set, and
    executables at most `executables.MOST_BYTES`. Commands call this, and a notebook may: a library
    should not change settings of its process.

    Args:
        folder: by default `JAX_COMPILATION_CACHE_DIR`, otherwise `runtime.programs_folder()`; "":
            nothing is kept.
    """
    silence_alarm()
    # That a program cannot be read or kept: it is compiled, and `executables` says once why.
    warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation|Cache value for")
    if folder == "":
        jax.config.update("jax_enable_compilation_cache", False)
        executables.keep_in(None)
        return
    given = None if folder else os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = pathlib.Path(given or folder or runtime.programs_folder()).expanduser()
    if given is None:  # jax reads the variable itself
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
        _complete(folder)
    compilation_cache.get_executable_and_time = _replacing(
        getattr(_read, "__wrapped__", _read), folder
    )
    executables.keep_in(None if "://" in str(folder) else folder / "executables")


def silence_alarm() -> None:
    """Silences XLA's alarm about slow compilation in this process.

    XLA writes it among its errors, from C++, and has no flag for it: only its log level hides it.
    So that other errors are seen, the level is raised only while a program is compiled, whose own
    errors are raised as exceptions. `TF_CPP_MIN_LOG_LEVEL=0` shows everything.
    """
    compiler.backend_compile_and_load = _compile_silently


def _compile_silently(*args: Any, **named: Any) -> Any:
    _count_compilations(+1)
    try:
        return _compile(*args, **named)
    finally:
        _count_compilations(-1)


def _count_compilations(change: int) -> None:
    """Raises the level of XLA's log while any thread compiles."""
    global _compiling
    usual = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")  # jax sets it to 1
    with _lock:
        _compiling += change
        if usual.isdecimal() and 0 < int(usual) < FATAL:
            utils.absl_set_min_log_level(FATAL if _compiling else int(usual))


_compiling, _lock = 0, threading.Lock()
_compile = compiler.backend_compile_and_load
_read = compilation_cache.get_executable_and_time


def _replacing(read: Callable[..., Any], folder: pathlib.Path) -> Callable[..., Any]:
    """Returns jax's function that reads a program, with damaged files deleted.

    jax never replaces such a file. Without it, jax compiles the program again and keeps it.
    """

    @functools.wraps(read)
    def read_or_delete(cache_key: str, *args: Any, **named: Any) -> Any:
        try:
            if not getattr(_thread, "compiles_anew", False):
                return read(cache_key, *args, **named)
        except OSError:  # of the folder; the file may be good
            return None, None
        except Exception:  # of whatever decompresses or loads it
            pass
        with contextlib.suppress(OSError):
            (folder / f"{cache_key}-cache").unlink()
        return None, None

    return read_or_delete


@contextlib.contextmanager
def compiling_anew() -> Iterator[None]:
    """Lets this thread compile again what jax's cache holds already.

    An executable from there cannot be kept: on CPUs it would lack its object code.
    """
    _thread.compiles_anew = True
    try:
        yield
    finally:
        _thread.compiles_anew = False


_thread = threading.local()


def _complete(folder: pathlib.Path) -> None:
    """Repairs programs in a folder that lack one of their two files.

    jax keeps a program in one file and the time of its last use in another. A process without a
    size limit writes only the first, as does one that is killed in between: afterwards every
    process with a limit would fail to write, permanently. A time without its program is removed.
    """
    if not folder.is_dir():
        return
    lock = filelock.FileLock(folder / ".lockfile", timeout=LOCK_SECONDS)  # jax's own
    with contextlib.suppress(OSError, filelock.Timeout), lock:
        for program in folder.glob("*-cache"):
            used = program.with_name(program.name.removesuffix("-cache") + "-atime")
            if not used.exists():
                used.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))
        for used in folder.glob("*-atime"):
            if not used.with_name(used.name.removesuffix("-atime") + "-cache").exists():
                used.unlink()
