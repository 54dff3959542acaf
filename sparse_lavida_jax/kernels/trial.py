# SPDX-License-Identifier: Apache-2.0
"""Tests the kernel of this machine's device; `kernels.admission` runs this as a child.

    python -m sparse_lavida_jax.kernels.trial [all|sampling|gradients] [KERNEL]

Outputs and gradients are computed twice, on tags from the model's own training and decoding, and
compared with the reference. Then a few calls at full size are timed against blockwise attention.
At last, if attention is `pallas_gpu`, the same is done with the kernels of `step_gpu`, which are
timed against what the compiler makes of the same computation.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lavida_jax.kernels import attention, shapes
from sparse_lavida_jax.kernels.admission import STEP
from sparse_lavida_jax.kernels.devices import RELEASE_HEAD_DIM
from sparse_lavida_jax.programs import side_by_side

Part = Literal["all", "sampling", "gradients"]

LAYERS, LAYER = 3, 2  # the layers of the stacked cache, and the one that is read
RUNS = 10  # timed runs of each implementation
STEP_CALLS = 64  # of one program that is timed: a single call is shorter than its launch


@dataclasses.dataclass(frozen=True)
class Trial:
    """A call that a kernel is tried on.

    Attributes:
        shape: from `kernels/shapes.py`; a decoding step runs on a stacked cache.
        gradients: whether they are computed too.
        heads, head_dim, dtype: of q, k and v.
        every: uses every n-th token of the shape; 1: all.
    """

    shape: str
    gradients: bool = False
    heads: int = 8
    head_dim: int = RELEASE_HEAD_DIM
    dtype: str = "bfloat16"
    every: int = 1

    @property
    def name(self) -> str:
        kind = "gradients of " if self.gradients else ""
        return f"{kind}{self.shape}, {self.heads} heads of {self.head_dim} in {self.dtype}"

    @property
    def decodes(self) -> bool:
        return self.shape.startswith("decode")

    def tags(self) -> dict[str, Any]:
        """Returns the tags of one row [1 n], those that it has, as arguments of attention."""
        found = vars(shapes.tags(self.shape))
        return {name: tag[None, :: self.every] for name, tag in found.items() if tag is not None}

    def types(self, dtype: str) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of `numbers`, with a dtype."""
        tags, width = self.tags(), self.heads * self.head_dim
        queries, keys = ((*tags[name].shape, width) for name in ("query_block", "key_block"))
        cached = (LAYERS, *keys) if self.decodes else keys
        return [jax.ShapeDtypeStruct(of, dtype) for of in (queries, cached, cached, queries)]

    def numbers(self) -> list[jax.Array]:
        """Returns q, k, v and the gradient of the output."""
        rng, types = np.random.default_rng(0), self.types(self.dtype)
        return [jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype) for x in types]


# What is both checked and raced is compiled once.
CHECKED = (
    Trial("t2i_1536", heads=32),
    Trial("decode_early"),
    Trial("decode_late"),
    Trial("edit_3456"),
    Trial("t2i_1536", head_dim=64),
    Trial("t2i_1536", dtype="float32"),
    Trial("t2i_1536", gradients=True, heads=32),
    Trial("packed_8192", gradients=True, every=2),
    Trial("edit_3456", gradients=True),
    Trial("t2i_1536", gradients=True, head_dim=64),
    Trial("t2i_1536", gradients=True, dtype="float32"),
)
RACED = (
    Trial("t2i_1536", heads=32),
    Trial("decode_mid", heads=32),
    Trial("t2i_1536", gradients=True, heads=32),
)


def main(part: Part = "all", kernel: str | None = None) -> None:
    """Prints the device and a kernel, by default its own, then each check's name, and its result.

    Each is a line of JSON; the name comes first on its own line, to show where a child hung. Before
    the checks, there is a line for every program that is compiled, with their number.

    Args:
        part: what is checked: that which sampling needs, gradients, or both.
    """
    kernel = kernel or attention.device_kernel()
    _say({"device": jax.devices()[0].device_kind, "kernel": kernel})
    if kernel is None:
        return
    if side_by_side.are_made_ahead():
        _compile(part, kernel)
    for name, run in checks(part, kernel):
        _say({"check": name})
        _say({"check": name, **run()})


