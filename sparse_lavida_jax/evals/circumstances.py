# SPDX-License-Identifier: Apache-2.0
"""What results were made with: time, device, software and the commit of the code."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

RESULTS = "sparse_lavida_jax/bench/results"  # rows of measurements, which are no code


def circumstances() -> dict[str, Any]:
    """Returns when, on what device and with what software this process runs."""
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
    """Returns the kind and number of devices, and what the host has."""
    first = jax.devices()[0]
    return {
        "kind": first.device_kind,
        "count": jax.device_count(),
        "cores": getattr(first, "core_count", None),
        "memory_bytes": (first.memory_stats() or {}).get("bytes_limit"),
        "host_cores": os.cpu_count(),
    }


def version(package: str) -> str | None:
    """Returns the version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> dict[str, Any]:
    """Returns the commit of the code, and whether the code was changed since."""

    def git(*words):
        here = pathlib.Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--short", "--", ":/", f":(top,exclude){RESULTS}")
    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(changed)}
