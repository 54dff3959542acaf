# SPDX-License-Identifier: Apache-2.0
r"""Attention on the frozen shapes: our kernel against everything a user could take in its place.

    python -m sparse_lavida_jax.bench.attention                # on a GPU; 8 minutes and a case
    python -m sparse_lavida_jax.bench.attention --dry-run      # anywhere: no times, do they agree?
    python -m sparse_lavida_jax.bench.attention --tune         # measures tiles instead

All methods run in one process in random order on the same random numbers, 32 heads of 128 in
bfloat16: ours; cuDNN without a mask (the peak of dense attention, another result), with the dense
mask, and by segments; tokamax without and with the mask; XLA with the mask; our blocks in plain
`lax`, which other GPUs run; PyTorch's FlexAttention. A method that is not installed or fails is
left out with the reason. Every row is written when it is measured, so a run that is cut keeps what
it has. At the end the ratios are held against `bars.toml`, as `bench/table.py` does with the
committed rows.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from sparse_lavida_jax.bench import cases, methods, table, timing, tune
from sparse_lavida_jax.bench.cases import Case
from sparse_lavida_jax.bench.methods import Program
from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.bench.timing import calibrate
from sparse_lavida_jax.kernels import attention, shapes

SHAPES = flags.DEFINE_list("shapes", list(shapes.names()), "Of kernels/shapes.py.")
BATCHES = flags.DEFINE_list("batches", ["1", "2"], "Rows of each shape, all with the same tags.")
FLAGS = flags.FLAGS
RUNS = flags.DEFINE_integer("runs", 20, "Timed runs of each method.", lower_bound=5)
MINUTES = flags.DEFINE_float("minutes", 8.0, "No further case is begun after this long.")
DRY = flags.DEFINE_boolean("dry-run", False, "Two heads, the kernel interpreted, nothing timed.")
TUNE = flags.DEFINE_boolean("tune", False, "Measure tiles, and rewrite kernels/tile_sizes.json.")

AGREES = 3e-2  # largest difference from the reference, bfloat16
TABLES_LEN, TABLES_ROWS = 8192, 4
MEMORY_LENS = (4096, 8192)


def main(argv: list[str]) -> None:
    """Measures every shape, or checks that the methods agree; or measures tiles."""
    del argv
    logging.set_verbosity(logging.WARNING)
    if TUNE.value:
        tune.main(1 if DRY.value else RUNS.value, dry=DRY.value)
        return
    if DRY.value:
        for case in _cases(heads=2, timed=False):
            _check(case)
        return
    if attention.default_implementation() not in attention.KERNELS:
        sys.exit(
            "bench.attention: there is no kernel for this device, so nothing to measure;"
            " --dry-run checks on small shapes that everything agrees."
        )
    begin, bench = time.perf_counter(), Bench("attention")
    calibration = calibrate()
    print(f"this device: {calibration}", flush=True)
    shared = {"calibration": calibration}
    _or_left_out("tables", lambda: _measure_tables(bench, shared))
    _or_left_out("memory", lambda: _measure_memory(bench, shared))
    left = _cases(heads=cases.HEADS)
    for at, case in enumerate(left):
        minutes = (time.perf_counter() - begin) / 60
        if minutes > MINUTES.value:
            names = ", ".join(f"{case.task}/b{case.batch}" for case in left[at:])
            print(f"left out after {minutes:.1f} minutes (--minutes): {names}")
            break
        print(
            f"[{minutes:.1f} min, {at} of {len(left)}] {case.task}, {case.batch} rows", flush=True
        )
        _or_left_out(case.task, lambda case=case: _measure(bench, case, shared))
    rows = bench.rows()
    print(f"\n{table.table('attention', rows)}\n\n{table.attention_bars(rows)}")


def _or_left_out(what: str, measure: Callable[[], None]) -> None:
    """Goes on where one measurement fails: the others are worth having."""
    try:
        measure()
    except Exception as error:
        print(f"{what}: left out, {type(error).__name__}: {error}"[:300], flush=True)


def _cases(heads: int, *, timed: bool = True) -> list[Case]:
    """All of one row before those of two: a run that is cut has every shape."""
    return [
        Case(name, batch, shapes.tags(name), heads, backward, timed)
        for batch in map(int, BATCHES.value)
        for backward in (False, True)
        for name in SHAPES.value
        if not (backward and name.startswith("decode"))
    ]


def _check(case: Case) -> None:
    """Prints how far every method is off, of those that run anywhere."""
    numbers = case.numbers()
    wanted = cases.reference(case, numbers)
    for method, make in methods.methods(case, dry=True).items():
        off = cases.difference(make(numbers).outputs(), wanted, case)
        print(f"{case.name}/{method}/{case.task.split('/')[1]}/b{case.batch}: off by {off:.4f}")


def _measure(bench: Bench, case: Case, shared: dict[str, Any]) -> None:
    """Times one case by every method that runs here."""
    numbers = case.numbers()
    wanted = cases.reference(case, numbers)
    programs, seconds = {}, {}
    for method, make in methods.methods(case).items():
        begin = time.perf_counter()
        try:
            program = make(numbers)
            found = program.outputs()
        except Exception as error:  # what other packages raise where they do not run
            print(f"  {method}: left out, {type(error).__name__}: {error}"[:300], flush=True)
            continue
        seconds[method] = time.perf_counter() - begin
        same = method not in methods.UNMASKED or case.mask.all()
        off = cases.difference(found, wanted, case) if same else 0.0
        if not off <= AGREES:  # NaN too
            print(f"  {method}: left out, it is off by {off:.3f}", flush=True)
            continue
        programs[method] = program
    for method, taken in methods.timed(programs, RUNS.value).items():
        row_id = f"{case.name}/{method}/{case.task.split('/')[1]}/b{case.batch}"
        row = _row(case, method, taken, programs[method])
        bench.write(row_id, shared | row | {"compile_s": seconds[method]})
        print(f"  {row_id}: {statistics.median(taken) * 1e6:.1f} us", flush=True)


def _row(case: Case, method: str, taken: list[float], program: Program) -> dict[str, Any]:
    return timing.times(taken) | {
        "task": case.task,
        "method": method,
        "dtype": "bfloat16",
        "batch": case.batch,
        "ids_sha256": case.tags.sha256,
        "tokens": {"queries": len(case.tags.query_block), "keys": len(case.tags.key_block)},
        "flops": case.flops,
        "programs": case.programs,
        "bytes": {"least": case.least_bytes, "temporary": program.temp_bytes},
        "note": f"{methods.IN_FLIGHT} calls in flight; tables made before. {program.note}".strip(),
    }


def _measure_tables(bench: Bench, shared: dict[str, Any]) -> None:
    """Times what a forward pass makes: tables of all tokens, and of the tokens of each stream."""
    tags = Case(f"packed_{TABLES_LEN}", TABLES_ROWS, shapes.tags(f"packed_{TABLES_LEN}")).arrays()
    cut = TABLES_LEN // 4  # tokens of the one stream, in which nothing is special
    parts = (slice(None), slice(None, cut), slice(cut, None))

    def calls(tags):
        for _ in range(methods.IN_FLIGHT):
            made = [attention.make_tables(*(tag[:, part] for tag in tags)) for part in parts]
            # Ties the next call to this one, so that nothing is computed once for all.
            tags, made = jax.lax.optimization_barrier((tags, made))
        return made

    program = jax.jit(calls).lower(tags).compile()
    run = functools.partial(program, tags)
    taken = methods.timed(
        {"tables": Program(run, jax.block_until_ready, methods.IN_FLIGHT, tuple)}, RUNS.value
    )
    row = timing.times(taken["tables"]) | {"task": f"tables_{TABLES_LEN}", "method": "kernel"}
    note = "joint tables and those of two streams, once a forward pass"
    bench.write("tables", shared | row | {"batch": TABLES_ROWS, "note": note})
    print(f"tables: {statistics.median(taken['tables']) * 1e6:.1f} us", flush=True)


def _measure_memory(bench: Bench, shared: dict[str, Any]) -> None:
    """Temporary memory of the kernel, forward and backward, as the compiler counts it."""
    sizes = {}
    for length in MEMORY_LENS:
        nothing = np.zeros(length, np.int32)
        case = Case(f"full_{length}", 1, shapes.RowTags(nothing, nothing, nothing), backward=True)
        sizes[length] = methods.ours(case, case.numbers()).temp_bytes
    if any(size is None for size in sizes.values()):
        print("memory: left out, this compiler does not tell")
        return
    least, most = MEMORY_LENS
    growth = sizes[most] / max(sizes[least], 1)
    row = {"task": "memory", "method": "kernel", "batch": 1, "growth": growth}
    temporary = {str(length): size for length, size in sizes.items()}
    bench.write("memory", shared | row | {"bytes": {"temporary": temporary}})
    print(f"memory: {most} tokens take {growth:.2f} times what {least} do", flush=True)


if __name__ == "__main__":
    app.run(main)
