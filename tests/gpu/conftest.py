# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: run them by themselves, `pytest tests/gpu`."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu() -> jax.Device:
    """The first GPU; without one, or next to other tests (which stay on the CPU), a skip."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("no GPU in use: on a machine that has one, run `pytest tests/gpu` by itself")
