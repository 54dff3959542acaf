# SPDX-License-Identifier: Apache-2.0
r"""Attention on the frozen shapes: our kernel against everything a user could take in its place.

    python -m sparse_lavida_jax.bench.attention                # on a GPU; a few minutes
    python -m sparse_lavida_jax.bench.attention --dry-run      # anywhere: no times, do they agree?

All methods run in one process in random order on the same random numbers, 32 heads of 128 in
bfloat16: ours; cuDNN without a mask (the peak of dense attention, another result), with the dense
mask, and segment by segment; tokamax without and with the mask; XLA with the mask. A method that is
not installed or fails is left out with the reason. `bench/table.py` forms the ratios.
"""

import dataclasses
import functools
import importlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.kernels import attention, shapes, tables
from sparse_lavida_jax.visibility import PAD_BLOCK, visible

SHAPES = flags.DEFINE_list("shapes", list(shapes.names()), "Of kernels/shapes.py.")
BATCHES = flags.DEFINE_list("batches", ["1", "2"], "Rows of each shape, all with the same tags.")
RUNS = flags.DEFINE_integer("runs", 20, "Timed runs of each method.", lower_bound=5)
DRY = flags.DEFINE_boolean("dry-run", False, "Two heads, the kernel interpreted, nothing timed.")

HEADS, HEAD_DIM = 32, 128
IN_FLIGHT = 8  # calls enqueued before waiting: what a launch costs the host is not attention
TILE = tables.TileSizes(128, 128, 128)  # what "tile FLOPs" are counted in
AGREES = 3e-2  # largest difference from the reference, bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape at one batch size."""

    name: str
    batch: int
    tags: shapes.Tags
    heads: int

    @property
    def mask(self) -> np.ndarray:
        """Who sees whom [s t]; padding sees nobody."""
        t = self.tags
        sees = visible(t.query_block[:, None], t.query_horizon[:, None], t.key_block[None])
        if t.query_segment is not None and t.key_segment is not None:
            sees &= t.query_segment[:, None] == t.key_segment[None]
        return np.asarray(sees) & (t.query_block != PAD_BLOCK)[:, None]

    @property
    def useful_flops(self) -> float:
        return 4.0 * HEAD_DIM * self.heads * self.batch * float(self.mask.sum())

    @property
    def tile_flops(self) -> float:
        made = tables.make_tables(*self.arrays(1), sizes=TILE)
        tiles = float(tables.active_share(made)) * made.by_query.flags.size
        return 4.0 * HEAD_DIM * self.heads * self.batch * tiles * TILE.queries * TILE.keys

    def arrays(self, batch: int) -> tuple:
        """Tags as the kernels take them [b s]."""
        t = self.tags
        fields = (t.query_block, t.query_horizon, t.key_block, t.query_segment, t.key_segment)
        return tuple(
            None if field is None else jnp.asarray(np.repeat(field[None], batch, axis=0))
            for field in fields
        )

    def numbers(self, dtype=jnp.bfloat16) -> tuple[jax.Array, ...]:
        """q, k, v and the gradient of the output, [b s h d]."""
        rng = np.random.default_rng(0)
        s, t = len(self.tags.query_block), len(self.tags.key_block)
        return tuple(
            jnp.asarray(rng.normal(size=(self.batch, n, self.heads, HEAD_DIM)), dtype)
            for n in (s, t, t, s)
        )


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def ours(case: Case, implementation: str | None) -> Attend:
    """Our kernel on finished tables, as all layers but the first find them."""
    tags = case.arrays(case.batch)
    made = jax.jit(functools.partial(attention.make_tables, implementation=implementation))(*tags)

    def attend(q, k, v):
        merged = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
        out = attention.step_causal_attention(
            *merged, *tags[:3], num_heads=case.heads, query_segment=tags[3], key_segment=tags[4],
            tables=made, implementation=implementation,
        )  # fmt: skip
        assert isinstance(out, jax.Array)
        return out.reshape(q.shape)

    return attend


def masked_by(implementation: Literal["xla", "cudnn"], case: Case, *, masked: bool) -> Attend:
    """`jax.nn.dot_product_attention` by cuDNN or XLA."""
    mask = jnp.asarray(case.mask)[None, None] if masked else None
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, mask=mask, implementation=implementation
    )


def by_segment(case: Case) -> Attend:
    """cuDNN, a call for each segment of a packed row under its own mask."""
    segment, mask = case.tags.query_segment, case.mask
    assert segment is not None
    bounds = [*np.flatnonzero(np.diff(segment, prepend=-1)), len(segment)]

    def attend(q, k, v):
        parts = []
        for start, stop in itertools.pairwise(bounds):
            own = slice(int(start), int(stop))
            parts.append(jax.nn.dot_product_attention(
                q[:, own], k[:, own], v[:, own],
                mask=jnp.asarray(mask[own, own])[None, None], implementation="cudnn",
            ))  # fmt: skip
        return jnp.concatenate(parts, axis=1)

    return attend


def tokamax(case: Case, *, masked: bool) -> Attend:
    """The kernel of the tokamax package for this GPU."""
    package: Any = importlib.import_module("tokamax")

    mask = jnp.asarray(case.mask)[None, None] if masked else None
    return lambda q, k, v: package.dot_product_attention(
        q, k, v, mask=mask, implementation="mosaic"
    )


