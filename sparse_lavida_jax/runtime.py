# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, their memory, their folders in the user's cache, and Ctrl-C.

When several processes train one model together, each runs the same program on its own devices.
Arrays are spread over the devices of all of them, and every process takes part in every computation
on such an array. Everything else is written by the first process alone. With one process nothing
here communicates.
"""

import _thread
import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the public part of it touches the devices
from jax.experimental import multihost_utils

from sparse_lavida_jax import __version__

T = TypeVar("T")

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")  # in the messages of XLA
REPEAT_SECONDS = 0.05


class ProcessError(Exception):
    """Processes cannot find each other, or disagree."""


def connect(coordinator: str = "", count: int = 0, index: int = -1) -> None:
    """Connects this process to the others of a run. No device may have been used before.

    Args:
        coordinator: address and port of the first process, such as `10.0.0.2:8476`; empty if
            the environment provides it: TPU pods, SLURM, Open MPI, Kubernetes.
        count: the number of processes; 0: as the environment says.
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
            " --coordinator=ADDRESS:PORT, --num-processes and --process-id."
        ) from error


def disconnect() -> None:
    """Closes the connection, once every process has arrived here."""
    jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this process writes for all."""
    return jax.process_index() == 0


def are_several() -> bool:
    """Whether other processes train together with this one."""
    return jax.process_count() > 1


def wait_for_all(place: str) -> None:
    """Waits until every process has arrived here; all must give the same name for the place."""
    if are_several():
        multihost_utils.sync_global_devices(place)


def first_does(action: Callable[[], T]) -> T | None:
    """Lets the first process run `action` while the others wait; returns its result there.

    Raises:
        ProcessError: it failed in the first process, which raises the error itself.
    """
    if not are_several():
        return action()
    result, failure = None, None
    if is_first():
        try:
            result = action()
        except Exception as error:  # tell the others before raising it
            failure = error
    if any(agreed_on_first(failure is not None)):
        if failure is not None:
            raise failure
        raise ProcessError("the first process of this run could not go on; it says why.")
    return result


def first_decides(what: str, decide: Callable[[], str], wait_s: float) -> str:
    """Returns, in every process, the answer of the first one; no device is touched.

    Args:
        what: names the question, which is asked once per run.
        wait_s: how long the others wait.
    """
    state = distributed.global_state
    if state.client is None:
        return decide()
    key = f"sparse_lavida_jax/{what}"
    if state.process_id == 0:
        state.client.key_value_set(key, decide())
    return state.client.blocking_key_value_get(key, round(1000 * wait_s))


def agreed_on_first(*values: float) -> tuple[float, ...]:
    """Returns, in every process, the numbers of the first one."""
    if not are_several():
        return values
    return tuple(multihost_utils.broadcast_one_to_all(np.array(values, np.float32)).tolist())


def holds_everywhere(holds: bool) -> bool:
    """Whether a condition holds in every process."""
    if not are_several():
        return holds
    return bool(multihost_utils.process_allgather(np.int32(holds)).min())


def check_same(settings: dict[str, Any]) -> None:
    """Checks that all processes have the same settings and the same version of this package.

    Args:
        settings: of the run (`config.to_dict`).

    Raises:
        ProcessError: names the processes that differ from the first.
    """
    if not are_several():
        return
    described = json.dumps([__version__, jax.__version__, settings], sort_keys=True)
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
    """Forwards a signal to all processes: if there are several, JAX listens for SIGTERM."""
    if number != signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)


def keep_freed_memory() -> None:
    """Keeps memory that a step on the CPU frees for the next one, if the C library is glibc.

    Otherwise arrays of 32 MB and more go back to the system, which clears every page again when
    the next step touches it: a sixth of the time of a step of `configs/scenes.py`.

    Only commands call this: a library should not change settings of its process.
    """
    if jax.default_backend() != "cpu" or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Returns freed memory to the system, if the C library is glibc.

    Its allocator keeps what compilation frees, a hundred MB for each thread that has compiled.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def memory_of(device: Any) -> int:
    """Returns the memory of a device in bytes; for a CPU, that of the machine; 0 if unknown."""
    known = device.memory_stats() or {}
    if "bytes_limit" in known:
        return known["bytes_limit"]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not available on this operating system
        return 0


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the host or of a device is not enough."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(part in str(error) for part in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


# ---------------------------------------------------------------------------------------------
# Folders in the user's cache.


def programs_folder() -> pathlib.Path:
    """Returns the default folder for compiled programs, in the user's cache."""
    return _cache() / "sparse-lavida-jax"


def models_folder() -> pathlib.Path:
    """Returns the folder for converted models from the hub, beside that folder."""
    return _cache().expanduser() / "sparse-lavida-jax-models"


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


# ---------------------------------------------------------------------------------------------
# Ctrl-C.


class _Held:
    """Records Ctrl-C instead of raising KeyboardInterrupt."""

    def __init__(self):
        self.came = False

    def note(self, number: int, frame: types.FrameType | None) -> None:
        """Records the first Ctrl-C; a second one interrupts at once."""
        if self.came:
            raise KeyboardInterrupt
        self.came = True


@contextlib.contextmanager
def interrupts_heard() -> Iterator[None]:
    """Repeats Ctrl-C, or SIGTERM, that came while Python could not raise an exception.

    In a callback of the garbage collector, of which jax has one, Python drops it with a remark.
    """
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        numbers = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}
        if (number := numbers.get(dropped.exc_type)) is None:
            before(dropped)
            return
        again = threading.Timer(REPEAT_SECONDS, _thread.interrupt_main, [number])
        again.daemon = True
        with contextlib.suppress(RuntimeError):  # Python is shutting down
            again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds Ctrl-C back until the block checks for it (`check_interrupt`) or ends.

    A process that exits while XLA is still computing crashes. This acts only where Ctrl-C would
    raise KeyboardInterrupt: training, servers and threads other than the main one do without it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = signal.signal(signal.SIGINT, _Held().note)
    try:
        yield
        check_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def check_interrupt() -> None:
    """Raises KeyboardInterrupt if Ctrl-C was held back; nothing may be left to compute by then."""
    held = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(held, _Held) and held.came and is_main:
        jax.block_until_ready(jax.live_arrays())
        raise KeyboardInterrupt
