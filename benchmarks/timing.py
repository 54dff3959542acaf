# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks use for timing: turns in random order, medians, and device limits."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

MATMULS = ((8192, 8192, 8192), (2048, 4096, 12288))  # a large one; one from an MLP of the model
COPIED_BYTES = 2**30
CPU_MATMULS, CPU_COPIED_BYTES = ((512, 512, 512),), 2**26  # takes a CPU a moment

Key = TypeVar("Key")
Found = TypeVar("Found")


def in_turn(
    runs: Mapping[Key, Callable[[int], Found]], turns: int, first: int = 0
) -> dict[Key, list[Found]]:
    """Runs everything once per turn, in a new random order every turn; returns the results.

    So other load on the machine affects all of them alike.

    Args:
        runs: each takes the number of the turn; the first is `first`.
    """
    found: dict[Key, list[Found]] = {key: [] for key in runs}
    for turn in range(first, first + turns):
        for key in random.Random(turn).sample([*runs], len(runs)):
            found[key].append(runs[key](turn))
    return found


def in_time(names: Sequence[str], minutes: float, hint: str = "") -> Iterator[str]:
    """Yields names while there is time to measure them; reports which ones are left.

    Args:
        minutes: a name is skipped if it would end later, assuming it takes as long as the longest
            so far; the first is always measured; 0: no limit.
        hint: the command that measures those that are left.
    """
    begin, longest = time.monotonic(), 0.0
    for number, name in enumerate(names):
        elapsed = time.monotonic() - begin
        if minutes and number and elapsed + longest > 60 * minutes:
            left = ", ".join(names[number:])
            print(f"no time for {left} (--minutes){hint and f': {hint}'}", flush=True)
            return
        yield name
        longest = max(longest, time.monotonic() - begin - elapsed)


def times(taken: Sequence[float]) -> dict[str, Any]:
    """Returns the summary of run times, in seconds, for a row."""
    median = statistics.median(taken)
    return {"times_s": taken, "median_s": median, "min_s": min(taken), "max_s": max(taken)}


def calibrate(runs: int = 10) -> dict[str, Any]:
    """Returns medians for this device: TFLOP/s, and GB/s read and written.

    Products are in bfloat16; on CPUs, which lack such products, they and the arrays are small and
    in float32.
    """
    on_cpu = jax.default_backend() == "cpu"
    matmuls, copied = (CPU_MATMULS, CPU_COPIED_BYTES) if on_cpu else (MATMULS, COPIED_BYTES)
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    rates = {}
    for rows, inner, cols in matmuls:
        keys = jax.random.split(jax.random.key(0))
        a, b = (
            jax.random.normal(key, shape, dtype)
            for key, shape in zip(keys, ((rows, inner), (inner, cols)), strict=True)
        )
        seconds = _seconds(jax.jit(jnp.matmul), runs, a, b)
        rates[f"{rows}x{inner}x{cols}"] = 2 * rows * inner * cols / seconds / 1e12
    seconds = _seconds(jax.jit(lambda x: x + 1), runs, jnp.zeros(copied // 4, jnp.float32))
    return {"matmul_tflops": rates, "copy_gbps": 2 * copied / seconds / 1e9}


def _seconds(program: Callable[..., jax.Array], runs: int, *arrays: jax.Array) -> float:
    jax.block_until_ready(program(*arrays))
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
