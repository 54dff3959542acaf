# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, their memory, and the folder in which compiled programs are kept.

Where several processes train one model together, each runs the same program on its own devices.
Arrays lie over the devices of all, and every process takes part in every computation on such an
array. The first process alone writes what is not an array. With one process nothing here
communicates.
"""

import ctypes
import hashlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparse_lavida_jax import config
from sparse_lavida_jax.version import __version__

T = TypeVar("T")

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
MOST_BYTES = 5 * 2**30  # of compiled programs; beyond it the oldest are deleted


class ProcessError(Exception):
    """Processes that do not find each other, or that disagree."""


def connect(coordinator: str = "", count: int = 0, index: int = -1) -> None:
    """Connects this process to the others of a run. No device may have been used before.

    Args:
        coordinator: address and port of the first process, such as `10.0.0.2:8476`; empty where
            the environment gives it: TPU pods, SLURM, Open MPI, Kubernetes.
        count: how many processes there are; 0: as the environment says.
        index: of this process, from 0; -1: as the environment says.

    Raises:
        ProcessError: the environment does not say where they are, or they do not answer.
    """
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator or None,
            num_processes=count or None,
            process_id=None if index < 0 else index,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessError(
            f"the processes of this run do not find each other: {error}. Under SLURM, Open MPI"
            " and on TPU pods --distributed is enough; elsewhere give each process"
            " --coordinator=ADDRESS:PORT, --num_processes and --process_id."
        ) from error


def disconnect() -> None:
    """Ends the connection, after every process has come here."""
    jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this process writes for all."""
    return jax.process_index() == 0


def are_several() -> bool:
    """Whether other processes train with this one."""
    return jax.process_count() > 1


def wait_for_all(place: str) -> None:
    """Waits until every process has come here; all of them give the same name of the place."""
    if are_several():
        multihost_utils.sync_global_devices(place)


def first_does(action: Callable[[], T]) -> T | None:
    """Lets the first process do something while the others wait; returns its result there.

    Raises:
        ProcessError: it failed in the first process, which raises the error itself.
    """
    if not are_several():
        return action()
    result, failure = None, None
    if is_first():
        try:
            result = action()
        except Exception as error:  # the others hear of it before it is raised
            failure = error
    if any(agreed_on_first(failure is not None)):
        if failure is not None:
            raise failure
        raise ProcessError("the first process of this run could not go on; it says why.")
    return result


def agreed_on_first(*values: float) -> tuple[float, ...]:
    """Returns, in every process, the numbers that the first one has."""
    if not are_several():
        return values
    return tuple(multihost_utils.broadcast_one_to_all(np.array(values, np.float32)).tolist())


def holds_everywhere(holds: bool) -> bool:
    """Whether something holds in every process."""
    if not are_several():
        return holds
    return bool(multihost_utils.process_allgather(np.int32(holds)).min())


def check_same(settings: config.Config) -> None:
    """Checks that all processes have the same settings and the same version of this program.

    Raises:
        ProcessError: names the processes that differ from the first.
    """
    if not are_several():
        return
    described = json.dumps([__version__, jax.__version__, config.to_dict(settings)], sort_keys=True)
    own = np.frombuffer(hashlib.sha256(described.encode()).digest(), np.uint8)
    found = multihost_utils.process_allgather(own)
    different = np.flatnonzero((found != found[0]).any(axis=1)).tolist()
    if different:
        raise ProcessError(
            f"of {len(found)} processes, number {', '.join(map(str, different))} have other"
            " settings, or another version of this program or of jax, than the first: start all of"
            " them with the same command and the same files."
        )


def on_host(tree: T) -> T:
    """Returns a tree of whole arrays on the host of every process."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(whole, tree)


def is_asked_to_stop(step: int) -> bool:
    """Whether all processes stop after this step, because one of them was sent SIGTERM.

    Asked after every step, in every process; the answer is the same in all of them.
    """
    return are_several() and multihost_utils.reached_preemption_sync_point(step)


def pass_signal_on(number: int) -> None:
    """Passes a signal on to all processes: where there are several, JAX listens for SIGTERM."""
    if number != signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)


def keep_freed_memory() -> None:
    """Keeps what a step on the CPU frees for the next one, where the C library is glibc.

    Otherwise it gives arrays of 32 MB and more back to the system, which clears every page again
    when the next step touches it: a sixth of the time of a step of `configs/scenes.py`.

    Only commands call it: a library changes no setting of its process.
    """
    if jax.default_backend() != "cpu" or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


# ---------------------------------------------------------------------------------------------
# Compiled programs.


def programs_folder() -> pathlib.Path:
    """Returns where compiled programs are kept by default: a folder of the user's cache."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return cache / "sparse-lavida-jax"


def keep_programs(folder: pathlib.Path | str | None = None) -> None:
    """Keeps compiled programs, so that the next process does not compile them again.

    Only commands call it: a library changes no setting of its process.

    Args:
        folder: by default that of `JAX_COMPILATION_CACHE_DIR`, otherwise `programs_folder()`.
    """
    if folder is None and os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return  # jax reads it itself
    folder = pathlib.Path(folder or programs_folder()).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
