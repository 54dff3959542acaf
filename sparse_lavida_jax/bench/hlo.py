# SPDX-License-Identifier: Apache-2.0
"""What a compiled program does in one call, read from its optimised HLO.

Loops are counted as often as they run. The compiler's own analysis (`cost_analysis`) counts the
body of a loop only once, and the layers of a model are a loop.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+))\[([\d,]*)\]")  # groups: bits per number, the shape
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_CALLS = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# For a loop that counts from 0 to a constant: the scalars, the comparison, the increment.
_CONSTANT = re.compile(r"%([\w.-]+) = [su]32\[\][^ ]* constant\((\d+)\)")
_COUNTER = re.compile(r"%([\w.-]+) = [su]32\[\][^ ]* get-tuple-element\(.*?\), index=(\d+)")
_COMPARED = re.compile(r"compare\(%([\w.-]+), ")
_ADDED = re.compile(r"%([\w.-]+) = [su]32\[\][^ ]* add\(%[\w.-]+, %([\w.-]+)\)")
_RETURNED = re.compile(r"^\s+ROOT .* tuple\((.*?)\)", re.MULTILINE)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PRODUCT = re.compile(r" (?:dot|convolution)\(")
_UNKNOWN_CYCLES = 2**62  # the compiler's value for "unknown"
_KERNEL_FLOPS = re.compile(r'tpu_custom_call.*"cost_estimate":\{"flops":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of exchange between devices.

    Attributes:
        kind: its name in HLO.
        result: its result on a device, such as "bf16[4096,6144]".
        bytes: size of the results of all its runs.
        runs: how often it runs in a call of the program.
    """

    kind: str
    result: str
    bytes: int
    runs: int


def collectives(hlo: str) -> list[Collective]:
    """Returns what the devices exchange in one call, largest first.

    All branches are counted, and one iteration of loops whose length is not constant. Bytes are
    those of the results: for an all-gather what a device ends up with, for an all-reduce what it
    puts in and gets out; a reduce-scatter counts its input, like the all-reduce that compilers for
    TPUs turn it into.
    """
    total: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for line, runs in _instructions(hlo):
        found = _INSTRUCTION.match(line)
        assert found is not None
        _, result, opcode, operands = found.groups()
        kind = opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        arrays = [(_size(one), one[0]) for one in _ARRAY.finditer(result)]
        if opcode.endswith("-start") and result.startswith("("):
            # Operands, results and hardware buffers: the largest is the one that counts.
            arrays = [max(arrays, key=lambda pair: pair[0])]
        told, parts = "+".join(name for _, name in arrays), 1
        if kind == "reduce-scatter":
            group = re.search(r"replica_groups=\{?\{([\d,]+)\}", operands)
            shape = re.search(r"replica_groups=\[(\d+),(\d+)\]", operands)
            parts = int(shape[2]) if shape else group[1].count(",") + 1 if group else 1
            told = f"{parts} x {told}"
        total[kind, told, parts * sum(size for size, _ in arrays)] += runs
    rows = [Collective(kind, told, size * n, n) for (kind, told, size), n in total.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def cycles(hlo: str, least_runs: int = 1) -> int:
    """Returns the compiler's estimate for a call, in cycles of a TPU core; 0 if there is none.

    It covers the instructions that it schedules, but not kernels or overlapped transfers.

    Args:
        least_runs: counts only instructions that run so often, such as those of layers.
    """
    return _sum(hlo, _CYCLES, least_runs=least_runs)


def product_cycles(hlo: str, least_runs: int = 1) -> int:
    """Returns those of `cycles` that are spent in products of matrices."""
    lines, _ = _computations(hlo)

    def multiplies(line: str) -> bool:
        own = [one for name in _CALLS.findall(line) for one in lines.get(name, [])]
        return any(map(_PRODUCT.search, [line, *own]))

    return _sum(hlo, _CYCLES, multiplies, least_runs)


def kernel_flops(hlo: str) -> int:
    """Returns the operations in Pallas kernels for TPUs per call, as the kernels state them."""
    return _sum(hlo, _KERNEL_FLOPS)


def _sum(
    hlo: str,
    number: re.Pattern,
    counts: Callable[[str], bool] = lambda line: True,
    least_runs: int = 1,
) -> int:
    found = ((number.search(x), n) for x, n in _instructions(hlo) if n >= least_runs and counts(x))
    return sum(int(n[1]) * runs for n, runs in found if n and int(n[1]) < _UNKNOWN_CYCLES)


def _size(array: re.Match) -> int:
    bits, shape = array.groups(default="8")
    return int(bits) // 8 * math.prod(int(n) for n in shape.split(",") if n)


def _instructions(hlo: str) -> Iterator[tuple[str, int]]:
    """Yields every instruction, with how often it runs in a call of the program."""
    lines, entry = _computations(hlo)
    runs: collections.Counter[str] = collections.Counter({entry: 1})
    # Callers come after the computations they call, so counts are complete when passed on.
    for name in reversed(lines):
        for line in lines[name]:
            for callee, times in _called(line, lines):
                runs[callee] += runs[name] * times
    for name, own in lines.items():
        yield from ((line, runs[name]) for line in own if runs[name])


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Returns the instructions of every computation, and the name of the first to run."""
    lines: dict[str, list[str]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            name = opened[2]
            entry = name if opened[1] else entry
            lines[name] = []
        elif name and _INSTRUCTION.match(line):
            lines[name].append(line)
    return lines, entry


def _called(line: str, lines: dict[str, list[str]]) -> list[tuple[str, int]]:
    """Returns the computations that an instruction calls, and how often."""
    if loop := _LOOP.search(line):
        known = _TRIPS.search(line)
        trips = int(known[1]) if known else _trips(*("\n".join(lines[n]) for n in loop.groups()))
        return [(name, trips) for name in loop.groups()]
    if branches := _BRANCHES.search(line):
        return [(name.strip().strip("%"), 1) for name in branches[1].split(",")]
    return [(name, 1) for name in _CALLS.findall(line)]


def _trips(condition: str, body: str) -> int:
    """Returns how often a loop runs that counts from 0 to a constant; 1 for other loops."""
    most = max((int(n) for _, n in _CONSTANT.findall(condition)), default=1)
    places = dict(_COUNTER.findall(condition))
    counter = next((int(places[x]) for x in _COMPARED.findall(condition) if x in places), None)
    returned = _RETURNED.search(body)
    names = re.findall(r"%([\w.-]+)", returned[1]) if returned else []
    if counter is None or counter >= len(names):
        return most
    added = dict(_ADDED.findall(body)).get(names[counter], "")
    stride = int(dict(_CONSTANT.findall(body)).get(added, 1)) or 1
    return -(-most // stride)
