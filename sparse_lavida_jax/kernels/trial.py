# SPDX-License-Identifier: Apache-2.0
"""Tests the kernel of this machine's device; `kernels.admission` runs this as a child.

    python -m sparse_lavida_jax.kernels.trial [KERNEL]

Outputs and gradients are computed twice, on tags from the model's own training and decoding, and
compared with the reference. Then a few calls at full size are timed against blockwise attention.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax.kernels import attention, shapes
from sparse_lavida_jax.kernels.devices import RELEASE_HEAD_DIM

LAYERS, LAYER = 3, 2  # the layers of the stacked cache, and the one that is read
RUNS = 10  # timed runs of each implementation


@dataclasses.dataclass(frozen=True)
class Trial:
    """A call that a kernel is tried on.

    Attributes:
        shape: from `kernels/shapes.py`; a decoding step runs forward only, on a stacked cache.
        heads, head_dim, dtype: of q, k and v.
        every: uses every n-th token of the shape; 1: all.
    """

    shape: str
    heads: int = 8
    head_dim: int = RELEASE_HEAD_DIM
    dtype: str = "bfloat16"
    every: int = 1

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.heads} heads of {self.head_dim} in {self.dtype}"

    @property
    def decodes(self) -> bool:
        return self.shape.startswith("decode")

    def tags(self) -> dict[str, Any]:
        """Returns the tags of one row [1 n], those that it has, as arguments of attention."""
        found = vars(shapes.tags(self.shape))
        return {name: tag[None, :: self.every] for name, tag in found.items() if tag is not None}

    def numbers(self) -> list[jax.Array]:
        """Returns q, k, v and the gradient of the output."""
        tags, width = self.tags(), self.heads * self.head_dim
        rng = np.random.default_rng(0)
        queries, keys = ((*tags[name].shape, width) for name in ("query_block", "key_block"))
        cached = (LAYERS, *keys) if self.decodes else keys
        drawn = [rng.standard_normal(of, np.float32) for of in (queries, cached, cached, queries)]
        return [jnp.asarray(x, self.dtype) for x in drawn]


CHECKED = (
    Trial("t2i_1536"),
    Trial("decode_early"),
    Trial("decode_late"),
    Trial("packed_8192", every=2),
    Trial("edit_3456"),
    Trial("t2i_1536", head_dim=64),
    Trial("t2i_1536", dtype="float32"),
)
RACED = (Trial("t2i_1536", heads=32), Trial("decode_mid", heads=32))


def main(kernel: str | None = None) -> None:
    """Prints the device and a kernel, by default its own, then each check's name, and its result.

    Each is a line of JSON; the name comes first on its own line, to show where a child hung.
    """
    kernel = kernel or attention.device_kernel()
    _say({"device": jax.devices()[0].device_kind, "kernel": kernel})
    if kernel is None:
        return
    for name, run in checks(kernel):
        _say({"check": name})
        _say({"check": name, **run()})


def checks(kernel: str) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yields the name of each check, and a function that runs it."""
    for one in CHECKED:
        if attention.takes(kernel, one.dtype, one.head_dim):
            yield one.name, lambda one=one: agreement(one, kernel)
    for one in RACED:
        yield f"race: {one.name}", lambda one=one: race(one, kernel)


def agreement(one: Trial, kernel: str) -> dict[str, Any]:
    """Returns the error of a kernel, and whether a second run gives the same bits.

    The error is the largest difference from the reference in float32, divided by the largest
    absolute value of the reference if that exceeds 1.
    """
    numbers, run = one.numbers(), _program(one, kernel)
    found, again = (jax.device_get(run(*numbers)) for _ in range(2))
    with jax.default_matmul_precision("highest"):
        wide = (x.astype(jnp.float32) for x in numbers)
        wanted = jax.device_get(_program(one, "reference")(*wide))
    off = [
        np.abs(ours.astype(np.float32) - theirs).max() / max(np.abs(theirs).max(), 1)
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    same = all(x.tobytes() == y.tobytes() for x, y in zip(found, again, strict=True))
    return {"off": float(np.max(off)), "same_bits": same}


def race(one: Trial, kernel: str) -> dict[str, float]:
    """Returns the median microseconds of a kernel and of blockwise attention, run alternately."""
    numbers = one.numbers()
    runs = {"kernel_us": _program(one, kernel), "blocks_us": _program(one, "blockwise")}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(RUNS + 1):  # the first compiles
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*numbers))
            taken[name].append(1e6 * (time.perf_counter() - begin))
    return {name: statistics.median(own[1:]) for name, own in taken.items()}


def _program(one: Trial, implementation: str) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns a function of q, k, v and the output's gradient.

    It computes attention and, except in decoding, its gradients.
    """
    tags, layer = one.tags(), LAYER if one.decodes else None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return attention.step_causal_attention(
            q, k, v, **tags, num_heads=one.heads, layer=layer, implementation=implementation
        )

    @jax.jit
    def run(q, k, v, pulled):
        if one.decodes:
            return (attend(q, k, v),)
        out, pull_back = jax.vjp(attend, q, k, v)
        return (out, *pull_back(pulled))

    return run


def _say(values: Mapping[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
