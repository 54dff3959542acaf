# SPDX-License-Identifier: Apache-2.0
"""Forgets compiled programs before a process has as many memory maps as the kernel allows.

An executable for CPUs has a few hundred maps, of which Linux allows a process 65,530 by default
(`vm.max_map_count`). LLVM ends the process when it gets no more.
"""

import pathlib
import time

import jax

from sparse_lavida_jax.programs import persistent_jit

MAPS, MOST = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
SHARE = 0.6  # of the maps, from which on there may be too few for the next request
EVERY = 2.0  # seconds between counts: to count takes up to 20 ms

_counted = -EVERY


def make_room() -> bool:
    """Forgets all programs in memory if this process has too many maps; returns whether it did.

    Programs that are running go on. Those that are kept on disk are loaded when they are needed.
    """
    global _counted
    now = time.monotonic()
    if jax.default_backend() != "cpu" or now - _counted < EVERY:
        return False
    _counted = now
    try:
        most = int(MOST.read_text())
        with MAPS.open("rb") as lines:
            number = sum(1 for _ in lines)
    except (OSError, ValueError):  # another system
        return False
    if number < SHARE * most:
        return False
    persistent_jit.forget()
    return True
