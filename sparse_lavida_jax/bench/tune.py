# SPDX-License-Identifier: Apache-2.0
"""Tiles measured on this device: `python -m sparse_lavida_jax.bench.attention --tune`.

Every candidate of `kernels/devices.py` is timed on the frozen shapes, together with what the rule
chooses, in random order. Lengths that share an entry of the table share the choice: the candidate
of the least time on all their shapes, in proportion to that of the rule. The rule stays where
nothing beats it by `WORTH`. On a GPU forward and backward kernels are chosen each by itself.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sparse_lavida_jax.bench import methods
from sparse_lavida_jax.bench.methods import HEAD_DIM, Case
from sparse_lavida_jax.bench.record import commit
from sparse_lavida_jax.data.files import write_json
from sparse_lavida_jax.kernels import attention, devices, shapes
from sparse_lavida_jax.kernels.tables import GpuSizes, TileSizes

DRY_CANDIDATES = 2  # of each direction: an interpreted kernel takes seconds to compile
WORTH = 0.02  # share of the rule's time: less may be noise
Sizes = TileSizes | GpuSizes
Timed = dict[Sizes, float]  # median seconds


@dataclasses.dataclass(frozen=True)
class TileChoice:
    """What was found for the lengths of one entry.

    Attributes:
        bucket: of the table.
        sizes: the best, or None where the rule is as good.
        median_us: of the best, by shape and direction; `rule_us` of the rule.
    """

    bucket: str
    sizes: Sizes | None
    median_us: dict[str, float]
    rule_us: dict[str, float]


def main(names: Sequence[str], runs: int, *, dry: bool) -> None:
    """Measures, rewrites the entries of this device, and says what changed.

    Args:
        names: of the shapes to time; shapes that share an entry of the table go together.
        runs: timed runs of each candidate.
        dry: goes the whole way on a tiny shape with the kernel interpreted, and writes nothing.
    """
    implementation = methods.interpreted() if dry else attention.device_kernel()
    if implementation is None:
        raise SystemExit(
            "bench.attention --tune: there is no kernel for this device, so there are no tiles;"
            " --dry-run goes the whole way without measuring."
        )
    on_gpu = implementation == "pallas_gpu"

    def times(case: Case, candidates: list[Sizes]) -> Timed:
        few = slice(DRY_CANDIDATES if dry else None)
        return _times(case, list(dict.fromkeys(candidates))[few], implementation, runs, dry)

    choices = [
        choose(entry, members, on_gpu, times) for entry, members in entries(names, dry).items()
    ]
    before = json.loads(devices.TABLE.read_text())
    after = rewritten(before, devices.device_kind(), HEAD_DIM, choices)
    if dry:
        print(f"{len(choices)} entry went the whole way; nothing is written")
        return
    write_json(devices.TABLE, after)
    print(changes(before, after) or "nothing changed")


def entries(names: Sequence[str], dry: bool) -> dict[str, list[Case]]:
    """The frozen shapes by the entry of the table that serves them; one tiny shape to go dry."""
    if dry:  # every sixth token of a shape, one head: a few tiles of every class
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
    bucket: str, members: list[Case], on_gpu: bool, times: Callable[[Case, list[Sizes]], Timed]
) -> TileChoice:
    """Returns the best tiles of one entry of the table.

    Args:
        members: its shapes, forward.
        times: returns the median seconds of every candidate that runs on a case.
    """
    median_us, rule_us = {}, {}
    best: dict[str, Sizes] = {}
    for what, candidates in _candidates(members, on_gpu).items():
        cases = [
            dataclasses.replace(member, backward=what != "forward" and not member.decodes)
            for member in members
            if not (what == "backward" and member.decodes)
        ]
        rules = {c.task: GpuSizes() if on_gpu else devices.rule(*c.lengths) for c in cases}
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


def _candidates(members: list[Case], on_gpu: bool) -> dict[str, list[Any]]:
    """By what is timed; on a TPU both passes share their tiles."""
    if on_gpu:
        return devices.gpu_candidates(HEAD_DIM)
    of_each = [set(devices.tpu_candidates(*case.lengths)) for case in members]
    return {"both": sorted(set.intersection(*of_each), key=dataclasses.astuple)}


def _joined(best: dict[str, Any]) -> Sizes | None:
    """Returns the forward tiles of the one and the backward tiles of the other."""
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
        except Exception as error:  # too much memory, mostly
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
    """Returns the table with these choices for this device, those of others as they were."""
    of_device = dict(table.get(device, {}))
    entries = dict(of_device.get(str(head_dim), {}))
    for choice in choices:
        entries.pop(choice.bucket, None)
        if choice.sizes is not None:
            entry = dataclasses.asdict(choice)
            entries[entry.pop("bucket")] = entry | {"jax": jax.__version__, **commit()}
    return table | {device: of_device | {str(head_dim): dict(sorted(entries.items()))}}


def changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns a line for every entry whose sizes are others than before."""

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
