# SPDX-License-Identifier: Apache-2.0
"""Tiles measured on this device: `python -m benchmarks.attention --tune`.

Every candidate in `kernels/devices.py` is timed on the frozen shapes, together with the rule's
choice, in random order. Lengths that share an entry of the table get one choice: the candidate with
the least time over all their shapes, relative to the rule. The rule is kept unless a candidate
is faster by `WORTH`. On a GPU, forward and backward kernels are chosen separately.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import methods
from benchmarks.measurements import commit
from benchmarks.methods import HEAD_DIM, Case
from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.kernels import attention, devices, shapes
from sparse_lavida_jax.kernels.tile_lists import GpuSizes, TileSizes

DRY_CANDIDATES = 2  # per direction: an interpreted kernel takes seconds to compile
WORTH = 0.02  # as a share of the rule's time: smaller differences may be noise
Sizes = TileSizes | GpuSizes
Timed = dict[Sizes, float]  # median seconds


@dataclasses.dataclass(frozen=True)
class TileChoice:
    """The result for the lengths of one entry.

    Attributes:
        bucket: of the table.
        sizes: the best, or None if the rule is as good.
        median_us: times of the best by shape and direction; `rule_us`: those of the rule.
    """

    bucket: str
    sizes: Sizes | None
    median_us: dict[str, float]
    rule_us: dict[str, float]


def main(names: Sequence[str], runs: int, *, dry: bool) -> None:
    """Measures, rewrites the entries of this device, and reports what changed.

    Args:
        names: shapes to time; shapes that share an entry of the table belong together.
        runs: timed runs per candidate.
        dry: goes through everything with the kernel interpreted on a tiny shape; writes nothing.
    """
    implementation = methods.interpreted() if dry else attention.device_kernel()
    if implementation is None:
        raise SystemExit(
            "benchmarks.attention --tune: this device has no kernel, and so no tiles;"
            " --dry-run goes the whole way without measuring."
        )

    def times(case: Case, candidates: list[Sizes]) -> Timed:
        few = slice(DRY_CANDIDATES if dry else None)
        return _times(case, list(dict.fromkeys(candidates))[few], implementation, runs, dry)

    choices = [
        choose(entry, members, implementation, times)
        for entry, members in entries(names, dry).items()
    ]
    before = json.loads(devices.TABLE.read_text())
    after = rewritten(before, devices.device_kind(), HEAD_DIM, choices)
    if dry:
        print(f"{len(choices)} entry went the whole way; nothing is written")
        return
    write_json(devices.TABLE, after)
    print(changes(before, after) or "nothing changed")


def entries(names: Sequence[str], dry: bool) -> dict[str, list[Case]]:
    """Returns the frozen shapes by entry of the table; for a dry run, one tiny shape."""
    if dry:  # every sixth token of a shape, one head: a few tiles of each class
        tags, few = shapes.tags("t2i_1536"), slice(None, None, 6)
        own = shapes.RowTags(tags.query_block[few], tags.query_horizon[few], tags.key_block[few])
        cases = [Case("tiny", 1, own, heads=1, timed=False)]
    else:
        skipping = [name for name in names if not name.startswith("full")]
        cases = [Case(name, 1, shapes.tags(name)) for name in skipping]
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(devices.bucket(*case.lengths), []).append(case)
    return found


def choose(
    bucket: str,
    members: list[Case],
    implementation: str,
    times: Callable[[Case, list[Sizes]], Timed],
) -> TileChoice:
    """Returns the best tiles for one entry of the table.

    Args:
        members: its shapes, forward.
        implementation: the kernel.
        times: returns the median seconds of every candidate that can run a case.
    """
    median_us, rule_us = {}, {}
    best: dict[str, Sizes] = {}
    for what, candidates in _candidates(members, implementation).items():
        cases = [
            dataclasses.replace(member, backward=what != "forward" and not member.decodes)
            for member in members
            if not (what == "backward" and member.decodes)
        ]
        rules = {c.task: _rule(c, implementation) for c in cases}
        measured = {c.task: times(c, [rules[c.task], *candidates]) for c in cases}
        ratios = {
            size: statistics.geometric_mean(
                timed[size] / timed[rules[task]] for task, timed in measured.items()
            )
            for size in candidates
            if measured and all(size in timed for timed in measured.values())
        }
        winner = min(ratios, key=lambda size: ratios[size], default=None)
        if winner is not None and ratios[winner] < 1 - WORTH:
            best[what] = winner
        for task, timed in measured.items():
            median_us[task] = timed[best.get(what, rules[task])] * 1e6
            rule_us[task] = timed[rules[task]] * 1e6
    return TileChoice(bucket, _joined(best), median_us, rule_us)


def _rule(case: Case, implementation: str) -> Sizes:
    on_gpu = implementation in devices.OF_GPUS
    return devices.gpu_rule(implementation) if on_gpu else devices.rule(*case.lengths)


def _candidates(members: list[Case], implementation: str) -> dict[str, list[Any]]:
    """Returns candidates by what is timed; on a TPU both passes share their tiles."""
    if implementation in devices.OF_GPUS:
        return devices.gpu_candidates(HEAD_DIM, implementation)
    of_each = [set(devices.tpu_candidates(*case.lengths)) for case in members]
    return {"both": sorted(set.intersection(*of_each), key=dataclasses.astuple)}


def _joined(best: dict[str, Any]) -> Sizes | None:
    """Combines the forward tiles of one choice and the backward tiles of the other."""
    if "forward" not in best or "backward" not in best:
        return next(iter(best.values()), None)
    forward = dataclasses.asdict(best["forward"])
    own = {name: value for name, value in forward.items() if name.startswith("forward")}
    return dataclasses.replace(best["backward"], **own)


def _times(case: Case, candidates: list[Sizes], implementation: str, runs: int, dry: bool) -> Timed:
    numbers, programs = case.numbers(), {}
    for candidate in candidates:
        try:
            program = methods.ours(case, numbers, implementation=implementation, sizes=candidate)
            jax.block_until_ready(program.run())
            programs[candidate] = program
        except Exception as error:  # usually too little memory
            print(f"  {case.task} {candidate}: {type(error).__name__}: {error}"[:200], flush=True)
    times = methods.timed(programs, runs, 1 if dry else methods.IN_FLIGHT)
    found = {candidate: statistics.median(taken) for candidate, taken in times.items()}
    for candidate, seconds in sorted(found.items(), key=lambda pair: pair[1]):
        told = "runs" if dry else f"{seconds * 1e6:.1f} us"
        print(f"  {case.task} {candidate}: {told}", flush=True)
    return found


def rewritten(
    table: dict[str, Any], device: str, head_dim: int, choices: list[TileChoice]
) -> dict[str, Any]:
    """Returns the table with these choices for this device; entries of other devices stay."""
    of_device = dict(table.get(device, {}))
    entries = dict(of_device.get(str(head_dim), {}))
    for choice in choices:
        entries.pop(choice.bucket, None)
        if choice.sizes is not None:
            entry = dataclasses.asdict(choice)
            entries[entry.pop("bucket")] = entry | {"jax": jax.__version__, **commit()}
    return table | {device: of_device | {str(head_dim): dict(sorted(entries.items()))}}


def changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns a line for every entry whose sizes have changed."""

    def sizes(table: dict[str, Any]) -> dict[str, Any]:
        return {
            f"{device}, heads of {head_dim}, {bucket}": entry["sizes"]
            for device, by_head_dim in table.items()
            for head_dim, entries in by_head_dim.items()
            for bucket, entry in entries.items()
        }

    old, new = sizes(before), sizes(after)
    both = [(name, *(x.get(name, "the rule") for x in (old, new))) for name in sorted(old | new)]
    return "\n".join(f"{name}: {was} -> {now}" for name, was, now in both if was != now)
