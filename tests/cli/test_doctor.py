# SPDX-License-Identifier: Apache-2.0
"""The doctor reads the driver of a GPU from the system, and says if it is too old."""

import subprocess

import pytest

from sparse_lavida_jax.cli import doctor


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.183.01  Release Build  (dvs)",
    ],
)
def test_the_driver_is_read_from_the_system(line, tmp_path, monkeypatch):
    loaded = tmp_path / "version"
    loaded.write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    monkeypatch.setattr(doctor, "DRIVER", loaded)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nvidia-smi is not needed"))
    assert doctor.driver() == "535.183.01"


@pytest.mark.parametrize(
    ("printed", "version"),
    [("580.65.06\n580.65.06\n", "580.65.06"), ("NVIDIA-SMI has failed\n", ""), (None, "")],
)
def test_without_that_file_nvidia_smi_is_asked(printed, version, tmp_path, monkeypatch):
    def run(words, **_):
        if printed is None:
            raise FileNotFoundError(words[0])
        return subprocess.CompletedProcess(words, 0, printed)

    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(subprocess, "run", run)
    assert doctor.driver() == version


@pytest.mark.parametrize(
    ("version", "installed", "line"),
    [
        ("", ["13"], ""),
        ("580.65.06", ["13"], "NVIDIA driver 580.65.06, new enough for CUDA 13"),
        ("535.183.01", ["12"], "NVIDIA driver 535.183.01, new enough for CUDA 12"),
        (
            "535.183.01",
            ["13"],
            "NVIDIA driver 535.183.01 is too old for CUDA 13, which needs 580: update it, or take"
            " CUDA 12: pip uninstall jax-cuda13-plugin jax-cuda13-pjrt; pip install -e"
            " '.[gpu-cuda12]'",
        ),
        (
            "470.82",
            ["12"],
            "NVIDIA driver 470.82 is too old for CUDA 12, which needs 525: update it",
        ),
        (
            "570.1",
            [],
            "NVIDIA driver 570.1, but jax is installed without GPU support: pip install -e"
            " '.[gpu-cuda12]'",
        ),
    ],
)
def test_a_driver_that_is_too_old_is_named_with_what_to_install(version, installed, line):
    assert doctor.driver_text(version, installed) == line


def test_the_line_is_part_of_the_report(monkeypatch):
    monkeypatch.setattr(doctor, "driver", lambda: "535.183.01")
    found = doctor.report() | {"cuda": ["13"]}
    assert "\nNVIDIA driver 535.183.01 is too old for CUDA 13" in doctor.text(found)
