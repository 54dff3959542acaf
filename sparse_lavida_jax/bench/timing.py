# SPDX-License-Identifier: Apache-2.0
"""What every benchmark times with: turns in random order, medians, and what the device reaches."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

MATMULS = ((8192, 8192, 8192), (2048, 4096, 12288))  # a large one; an MLP of the model
COPIED_BYTES = 2**30
CPU_MATMULS, CPU_COPIED_BYTES = ((512, 512, 512),), 2**26  # what a processor does in a moment

Key = TypeVar("Key")


def in_turn(keys: Sequence[Key], turns: int) -> Iterator[tuple[int, Key]]:
    """Yields the number of the turn and each key, in another random order every turn.

    So a machine that others use too is as busy for all of them.
    """
    for turn in range(turns):
        for key in random.Random(turn).sample(keys, len(keys)):
            yield turn, key


def times(taken: Sequence[float]) -> dict[str, Any]:
    """Returns what a row says of the seconds of its runs."""
    median = statistics.median(taken)
    return {"times_s": taken, "median_s": median, "min_s": min(taken), "max_s": max(taken)}


def calibrate(runs: int = 10) -> dict[str, Any]:
    """Returns medians of this device: TFLOP/s, and GB/s read and written.

    Products are in bfloat16; on CPUs, which have no such products, they and the arrays are small
    and in float32.
    """
    on_cpu = jax.default_backend() == "cpu"
    matmuls, copied = (CPU_MATMULS, CPU_COPIED_BYTES) if on_cpu else (MATMULS, COPIED_BYTES)
    return {
        "matmul_tflops": {
            "x".join(map(str, shape)): matmul_tflops(*shape, runs=runs) for shape in matmuls
        },
        "copy_gbps": copy_gbps(copied, runs=runs),
    }


def matmul_tflops(rows: int, inner: int, cols: int, *, runs: int) -> float:
    """[rows inner] @ [inner cols]."""
    keys = jax.random.split(jax.random.key(0))
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    a = jax.random.normal(keys[0], (rows, inner), dtype)
    b = jax.random.normal(keys[1], (inner, cols), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * rows * inner * cols / _seconds(lambda: product(a, b), runs) / 1e12


def copy_gbps(size: int, *, runs: int) -> float:
    """An array of `size` bytes is read, changed and written."""
    array = jnp.zeros(size // 4, jnp.float32)
    change = jax.jit(lambda x: x + 1)
    return 2 * size / _seconds(lambda: change(array), runs) / 1e9


def _seconds(run: Callable[[], jax.Array], runs: int) -> float:
    jax.block_until_ready(run())
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
