# SPDX-License-Identifier: Apache-2.0
"""Tries the kernel of this machine's device; `kernels.admission` runs it as a child and judges.

    python -m sparse_lavida_jax.kernels.trial

Output and gradients are held against the reference, on tags of the model's own training and
decoding, and computed twice; then a few calls at full size race against blocks.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax.kernels import attention, shapes
from sparse_lavida_jax.kernels.devices import RELEASE_HEAD_DIM

LAYERS, LAYER = 3, 2  # of the stacked cache, and the one that is read
RUNS = 10  # of each side of a race


@dataclasses.dataclass(frozen=True)
class Trial:
    """A call that a kernel is tried on.

    Attributes:
        shape: of `kernels/shapes.py`; of a decoding step forward only, on a stacked cache.
        heads, head_dim, dtype: of its numbers.
        every: of the tokens of the shape, which one is taken: all, every second, ...
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

    def tags(self) -> list[np.ndarray | None]:
        """Returns the tags of one row [1 n]: query block and horizon, key block, segments."""
        found = dataclasses.astuple(shapes.tags(self.shape))
        return [tag if tag is None else tag[None, :: self.every] for tag in found]

    def numbers(self) -> list[jax.Array]:
        """Returns q, k, v and the gradient of the output."""
        query_block, _, key_block, *_ = self.tags()
        assert query_block is not None and key_block is not None
        width, rng = self.heads * self.head_dim, np.random.default_rng(0)
        queries, keys = ((1, tag.shape[1], width) for tag in (query_block, key_block))
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


def main() -> None:
    """Prints the device and its kernel, then of each check its name, and what it found.

    Each is a line of JSON, the name by itself first: it tells where a child hung.
    """
    kernel = attention.device_kernel()
    _say({"device": jax.devices()[0].device_kind, "kernel": kernel})
    if kernel is None:
        return
    for name, run in checks(kernel):
        _say({"check": name})
        _say({"check": name, **run()})


def checks(kernel: str) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yields names, and what runs each."""
    for one in CHECKED:
        if attention.takes(kernel, one.dtype, one.head_dim):
            yield one.name, lambda one=one: agreement(one, kernel)
    for one in RACED:
        yield f"race: {one.name}", lambda one=one: race(one, kernel)


def agreement(one: Trial, kernel: str) -> dict[str, Any]:
    """Returns how far a kernel is off, and whether it gives the same bits again.

    The largest difference from the reference in float32; of results larger than 1 in proportion.
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
    """Returns median microseconds of a kernel and of blocks, which take turns."""
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
    """Returns attention and, except in decoding, its gradients: of q, k, v and the output's."""
    tags, layer = one.tags(), LAYER if one.decodes else None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return attention.step_causal_attention(
            q, k, v, *tags[:3], num_heads=one.heads, query_segment=tags[3], key_segment=tags[4],
            layer=layer, implementation=implementation,
        )  # fmt: skip

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
    main()
