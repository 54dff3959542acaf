# SPDX-License-Identifier: Apache-2.0
"""What is installed, which devices there are, which models fit them, and whether kernels work."""

import contextlib
import dataclasses
import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Collection
from typing import Any

import jax

from sparse_lavida_jax import __version__, runtime
from sparse_lavida_jax.checkpoints import model_folder, room
from sparse_lavida_jax.data import markdown
from sparse_lavida_jax.evals import circumstances
from sparse_lavida_jax.kernels import devices

PACKAGES = ("jax", "jaxlib", "flax", "optax", "tokenizers", "pillow", "numpy")
# Models that people may want to run, with the size of their parameters in bytes (docs/gpus.md).
OTHER_MODELS = {
    "LaViDa-O, converted": 22_830_000_000,
    "LaViDa-O, drawing alone (Python: task='image')": 15_750_000_000,
    "LaViDa-O in 8 bits (export --dtype=int8)": 13_440_000_000,
    "LaViDa-O in 8 bits, drawing alone": 9_380_000_000,
}
DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# By version of CUDA: the oldest driver (docs.nvidia.com/deploy/cuda-compatibility), and the extra.
DRIVERS = {"13": (580, "gpu"), "12": (525, "gpu-cuda12")}
SECONDS = 10  # to wait for nvidia-smi


def report() -> dict[str, Any]:
    """Returns versions, devices with their memory in bytes, models, and what fits, for `json`."""
    devices = [
        {
            "kind": device.device_kind,
            "platform": device.platform,
            "memory": runtime.memory_of(device),
        }
        for device in jax.devices()
    ]
    sizes = {name: _size(name) for name in model_folder.bundled_models()}
    most = max(device["memory"] for device in devices)
    return {
        "version": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: circumstances.version(name) or "missing" for name in PACKAGES},
        "devices": devices,
        "driver": driver(),
        "cuda": [cuda for cuda in DRIVERS if circumstances.version(f"jax-cuda{cuda}-plugin")],
        "disk_free": shutil.disk_usage(".").free,
        "bundled_models": sizes,
        "fits": {name: room.SPARE * size <= most for name, size in (sizes | OTHER_MODELS).items()},
    }


def text(found: dict[str, Any]) -> str:
    """Returns a readable report."""
    bundled = (f"{name} ({size / 1e6:.0f} MB)" for name, size in found["bundled_models"].items())
    lines = [
        f"sparse-lavida-jax {found['version']}, Python {found['python']}, {found['system']}",
        ", ".join(f"{name} {version}" for name, version in found["packages"].items()),
        f"{found['cores']} cores, {found['disk_free'] / 1e9:.1f} GB of disk free",
    ]
    for i, device in enumerate(found["devices"]):
        memory = f"{device['memory'] / 1e9:.1f} GB"
        lines.append(f"device {i}: {device['kind']} ({device['platform']}), {memory}")
    lines += filter(None, [driver_text(found["driver"], found["cuda"])])
    lines.append(f"bundled models: {', '.join(bundled) or 'none'}")
    for name, fits in found["fits"].items():
        lines.append(f"{'fits' if fits else 'does not fit'} one device: {name}")
    return "\n".join(lines)


def driver() -> str:
    """Returns the version of the NVIDIA driver without using a device; "": there is none."""
    with contextlib.suppress(OSError):
        if loaded := re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", DRIVER.read_text()):
            return loaded[1]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]  # as in WSL
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    reported = re.match(r"\d+(\.\d+)+", done.stdout)
    return reported[0] if reported else ""


def driver_text(version: str, installed: Collection[str]) -> str:
    """Returns a line with the driver and the package that suits it; "" if there is no driver.

    Args:
        installed: versions of CUDA that jax has a plugin for.
    """
    if not version:
        return ""
    major = int(version.partition(".")[0])
    able = next((cuda for cuda, (least, _) in DRIVERS.items() if major >= least), "")
    line = f"NVIDIA driver {version}"
    install = f"pip install -e '.[{DRIVERS[able][1]}]'" if able else ""
    if not installed:
        return f"{line}, but jax is installed without GPU support: {install}" if able else line
    cuda = max(installed)
    least = DRIVERS[cuda][0]
    if major >= least:
        return f"{line}, new enough for CUDA {cuda}"
    names = f"jax-cuda{cuda}-plugin jax-cuda{cuda}-pjrt"
    instead = able and f", or take CUDA {able}: pip uninstall {names}; {install}"
    return f"{line} is too old for CUDA {cuda}, which needs {least}: update it{instead}"


def kernels() -> dict[str, Any]:
    """Checks the attention kernel of this machine, ignoring cached results; returns the findings.

    No device may have been used before.
    """
    from sparse_lavida_jax.kernels import admission  # other commands do not need it

    versions = {"version": __version__, "jax": jax.__version__}
    return versions | dataclasses.asdict(admission.check(devices.accelerators()))


def kernels_text(found: dict[str, Any]) -> str:
    """Returns the findings about the kernel as text, to read or to report."""
    ran = f"sparse-lavida-jax {found['version']}, jax {found['jax']}"
    if found["kernel"] is None:
        why = found["why"] or "there is no kernel for it, and nothing to check"
        return f"{ran}, {found['device'] or 'no device'}: {why}"
    passed_over = found["passed_over"] and f", since {found['passed_over']}"
    verdict = found["why"] or f"{found['kernel']} is admitted{passed_over}"
    if not found["why"] and found["step_why"]:
        verdict += f"; {found['step_why']}"
    rows = []
    for check in found["checks"]:
        times = check.get("kernel_us"), check.get("blocks_us", check.get("plain_us"))
        numbers = (None if x is None else f"{x:.3g}" for x in (check.get("off"), *times))
        rows.append(
            [check["check"], {True: "yes", False: "no"}.get(check.get("same_bits")), *numbers]
        )
    columns = ("check", "same bits twice", "off by", "kernel, us", "without, us")
    return f"{ran}, {found['device']}: {verdict}\n\n{markdown.table(columns, rows)}"


def _size(name: str) -> int:
    files = model_folder.find_model(name).rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())
