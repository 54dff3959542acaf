# SPDX-License-Identifier: Apache-2.0
"""Whether freed memory is kept, and Ctrl-C on a device."""

import ctypes
import os
import pathlib
import signal
import sys
import time
import types

import jax
import pytest

from sparse_lavida_jax import runtime


@pytest.fixture
def interrupt():
    """Sends Ctrl-C to this process, which has Python's default handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_where_it_is_asked_for(interrupt):
    done = []
    with pytest.raises(KeyboardInterrupt), runtime.interrupts_held(), runtime.interrupts_held():
        interrupt()
        done.append("a segment")
        runtime.check_interrupt()
        done.append("another one")
    assert done == ["a segment"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_nobody_asked_for_comes_at_the_end(interrupt):
    done = []
    with pytest.raises(KeyboardInterrupt), runtime.interrupts_held():
        interrupt()
        done.append("all")
    assert done == ["all"]


def test_a_second_interrupt_does_not_wait(interrupt):
    with pytest.raises(KeyboardInterrupt), runtime.interrupts_held():
        interrupt()
        interrupt()
        pytest.fail("it waited")


def test_who_listens_to_interrupts_in_another_way_still_does(interrupt):
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append("mine"))
    with runtime.interrupts_held():
        interrupt()
        runtime.check_interrupt()
    assert came == ["mine"]


def test_memory_is_kept_where_the_c_library_can_be_told_to(monkeypatch):
    told = []
    library = types.SimpleNamespace(mallopt=lambda *option: told.append(option))
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(runtime.sys, "platform", "linux")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    runtime.keep_freed_memory()
    assert (runtime.M_MMAP_MAX, 0) in told
    del library.mallopt  # as in musl
    runtime.keep_freed_memory()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    library.mallopt = told.append
    runtime.keep_freed_memory()
    assert len(told) == 2


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="only the allocator of glibc keeps freed memory: run it on Linux with glibc",
)
def test_freed_memory_between_used_memory_is_returned():
    size, count, libc = 4096, 25_000, ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    held = [libc.malloc(size) for _ in range(count)]
    for address in held:
        ctypes.memset(address, 1, size)
    for address in held[:-1]:  # the last one keeps what is below it from being returned
        libc.free(address)
    before = resident()
    runtime.return_freed_memory()
    assert before - resident() > size * count / 2
    libc.free(held[-1])


def resident() -> int:
    """Returns the bytes of memory that this process uses."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt),
                                               (signal.SIGTERM, SystemExit)])  # fmt: skip
def test_an_interrupt_in_a_callback_of_the_garbage_collector_is_heard(number, error):
    """Python drops what is raised there."""

    class Left:
        def __del__(self):
            signal.raise_signal(number)
            time.sleep(0.01)

    def stop(*_):
        raise error

    before = signal.signal(number, stop)
    begin = time.monotonic()
    try:
        with pytest.raises(error), runtime.interrupts_heard():
            Left()
            while time.monotonic() - begin < 5:
                time.sleep(0.01)
    finally:
        signal.signal(number, before)
    assert time.monotonic() - begin < 2