def checks(part: Part, kernel: str) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yields the name of each check, and a function that runs it."""
    checked, raced = _trials(part, kernel)
    for one in checked:
        yield one.name, lambda one=one: agreement(one, kernel)
    for one in raced:
        yield f"race: {one.name}", lambda one=one: race(one, kernel)
    if kernel == "pallas_gpu" and part != "gradients":
        yield from step_checks()


def _trials(part: Part, kernel: str) -> tuple[list[Trial], list[Trial]]:
    """Returns the trials of a part that a kernel takes: those that are checked, and raced."""
    checked, raced = (
        [
            one
            for one in trials
            if attention.takes(kernel, one.dtype, one.head_dim)
            and part in ("all", "gradients" if one.gradients else "sampling")
        ]
        for trials in (CHECKED, RACED)
    )
    return checked, raced


def _compile(part: Part, kernel: str) -> None:
    """Compiles the programs of all checks side by side.

    What cannot be lowered or compiled is left to its check, which then fails.
    """
    checked, raced = _trials(part, kernel)
    programs = dict.fromkeys(
        [(one, kernel, one.dtype) for one in (*checked, *raced)]
        + [(one, "blockwise", one.dtype) for one in raced]
        + [(one, "reference", "float32") for one in checked]
    )
    finished, futures = itertools.count(1), []

    def compile_one(lowered: jax.stages.Lowered) -> None:
        lowered.compile()
        _say({"program": next(finished), "of": len(programs)})

    with side_by_side.uncollected():
        for program in programs:
            with contextlib.suppress(Exception):
                lowered = _lowered(*program)
                futures.append(side_by_side.start(functools.partial(compile_one, lowered)))
    side_by_side.wait(futures)


def agreement(one: Trial, kernel: str) -> dict[str, Any]:
    """Returns the error of a kernel, and whether a second run gives the same bits.

    The error is the largest difference from the reference in float32, divided by the largest
    absolute value of the reference if that exceeds 1.
    """
    numbers, run = one.numbers(), _lowered(one, kernel, one.dtype).compile()
    found, again = (jax.device_get(run(*numbers)) for _ in range(2))
    wide = (x.astype(jnp.float32) for x in numbers)
    wanted = jax.device_get(_lowered(one, "reference", "float32").compile()(*wide))
    return _compared(found, again, wanted)


def _compared(found: Any, again: Any, wanted: Any) -> dict[str, Any]:
    """Returns the error of a result, and whether it has the same bits again."""
    found, again, wanted = map(jax.tree.leaves, (found, again, wanted))
    off = [
        np.abs(ours.astype(np.float32) - theirs).max()
        / max(np.abs(theirs.astype(np.float32)).max(), 1)
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    same = all(x.tobytes() == y.tobytes() for x, y in zip(found, again, strict=True))
    return {"off": float(np.max(off)), "same_bits": same}


def race(one: Trial, kernel: str) -> dict[str, float]:
    """Returns the median microseconds of a kernel and of blockwise attention, run alternately."""
    names = {"kernel_us": kernel, "blocks_us": "blockwise"}
    runs = {name: _lowered(one, of, one.dtype).compile() for name, of in names.items()}
    return _raced(runs, one.numbers())


def _raced(runs: dict[str, Callable], numbers: Sequence[Any]) -> dict[str, float]:
    """Returns the median microseconds of each function, run alternately."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(RUNS + 1):  # the first may load what the others need
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*numbers))
            taken[name].append(1e6 * (time.perf_counter() - begin))
    return {name: statistics.median(own[1:]) for name, own in taken.items()}


