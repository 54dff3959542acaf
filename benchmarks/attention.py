# SPDX-License-Identifier: Apache-2.0
r"""Attention on the frozen shapes: our kernel against all alternatives that a user has.

        python -m benchmarks.attention                # on a GPU; 8 minutes per case
        python -m benchmarks.attention --dry-run      # anywhere: agreement, no times
        python -m benchmarks.attention --tune         # measures tiles instead

All methods run in one process in random order on the same random numbers, 32 heads of 128 in
bfloat16: ours; cuDNN without a mask (the peak of dense attention, with another result), with the
dense mask, and by segments; tokamax without and with the mask; XLA with the mask; our blocks in
plain `lax`, used on other GPUs; PyTorch's FlexAttention. A method that is not installed or fails is
left out, and the reason given. Rows are written as they are measured, so an interrupted run keeps
them. A call of a short shape takes little more than its launch: its row also has its time on the
device, as the profiler reports it. At the end the ratios are compared with `bars.toml`, as
`benchmarks/table.py` does for the committed rows.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags, logging

from benchmarks import command, device_time, methods, table, timing, tune
from benchmarks.measurements import Bench
from benchmarks.methods import Case, Program
from sparse_lavida_jax.kernels import attention, shapes

SHAPES = flags.DEFINE_list(
    "shapes", list(shapes.names()), "Shapes of kernels/shapes.py to measure."
)
BATCHES = flags.DEFINE_list("batches", ["1", "2"], "Batch sizes; all rows have the same tags.")
FLAGS = flags.FLAGS
RUNS = flags.DEFINE_integer("runs", 20, "Timed runs per method.", lower_bound=5)
MINUTES = flags.DEFINE_float("minutes", 8.0, "Start no case that would end after this time.")
DRY = flags.DEFINE_boolean("dry-run", False, "Use two heads, interpret the kernel, time nothing.")
TUNE = flags.DEFINE_boolean("tune", False, "Measure tiles, and rewrite kernels/tile_sizes.json.")

AGREES = 3e-2  # largest difference from the reference, bfloat16
TABLES_LEN, TABLES_ROWS = 8192, 4
MEMORY_LENS = (4096, 8192)


def main(_: list[str]) -> None:
    """Measures every shape, or checks that the methods agree, or measures tiles."""
    logging.set_verbosity(logging.WARNING)
    if TUNE.value:
        tune.main(SHAPES.value, 1 if DRY.value else RUNS.value, dry=DRY.value)
        return
    if DRY.value:
        for case in _cases(heads=2, timed=False):
            numbers = case.numbers()
            wanted = methods.reference(case, numbers)
            for method, make in methods.methods(case, dry=True).items():
                off = methods.difference(make(numbers).outputs(), wanted, case)
                print(f"{_id(case, method)}: off by {off:.4f}")
        return
    if attention.device_kernel() is None:
        sys.exit(
            "benchmarks.attention: this device has no kernel to measure. Use --dry-run to compare"
            " all methods on small shapes."
        )
    bench, calibration = Bench("attention"), timing.calibrate()
    print(f"this device: {calibration}", flush=True)
    what: dict[str, Callable[[Callable], None]] = {"tables": _tables, "memory": _memory}
    for case in _cases(heads=methods.HEADS):
        what[f"{case.task}/b{case.batch}"] = functools.partial(_measure, case)

    def write(row_id: str, row: dict[str, Any]) -> None:
        bench.write(row_id, {"calibration": calibration, **row})

    for name in timing.in_time([*what], MINUTES.value):
        print(name, flush=True)
        try:
            what[name](write)
        except Exception as error:  # the others are still worth measuring
            _left_out(name, error)
    rows = bench.rows()
    print(f"\n{table.table('attention', rows)}\n\n{table.attention_bars(rows)}")


def _cases(heads: int, *, timed: bool = True) -> list[Case]:
    """Returns all cases of one row before those of two: an interrupted run then has every shape."""
    return [
        Case(name, batch, shapes.tags(name), heads, backward, timed)
        for batch in map(int, BATCHES.value)
        for backward in (False, True)
        for name in SHAPES.value
        if not (backward and name.startswith("decode"))
    ]


def _id(case: Case, method: str) -> str:
    return f"{case.name}/{method}/{case.task.split('/')[1]}/b{case.batch}"


def _left_out(name: str, error: Exception) -> None:
    print(f"  {name}: left out, {type(error).__name__}: {error}"[:300], flush=True)


def _measure(case: Case, write: Callable) -> None:
    """Times one case with every method that runs here."""
    numbers = case.numbers()
    wanted = methods.reference(case, numbers)
    programs, seconds = {}, {}
    for method, make in methods.methods(case).items():
        begin = time.perf_counter()
        try:
            program = make(numbers)
            found = program.outputs()  # some compile only when they first run
            compile_s = time.perf_counter() - begin
            same = method not in methods.UNMASKED or case.mask.all()
            off = methods.difference(found, wanted, case) if same else 0.0
            if not off <= AGREES:  # also for NaN
                raise ValueError(f"it is off by {off:.3f}")
        except Exception as error:  # other packages raise various errors where they cannot run
            _left_out(method, error)
            continue
        programs[method], seconds[method] = program, compile_s
    for method, taken in methods.timed(programs, RUNS.value).items():
        told = (f"{methods.IN_FLIGHT} calls in flight", "tables made before", programs[method].note)
        row = timing.times(taken) | {
            "task": case.task,
            "method": method,
            "dtype": "bfloat16",
            "batch": case.batch,
            "ids_sha256": case.tags.sha256,
            "tokens": dict(zip(("queries", "keys"), case.lengths, strict=True)),
            "flops": case.flops,
            "bytes": {"least": case.least_bytes, "temporary": programs[method].temp_bytes},
            "compile_s": seconds[method],
            "device_s": _on_device(programs[method]) if case.lengths[0] < methods.SHORT else None,
            "note": "; ".join(filter(None, told)),
        }
        write(_id(case, method), row)
        print(f"  {_id(case, method)}: {statistics.median(taken) * 1e6:.1f} us", flush=True)


def _on_device(program: Program) -> float | None:
    """Returns the seconds of the device for a call, without launches; None: nothing is reported."""
    found = device_time.kernels(lambda: program.wait(program.run()))
    return sum(seconds for _, seconds in found) / program.calls or None


def _tables(write: Callable) -> None:
    """Times the tables of a forward pass: for all tokens, and for the tokens of each stream."""
    name = f"packed_{TABLES_LEN}"
    tags = Case(name, TABLES_ROWS, shapes.tags(name)).arrays()
    cut = TABLES_LEN // 4  # tokens of the first stream; any number would do
    parts = (slice(None), slice(None, cut), slice(cut, None))

    make = functools.partial(attention.make_tables, implementation=attention.device_kernel())

    def calls(tags):
        for _ in range(methods.IN_FLIGHT):
            made = [make(*(tag[:, part] for tag in tags)) for part in parts]
            # Makes the next call depend on this one, so that nothing is computed once for all.
            tags, made = jax.lax.optimization_barrier((tags, made))
        return made

    run = functools.partial(jax.jit(calls).lower(tags).compile(), tags)
    taken = methods.timed({"tables": Program(run, methods.IN_FLIGHT)}, RUNS.value)["tables"]
    row = {"task": f"tables_{TABLES_LEN}", "method": "kernel", "batch": TABLES_ROWS}
    note = "joint tables and those of two streams, once a forward pass"
    write("tables", timing.times(taken) | row | {"note": note})


def _memory(write: Callable) -> None:
    """Measures temporary memory of the kernel, forward and backward, as counted by the compiler."""
    sizes = []
    for length in MEMORY_LENS:
        nothing = np.zeros(length, np.int32)
        case = Case(f"full_{length}", 1, shapes.RowTags(nothing, nothing, nothing), backward=True)
        kernel = attention.device_kernel()
        sizes.append(methods.ours(case, case.numbers(), implementation=kernel).temp_bytes)
    if None in sizes:
        raise ValueError("this compiler does not tell")
    row = {"task": "memory", "method": "kernel", "batch": 1, "growth": sizes[1] / max(sizes[0], 1)}
    temporary = dict(zip(map(str, MEMORY_LENS), sizes, strict=True))
    write("memory", row | {"bytes": {"temporary": temporary}})


if __name__ == "__main__":
    command.run(main)
