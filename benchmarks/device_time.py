# SPDX-License-Identifier: Apache-2.0
"""Where the device time of a request goes, by kind of kernel, as jax's profiler reports it."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import measurements, requests
from benchmarks.suites import RequestCase

SUITE = "profile"
LONGEST = 12  # kernels by name in a row
# The first kind whose words are in the name of a kernel, or of its instruction in HLO.
KINDS = {
    "attention": "step_causal_attention|fmha|flash",
    "products": "gemm|dot|matmul|cublas|cutlass|nvjet|conv(?!ert)|sm90_x",
    "copies": "copy|memcpy|memset|transpose|concatenate|slice|gather|scatter|pad|broadcast|bitcast",
    "element-wise": "fusion|add|multiply|subtract|divide|exp|tanh|select|convert|compare|reduce"
    "|rsqrt|iota|maximum|minimum|sort|wrapped|threefry",
}
# Instructions whose time is that of others.
WHOLE = re.compile(r"^(while|call|conditional|command_buffer|tuple|thunk)\b", re.IGNORECASE)


def kind_of(name: str) -> str:
    """Returns the kind of a kernel."""
    found = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "other")


def kernels(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns the name and the seconds of every kernel that a function starts on the device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        return [
            kernel
            for path in sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
            for kernel in _kernels(jax.profiler.ProfileData.from_file(str(path)))
        ]


def _kernels(data: Any) -> Iterator[tuple[str, float]]:
    """Yields the kernels in a profile: of streams of devices, or operations of XLA on a CPU."""
    devices = [plane for plane in data.planes if plane.name.startswith("/device:")]
    for plane in devices or data.planes:
        for line in plane.lines:
            if devices and not line.name.startswith(("Stream", "XLA Ops")):
                continue
            for event in line.events:
                operation = dict(event.stats).get("hlo_op") or ""
                if not devices and not operation:
                    continue
                name = event.name
                if operation and kind_of(name) == "other":
                    name = str(operation)
                if not WHOLE.match(name):
                    yield name, event.duration_ns / 1e9


def values_of(found: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Returns the values of a row: seconds and number of kernels by kind, and the longest."""
    seconds, numbers = (dict.fromkeys((*KINDS, "other"), zero) for zero in (0.0, 0))
    names: dict[str, float] = collections.defaultdict(float)
    for name, taken in found:
        kind = kind_of(name)
        seconds[kind] += taken
        numbers[kind] += 1
        names[re.sub(r"[.\d]+$", "", name)] += taken
    return {
        "device_s": {"total": sum(seconds.values()), **seconds},
        "kernels": {"total": len(found), **numbers},
        "longest": [
            {"name": name, "kind": kind_of(name), "seconds": taken}
            for name, taken in sorted(names.items(), key=lambda pair: -pair[1])[:LONGEST]
        ],
    }


def measure(subject: requests.Subject, cases: Sequence[RequestCase]) -> str:
    """Profiles one request of every row, and writes each row; returns the id of the run."""
    bench = measurements.Bench(SUITE)
    for case in cases:
        timed = requests.Timed(subject, case)
        split: dict[str, float] = {}
        found = kernels(lambda timed=timed, split=split: split.update(timed.request(1)))
        row = values_of(found) | {
            "task": case.task,
            "method": case.method,
            "model": subject.settings.name,
            "batch": case.batch,
            "dtype": subject.settings.model.compute_dtype,
            "split_s": split,
            "steps": len(case.timed_steps(subject.settings.model)),
            "random_weights": subject.random_weights,
            "note": "one request while it was profiled, which makes it slower",
        }
        bench.write(case.id, row, name=f"{subject.settings.name}/{case.id}")
    return bench.run
