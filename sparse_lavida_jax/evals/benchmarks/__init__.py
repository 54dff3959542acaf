# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, a file each; they are found by the names of their files."""

import importlib
import pkgutil
from typing import Any

from sparse_lavida_jax.evals.benchmark import Benchmark
from sparse_lavida_jax.evals.official_files import EvaluationError


def names() -> list[str]:
    """Returns the names of all benchmarks: the files of this folder."""
    return [module.name for module in pkgutil.iter_modules(__path__)]


def find(name: str) -> type[Benchmark]:
    """Returns the class of a benchmark.

    Raises:
        EvaluationError: there is no such benchmark.
    """
    if name not in names():
        raise EvaluationError(f"there is no benchmark {name!r}. There are: {', '.join(names())}.")
    return importlib.import_module(f"{__name__}.{name}").BENCHMARK


def preset(name: str) -> dict[str, Any]:
    """Returns the config for running a benchmark, for `configs/evaluate.py`.

    Raises:
        EvaluationError: no benchmark has a config of this name.
    """
    known = {one: benchmark for benchmark in names() for one in find(benchmark).configs}
    if name not in known:
        raise EvaluationError(f"there is no benchmark {name!r}. There are: {', '.join(known)}.")
    bench = find(known[name])
    return {
        "name": f"eval_{name}",
        "evaluate": {"benchmark": known[name], **bench.configs[name]},
        "sampling": dict(bench.sampled_with),
    }
