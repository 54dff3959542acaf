# SPDX-License-Identifier: Apache-2.0
"""Recorded cases by name; a test is skipped with a reason if its case is absent."""

import golden
import jax
import pytest


@pytest.fixture(scope="session")
def case():
    """Returns a recorded case by the name of its folder: `case("B1_t2i")`."""

    def read(name: str) -> golden.Case:
        if reason := golden.why_absent(name):
            pytest.skip(reason)
        return golden.case(name)

    return read


@pytest.fixture(autouse=True)
def _whole_products():
    with jax.default_matmul_precision("highest"):
        yield
