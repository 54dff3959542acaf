# SPDX-License-Identifier: Apache-2.0
"""What a compiled program does in one call, read from its optimised HLO.

Loops are counted as often as they run. The compiler's own analysis (`cost_analysis`) counts the
body of a loop once, and the layers of a model are a loop.
"""

import collections
import dataclasses
import functools
import math
import re

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_CALLS = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")
_CONSTANT = re.compile(r"%([\w.-]+) = [su]32\[\][^ ]* constant\((\d+)\)")
_COUNTER = re.compile(r"%([\w.-]+) = [su]32\[\][^ ]* get-tuple-element\(.*?\), index=(\d+)")
_COMPARED = re.compile(r"compare\(%([\w.-]+), ")
_ADDED = re.compile(r"%([\w.-]+) = [su]32\[\][^ ]* add\(%[\w.-]+, %([\w.-]+)\)")
_RETURNED = re.compile(r"^\s+ROOT .* tuple\((.*?)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**62  # what the compiler writes where it cannot tell
_KERNEL_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of exchange between devices.

    Attributes:
        kind: its name in HLO.
        result: its result on a device, such as "bf16[4096,6144]".
        bytes: of the results of all its runs.
        runs: how often it runs in a call of the program.
    """

    kind: str
    result: str
    bytes: int
    runs: int


@dataclasses.dataclass
class _Computation:
    """Instructions of one computation, and what they call how often."""

    lines: list[str]
    calls: list[tuple[str, int]]

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        """Scalars by name."""
        return {found[1]: int(found[2]) for found in map(_CONSTANT.search, self.lines) if found}

    def counter(self) -> int | None:
        """Of the condition of a loop: which of the values that it carries is compared."""
        places = {found[1]: int(found[2]) for found in map(_COUNTER.search, self.lines) if found}
        compared = (found[1] for found in map(_COMPARED.search, self.lines) if found)
        return next((places[name] for name in compared if name in places), None)

    def stride(self, counter: int | None) -> int:
        """Of the body of a loop: what a round adds to one of the values; 1 where it is unclear."""
        added = {found[1]: found[2] for found in map(_ADDED.search, self.lines) if found}
        returned = next((found[1] for found in map(_RETURNED.search, self.lines) if found), "")
        names = [word.split("%")[-1].strip() for word in returned.split(", ")]
        if counter is None or counter >= len(names):
            return 1
        return self.constants.get(added.get(names[counter], ""), 1) or 1


def collectives(hlo: str) -> list[Collective]:
    """Returns what the devices exchange in one call, largest first.

    Of branches each is counted, of a loop whose length is not constant one round. The bytes are
    those of the results: of an all-gather what a device ends up with, of an all-reduce what it
    puts in and gets out; a reduce-scatter counts what goes in, as the all-reduce would that
    compilers for TPUs turn it into.
    """
    total: collections.Counter[tuple[str, str]] = collections.Counter()
    for line, runs in _instructions(hlo):
        found = _INSTRUCTION.match(line)
        assert found is not None
        _, result, opcode, operands = found.groups()
        kind = opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        if opcode.endswith("-start") and result.startswith("("):
            # Operands, results and what the hardware needs: the largest is the one that counts.
            result = max(_arrays(result), key=_size)
        told = "+".join(_arrays(result))
        if kind == "reduce-scatter":
            group = re.search(r"replica_groups=\{?\{([\d,]+)\}", operands)
            shape = re.search(r"replica_groups=\[(\d+),(\d+)\]", operands)
            parts = int(shape[2]) if shape else group[1].count(",") + 1 if group else 1
            told = f"{parts} x {told}"
        total[kind, told] += runs
    rows = [
        Collective(kind, result, _total_size(result) * runs, runs)
        for (kind, result), runs in total.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def cycles(hlo: str) -> int:
    """Returns the compiler's estimate of a call, in cycles of a TPU core; 0 where it has none.

    Of the instructions that it schedules: kernels, and transfers that it hides, have none.
    """
    return sum(
        int(found[1]) * runs
        for line, runs in _instructions(hlo)
        if (found := _CYCLES.search(line)) and int(found[1]) < _UNKNOWN_CYCLES
    )


def kernel_flops(hlo: str) -> int:
    """Returns what Pallas kernels for TPUs compute in a call, as they say of themselves."""
    return sum(
        int(found[1]) * runs
        for line, runs in _instructions(hlo)
        if "tpu_custom_call" in line and (found := _KERNEL_FLOPS.search(line))
    )


def _instructions(hlo: str) -> list[tuple[str, int]]:
    """Returns every instruction with how often it runs in a call of the program."""
    computations, entry = _parse(hlo)
    runs: collections.Counter[str] = collections.Counter({entry: 1})
    # Callers come after what they call, so that counts are whole when they are passed on.
    for name in reversed(computations):
        for callee, times in computations[name].calls:
            runs[callee] += runs[name] * times
    return [
        (line, runs[name])
        for name, found in computations.items()
        if runs[name]
        for line in found.lines
    ]


def _parse(hlo: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    current, entry = _Computation([], []), ""
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            entry = opened[2] if opened[1] else entry
            current = computations[opened[2]] = _Computation([], [])
        elif _INSTRUCTION.match(line):
            current.lines.append(line)
            if loop := _LOOP.search(line):
                condition, body = (computations[name] for name in loop.groups())
                known = _TRIPS.search(line)
                trips = int(known[1]) if known else _trips(condition, body)
                current.calls += [(loop[2], trips), (loop[1], trips)]
            elif branches := _BRANCHES.search(line):
                current.calls += [(b.strip().strip("%"), 1) for b in branches[1].split(",")]
            else:
                current.calls += [(callee, 1) for callee in _CALLS.findall(line)]
    return computations, entry


def _trips(condition: _Computation, body: _Computation) -> int:
    """Returns how often a loop runs that counts from 0 to a constant; 1 where there is none."""
    most = max(condition.constants.values(), default=1)
    return -(-most // body.stride(condition.counter()))


def _arrays(text: str) -> list[str]:
    return [f"{dtype}[{shape}]" for dtype, shape in _ARRAY.findall(text) if dtype in _BYTES]


def _size(array: str) -> int:
    dtype, shape = array.rstrip("]").split("[")
    return _BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)


def _total_size(result: str) -> int:
    parts, _, arrays = result.rpartition(" x ")
    return int(parts or 1) * sum(map(_size, arrays.split("+")))