def step_checks(
    rows: int = 2, tokens: int = 80, calls: int = STEP_CALLS, interpret: Any = False
) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yields the same as `checks`, for the kernels of `step_gpu` and a step of so many tokens."""
    from sparse_lavida_jax.kernels import step_gpu  # some versions of jax cannot import it

    heads, rng = step_gpu.HEADS, np.random.default_rng(0)

    def drawn(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    def check(kernel: Callable, reference: Callable, carry: Any, *given: Any) -> Mapping[str, Any]:
        once = jax.jit(kernel)
        found, again = (jax.device_get(once(carry, *given)) for _ in range(2))
        compared = _compared(found, again, jax.device_get(jax.jit(reference)(carry, *given)))

        def repeated(function: Callable) -> Callable:
            def run(carry, *given):
                def body(_, results):
                    # The barrier keeps the compiler from computing anything before the loop.
                    return function(*jax.lax.optimization_barrier((results[1], *given)))

                return jax.lax.fori_loop(0, calls, body, function(carry, *given))

            return jax.jit(run)

        runs = {"kernel_us": repeated(kernel), "plain_us": repeated(reference)}
        return compared | _raced(runs, (carry, *given))

    def rotated() -> Mapping[str, Any]:
        width = heads * RELEASE_HEAD_DIM
        pair = tuple(drawn(LAYERS, rows, tokens + 16, width) for _ in range(2))
        angle = drawn(rows, tokens, RELEASE_HEAD_DIM // 2, dtype=jnp.float32)
        given = drawn(rows, tokens, 3 * width), jnp.stack([jnp.cos(angle), jnp.sin(angle)])

        def of(function: Callable, **more: Any) -> Callable:
            how = {"first": 8, "head_dim": RELEASE_HEAD_DIM} | more
            place = jnp.int32(LAYER), jnp.int32(5)
            return lambda pair, qkv, turn: function(qkv, turn, pair, *place, **how)

        kernel = of(step_gpu.rotated, interpret=interpret)
        return check(kernel, of(step_gpu.reference_rotated), pair, *given)

    def added(width: int) -> Mapping[str, Any]:
        given = drawn(4, rows, tokens, width, dtype=jnp.float32), drawn(width)

        of = functools.partial(functools.partial, eps=1e-5, dtype="bfloat16")
        kernel = of(step_gpu.added, interpret=interpret)
        return check(kernel, of(step_gpu.reference_added), drawn(rows, tokens, width), *given)

    def narrowed() -> Mapping[str, Any]:
        width = step_gpu.CHUNK
        carry, product = drawn(rows, tokens, width), drawn(rows, tokens, 2 * width)
        scales = (
            jnp.exp(drawn(*shape, dtype=jnp.float32)) for shape in ((rows, tokens, 1), (2 * width,))
        )
        weight, matrix = drawn(width), drawn(width, 128, dtype=jnp.float32) / width**0.5

        def of(narrowed: Callable, added: Callable, **more: Any) -> Callable:
            def call(x, product, scales, weight, matrix):
                values, scale = narrowed(product, scales, dtype="bfloat16", gated=True, **more)
                given = values[None].astype(jnp.bfloat16), weight, (scale, scales[1][:width])
                how = {"eps": 1e-5, "dtype": "bfloat16", "narrow": True} | more
                total, (normed, scale) = added(x, *given, **how)
                # Compared in a product, where a number that rounds the other way hardly counts.
                return (normed.astype(jnp.float32) @ matrix) * scale, total

            return call

        kernel = of(step_gpu.narrowed, step_gpu.added, interpret=interpret)
        reference = of(step_gpu.reference_narrowed, step_gpu.reference_added)
        return check(kernel, reference, carry, product, tuple(scales), weight, matrix)

    yield f"{STEP}rotated_qkv, {heads} heads of {RELEASE_HEAD_DIM}", rotated
    for width in (2048, 4096):
        yield f"{STEP}added_normed, {width} wide", functools.partial(added, width)
    yield f"{STEP}narrowed, {step_gpu.CHUNK} wide", narrowed


@functools.cache
def _lowered(one: Trial, implementation: str, dtype: str) -> jax.stages.Lowered:
    """Returns a program of q, k, v and the output's gradient, which is compiled only once.

    It computes attention and, in a trial of gradients, these; the reference as exactly as possible.
    """
    tags, layer = one.tags(), LAYER if one.decodes else None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return attention.step_causal_attention(
            q, k, v, **tags, num_heads=one.heads, layer=layer, implementation=implementation
        )

    @jax.jit
    def run(q, k, v, pulled):
        if not one.gradients:
            return (attend(q, k, v),)
        out, pull_back = jax.vjp(attend, q, k, v)
        return (out, *pull_back(pulled))

    exact = implementation == "reference"
    with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
        return run.lower(*one.types(dtype))


def _say(values: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")  # at once, from any thread
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore
