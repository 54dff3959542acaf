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
_ARRAY = re.compile(
    r"\b(?:pred|[a-z]+(\d+)(?:e\w+)?)\[([\d,]*)\]"
)  # groups: bits per number, the shape
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


def operations(hlo: str) -> float:
    """Returns the operations of a call for a TPU: of products of matrices, and in kernels."""
    lines, _ = _computations(hlo)
    parsed = {name: {x.name: x for x in map(_parsed, own)} for name, own in lines.items()}
    runs = {line: n for line, n in _instructions(hlo)}
    products = (
        runs.get(x.line, 0) * _products(x, own) for own in parsed.values() for x in own.values()
    )
    return sum(products) + kernel_flops(hlo)


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


# ---------------------------------------------------------------------------------------------
# Kernels of a program for a GPU.

# Instructions that start nothing on the device.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "while", "call", "conditional", "optimization-barrier", "opt-barrier",
}  # fmt: skip
_OPERAND = re.compile(r"%([\w.-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)"?([\d,"]*)')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OF_GRADIENTS = {"step_causal_attention_dq": 3, "step_causal_attention_dkv": 4}  # products
_KERNEL_OUTPUT = re.compile(r"dim_labels=\w+_(\w+)->")
_IN_PLACE = re.compile(r"output_to_operand_aliasing=\{(.*?)\}, ")
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), ")  # numbers of a result and of an operand
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that a GPU runs.

    Attributes:
        name: of the instruction, or of what a custom call calls.
        kind: "products", "attention", "copies" or "others".
        operations: of products of matrices; of attention over all slots.
        bytes: read and written, each operand once; of one that is only sliced, the slices.
        made: shapes of the results, but not of those written in place.
        runs: how often it runs in a call of the program; in a loop of steps, how often a step.
        in_step: whether it is inside the loop of steps.
        read: shapes of the operands that were not made by another kernel of the step.
        is_narrow: whether it multiplies matrices in 8 bits, at twice the rate (the vendor's ratio).
    """

    name: str
    kind: str
    operations: float
    bytes: int
    made: tuple[tuple[int, ...], ...]
    runs: int
    in_step: bool
    read: tuple[tuple[int, ...], ...] = ()
    is_narrow: bool = False

    def seconds(self, operations_a_second: float, bytes_a_second: float) -> float:
        """Returns the least time of all runs at these rates, of products in 16 bits and copies."""
        operations = self.operations / (2 if self.is_narrow else 1)
        once = max(operations / operations_a_second, self.bytes / bytes_a_second)
        return self.runs * once


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    results: tuple[tuple[int, tuple[int, ...]], ...]  # bytes and shape of each
    operands: tuple[str, ...]
    line: str

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.results)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for _, shape in self.results)


def kernels(hlo: str) -> list[Kernel]:
    """Returns the kernels of a program. A loop without a constant length is the loop of steps."""
    lines, entry = _computations(hlo)
    parsed = {name: {one.name: one for one in map(_parsed, own)} for name, own in lines.items()}
    found: list[Kernel] = []

    def walk(computation: str, runs: int, in_step: bool) -> None:
        own = parsed[computation]
        for one in own.values():
            if one.opcode == "while":
                loop = _LOOP.search(one.line)
                assert loop is not None
                known = _TRIPS.search(one.line)
                trips = int(known[1]) if known else 1
                walk(loop[2], runs * trips, in_step or not known)
            elif one.opcode in ("call", "conditional"):
                for name, _ in _called(one.line, lines):
                    walk(name, runs, in_step)
            elif one.opcode not in _FREE and not one.opcode.endswith("-done"):
                found.append(_kernel(one, own, parsed, runs, in_step))

    walk(entry, 1, False)
    return found


def _parsed(line: str) -> _Instruction:
    found = _INSTRUCTION.match(line)
    assert found is not None
    name, result, opcode, rest = found.groups()
    results = tuple(
        (_size(one), tuple(int(n) for n in one[2].split(",") if n))
        for one in _ARRAY.finditer(result)
    )
    depth, end = 1, len(rest)
    for at, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            end = at
            break
    return _Instruction(name, opcode, results, tuple(_OPERAND.findall(rest[:end])), line)


def _kernel(
    one: _Instruction,
    own: dict[str, _Instruction],
    parsed: dict[str, dict[str, _Instruction]],
    runs: int,
    in_step: bool,
) -> Kernel:
    """Returns the kernel of an instruction, of the computation `own`."""
    callee = _CALLS.search(one.line)
    within = parsed.get(callee[1], {}) if callee and "fusion" in one.opcode else {}
    if inner := next(
        (
            x
            for x in within.values()
            if "step_causal_attention" in x.line and x.opcode == "custom-call"
        ),
        None,
    ):  # with slices of what it takes
        return _kernel(inner, within, parsed, runs, in_step)
    target = _TARGET.search(one.line)
    name = target[1] if target else one.name
    operations = _products(one, own) + sum(_products(inner, within) for inner in within.values())
    read = [own[operand] for operand in one.operands if operand in own]
    given = [x for x in read if x.opcode in ("parameter", "get-tuple-element")]
    shapes = tuple(shape for x in given for shape in x.shapes)
    if "step_causal_attention" in one.line and target and not name.startswith("__cublas"):
        operations, size = _of_attention(one, read)
        return Kernel(name, "attention", operations, size, one.shapes, runs, in_step, shapes)
    if not within:
        # A slice reads no more than it returns, and an update writes no more than it is given.
        if one.opcode in _SLICES:
            size, made = 2 * one.size, one.shapes
        elif one.opcode == "dynamic-update-slice":
            size, made = 2 * read[1].size, ()
        elif aliased := _IN_PLACE.search(one.line):
            # What is changed in place is written to no more than the kernel reads besides.
            pairs = [(int(a or 0), int(b)) for a, b in _ALIASED.findall(aliased[1] + ", ")]
            results, operands = ({*numbers} for numbers in zip(*pairs, strict=True))
            size = 2 * sum(x.size for i, x in enumerate(read) if i not in operands)
            made = tuple(shape for i, shape in enumerate(one.shapes) if i not in results)
        else:
            size, made = sum(x.size for x in read) + one.size, one.shapes
    else:
        inputs = [x for x in within.values() if x.opcode == "parameter"]
        size = sum(_size_read(x, within) for x in inputs)
        written, made = _written(within)
        size += written
    is_copy = one.opcode == "copy" or (within and _only_moves(within))
    kind = "products" if operations else "copies" if is_copy else "others"
    narrow = any(
        _is_narrow(*pair) for pair in ((one, own), *((x, within) for x in within.values()))
    )
    return Kernel(name, kind, operations, size, made, runs, in_step, shapes, narrow)


def _products(one: _Instruction, own: dict[str, _Instruction]) -> float:
    """Returns the operations of an instruction if it is a product of matrices."""
    is_convolution = one.opcode == "convolution" or "__cudnn$conv" in one.line
    if is_convolution and (labels := _KERNEL_OUTPUT.search(one.line)):
        # Also what compilers for TPUs make of a product: the numbers of the kernel per output.
        kernel = own[one.operands[1]].shapes[0]
        return 2.0 * _numbers(one) * math.prod(kernel) / kernel[labels[1].index("o")]
    is_library = one.opcode == "custom-call" and "__cublas$" in one.line
    if one.opcode != "dot" and not is_library:
        return 0.0
    contracted, given = _CONTRACTED.search(one.line), own.get(one.operands[0])
    if contracted is None or given is None:
        return 0.0
    axes = [int(n) for n in contracted[1].replace('"', "").split(",") if n]
    result = max(math.prod(shape) for shape in one.shapes[:1])
    return 2.0 * result * math.prod(given.shapes[0][axis] for axis in axes)


def _is_narrow(one: _Instruction, own: dict[str, _Instruction]) -> bool:
    """Whether an instruction multiplies two matrices in 8 bits."""
    given = [own[name] for name in one.operands[:2] if name in own]
    return bool(_products(one, own)) and all(x.size == _numbers(x) for x in given)


def _of_attention(one: _Instruction, read: list[_Instruction]) -> tuple[float, int]:
    """Returns the operations and bytes of attention over all slots, of one layer of a cache.

    The wide operands are queries [b s w] or [b s h d], keys and values [n b t w] or [n b t h d].
    """
    wide = sorted((x for x in read if x.results and x.size >= 2**12), key=lambda x: -x.size)
    if len(wide) < 3:
        return 0.0, sum(x.size for x in read) + one.size
    keys, values, *rest = wide
    query = next((x for x in rest if math.prod(x.shapes[0]) == _numbers(one)), rest[0])
    others = sum(x.size for x in rest if x is not query)
    batch = query.shapes[0][0]
    shape = keys.shapes[0]
    layers = shape[0] if len(shape) > len(query.shapes[0]) else 1
    width = _numbers(query) // (batch * query.shapes[0][1])
    slots = math.prod(shape) // (layers * batch * width)
    products = next((n for name, n in _OF_GRADIENTS.items() if name in one.line), 2)
    operations = 2.0 * products * _numbers(query) * slots
    return operations, query.size + others + one.size + (keys.size + values.size) // layers


def _numbers(one: _Instruction) -> int:
    return math.prod(one.shapes[0])


def _size_read(given: _Instruction, within: dict[str, _Instruction]) -> int:
    """Returns the bytes that a fusion reads of a parameter."""
    users = [x for x in within.values() if given.name in x.operands]
    total = 0
    for user in users:
        if user.opcode == "bitcast":
            total += _size_read(user, within)
        elif user.opcode in _SLICES and user.operands[0] == given.name:
            total += user.size
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != given.name:
            return given.size
    return min(total, given.size)


def _written(within: dict[str, _Instruction]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Returns the bytes that a fusion writes, and the shapes of what it does not write in place."""
    root = next(x for x in within.values() if x.line.lstrip().startswith("ROOT"))
    outputs = [within[name] for name in root.operands] if root.opcode == "tuple" else [root]
    size, made = 0, []
    for output in outputs:
        while output.opcode == "bitcast" and output.operands[0] in within:
            output = within[output.operands[0]]
        if output.opcode == "dynamic-update-slice":
            size += within[output.operands[1]].size
        else:
            size += output.size
            made += output.shapes
    return size, tuple(made)


def _only_moves(within: dict[str, _Instruction]) -> bool:
    moves = {"copy", "transpose", "bitcast", "parameter", "slice", "concatenate", "reshape"}
    return all(one.opcode in moves | {"tuple", "constant"} for one in within.values())