def methods(case: Case) -> dict[str, Callable[[], Attend]]:
    """Everything that may be measured; which of it runs here shows when it is called."""
    if DRY.value:
        kernel = "pallas_gpu" if jax.__version_info__ >= (0, 11) else "pallas_tpu"
        return {
            "kernel": functools.partial(ours, case, kernel),
            "xla_mask": functools.partial(masked_by, "xla", case, masked=True),
        }
    found: dict[str, Callable[[], Attend]] = {
        "kernel": functools.partial(ours, case, None),
        "cudnn": functools.partial(masked_by, "cudnn", case, masked=False),
        "cudnn_mask": functools.partial(masked_by, "cudnn", case, masked=True),
        "tokamax": functools.partial(tokamax, case, masked=False),
        "tokamax_mask": functools.partial(tokamax, case, masked=True),
        "xla_mask": functools.partial(masked_by, "xla", case, masked=True),
    }
    if case.tags.query_segment is not None:
        found["cudnn_segments"] = functools.partial(by_segment, case)
    return found


UNMASKED = ("cudnn", "tokamax")  # another result, so nothing to compare


def main(argv: list[str]) -> None:
    """Measures every shape, or checks that the methods agree."""
    del argv
    logging.set_verbosity(logging.WARNING)
    if not DRY.value and attention.default_implementation() == "reference":
        sys.exit(
            "bench.attention: there is no kernel for this device, so nothing to measure;"
            " --dry-run checks on small shapes that everything agrees."
        )
    bench = Bench("attention")
    for name in SHAPES.value:
        for batch in map(int, BATCHES.value):
            case = Case(name, batch, shapes.tags(name), 2 if DRY.value else HEADS)
            for backward in (False, True):
                if not (backward and name.startswith("decode")):
                    _measure(bench, case, backward=backward)


def _measure(bench: Bench, case: Case, *, backward: bool) -> None:
    """Times one shape, forward or with the backward pass, by every method that runs here."""
    q, k, v, pulled = case.numbers()
    what = "forward_backward" if backward else "forward"
    programs, seconds = {}, {}
    with jax.default_matmul_precision("highest"):
        wanted = _program(masked_by("xla", case, masked=True), backward)(
            *(x.astype(jnp.float32) for x in (q, k, v, pulled))
        )
    for method, make in methods(case).items():
        try:
            program = _program(make(), backward)
            begin = time.perf_counter()
            found = jax.block_until_ready(program(q, k, v, pulled))
            seconds[method] = time.perf_counter() - begin
        except Exception as error:  # what other packages raise where they do not run
            print(f"{case.name} {what} {method}: left out, {type(error).__name__}: {error}"[:300])
            continue
        off = 0.0 if method in UNMASKED else _difference(found, wanted, case)
        if off > AGREES:
            print(f"{case.name} {what} {method}: left out, it is off by {off:.3f}")
            continue
        programs[method] = program
        if DRY.value:
            print(f"{case.name}/{method}/{what}/b{case.batch}: off by {off:.4f}")
    if DRY.value:
        return
    times: dict[str, list[float]] = {method: [] for method in programs}
    for turn in range(RUNS.value):
        order = list(programs)
        random.Random(turn).shuffle(order)
        for method in order:
            begin = time.perf_counter()
            for _ in range(IN_FLIGHT):
                last = programs[method](q, k, v, pulled)
            jax.block_until_ready(last)
            times[method].append((time.perf_counter() - begin) / IN_FLIGHT)
    for method, taken in times.items():
        bench.write(
            f"{case.name}/{method}/{what}/b{case.batch}", _row(case, method, what, taken, seconds)
        )
        print(f"{case.name}/{method}/{what}/b{case.batch}: {statistics.median(taken) * 1e6:.0f} us")


def _row(case: Case, method: str, what: str, taken: list[float], seconds) -> dict[str, Any]:
    return {
        "task": f"{case.name}/{what}",
        "method": method,
        "dtype": "bfloat16",
        "batch": case.batch,
        "ids_sha256": case.tags.sha256,
        "times_s": taken,
        "median_s": statistics.median(taken),
        "min_s": min(taken),
        "max_s": max(taken),
        "compile_s": seconds[method],
        "tokens": {"queries": len(case.tags.query_block), "keys": len(case.tags.key_block)},
        "flops": {"useful": case.useful_flops, "tile": case.tile_flops},
        "note": f"mean of {IN_FLIGHT} calls in flight; tables made before; flops of the forward",
    }


def _program(attend: Attend, backward: bool) -> Callable:
    if not backward:
        return jax.jit(lambda q, k, v, pulled: (attend(q, k, v),))

    def both(q, k, v, pulled):
        out, pull_back = jax.vjp(attend, q, k, v)
        return (out, *pull_back(pulled))

    return jax.jit(both)


def _difference(found, wanted, case: Case) -> float:
    """The largest difference, of the output where a query sees anything and of all gradients.

    Gradients that are larger than 1 count in proportion.
    """
    seen = np.any(np.asarray(case.mask), axis=1).reshape(1, -1, 1, 1)
    (out, *gradients), (wanted_out, *wanted_gradients) = found, wanted
    pairs = [
        (jnp.where(seen, out, 0), jnp.where(seen, wanted_out, 0)),
        *zip(gradients, wanted_gradients, strict=True),
    ]
    return max(float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1)) for x, y in pairs)


if __name__ == "__main__":
    app.run(main)
