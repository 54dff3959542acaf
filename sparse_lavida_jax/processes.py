# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model together: what they share, and what they must agree on.

Each process runs the same program on devices of its own; arrays lie over all of them, and every
process takes part in every computation on such an array. The first process alone writes what is
not an array. With one process nothing here communicates.
"""

import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparse_lavida_jax import config
from sparse_lavida_jax.version import __version__

T = TypeVar("T")


class ProcessError(Exception):
    """Processes that do not find each other, or disagree."""


@dataclasses.dataclass(frozen=True)
class Together:
    """Where the processes of a run meet.

    Attributes:
        coordinator: address and port of the first process, such as `10.0.0.2:8476`; empty where
            the environment tells it: TPU pods, SLURM, Open MPI, Kubernetes.
        count: how many processes there are; 0: as the environment says.
        index: of this one, from 0; -1: as the environment says.
    """

    coordinator: str = ""
    count: int = 0
    index: int = -1

    def start(self) -> None:
        """Connects this process with the others. No device may have been used before.

        Raises:
            ProcessError: the environment does not say where they are, or they do not answer.
        """
        try:
            jax.distributed.initialize(
                coordinator_address=self.coordinator or None,
                num_processes=self.count or None,
                process_id=None if self.index < 0 else self.index,
            )
        except (RuntimeError, ValueError) as error:
            raise ProcessError(
                f"the processes of this run do not find each other: {error}. Under SLURM, Open MPI"
                " and on TPU pods --distributed is enough; elsewhere give each process"
                " --coordinator=ADDRESS:PORT, --num_processes and --process_id."
            ) from error

    def end(self) -> None:
        """Lets go of the others, who wait for each other here."""
        jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this process writes for all."""
    return jax.process_index() == 0


def are_several() -> bool:
    """Whether other processes train with this one."""
    return jax.process_count() > 1


def wait_for_all(place: str) -> None:
    """Waits until every process has come here.

    Args:
        place: a name that all of them give.
    """
    if are_several():
        multihost_utils.sync_global_devices(place)


def first_does(action: Callable[[], T]) -> T | None:
    """Lets the first process do something, and the others wait for it; returns its result there.

    Raises:
        ProcessError: it failed there; the first process raises what was the matter.
    """
    if not are_several():
        return action()
    result, failure = None, None
    if is_first():
        try:
            result = action()
        except Exception as error:  # told to the others before it is raised
            failure = error
    if any(agreed_on_first(failure is not None)):
        if failure is not None:
            raise failure
        raise ProcessError("the first process of this run could not go on; it says why.")
    return result


def agreed_on_first(*values: float) -> tuple[float, ...]:
    """Returns what the first process has for these numbers, in all of them."""
    if not are_several():
        return values
    return tuple(multihost_utils.broadcast_one_to_all(np.array(values, np.float32)).tolist())


def all_of_them(holds: bool) -> bool:
    """Whether something holds in every process."""
    if not are_several():
        return holds
    return bool(multihost_utils.process_allgather(np.int32(holds)).min())


def check_same(settings: config.Config) -> None:
    """Compares the settings and the version of this program over all processes.

    Raises:
        ProcessError: names the processes that differ from the first.
    """
    if not are_several():
        return
    told = json.dumps([__version__, jax.__version__, config.to_dict(settings)], sort_keys=True)
    own = np.frombuffer(hashlib.sha256(told.encode()).digest(), np.uint8)
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


def told_to_stop(step: int) -> bool:
    """Whether all processes stop behind this step, because one of them was sent SIGTERM.

    It is asked behind every step, in every process; the answer is the same in all of them.
    """
    return are_several() and multihost_utils.reached_preemption_sync_point(step)


def pass_on(number: int) -> None:
    """Lets all processes know of a signal: JAX listens for SIGTERM where there are several."""
    if number != signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)
