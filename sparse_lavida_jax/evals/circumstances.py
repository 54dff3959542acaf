# SPDX-License-Identifier: Apache-2.0
"""The conditions of a result: time, device, software and the commit of the code."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

RESULTS = "benchmarks/results"  # measurements, not code


def circumstances() -> dict[str, Any]:
    """Returns when this process runs, on which device and with which software."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device(),
        "software": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "tokamax": version("tokamax"),
            "torch": version("torch"),
        },
    }


def device() -> dict[str, Any]:
    """Returns the kind and number of devices, and the resources of the host."""
    first = jax.devices()[0]
    return {
        "kind": first.device_kind,
        "count": jax.device_count(),
        "cores": getattr(first, "core_count", None),
        "memory_bytes": (first.memory_stats() or {}).get("bytes_limit"),
        "host_cores": os.cpu_count(),
    }


def version(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> dict[str, Any]:
    """Returns the commit of the code, and whether there are uncommitted changes."""

    def git(*words):
        here = pathlib.Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--short", "--", ":/", f":(top,exclude){RESULTS}")
    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(changed)}
