# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: run them separately with `pytest tests/devices/gpu`."""

import jax
import pytest


def pytest_addoption(parser):
    parser.addoption("--half", choices=("1", "2"), help="Runs every other test, from this on.")


def pytest_collection_modifyitems(config, items):
    if half := config.getoption("half", None):
        items[:] = items[int(half) - 1 :: 2]


@pytest.fixture(scope="session", autouse=True)
def gpu() -> jax.Device:
    """The first GPU; skips without one, or together with other tests, which use the CPU."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip(
            "no GPU in use: on a machine that has one, run `pytest tests/devices/gpu` by itself"
        )
