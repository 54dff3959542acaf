# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: run them separately with `pytest tests/gpu`."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu() -> jax.Device:
    """The first GPU; skips without one, or together with other tests, which use the CPU."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("no GPU in use: on a machine that has one, run `pytest tests/gpu` by itself")
