# SPDX-License-Identifier: Apache-2.0
"""The settings and fixtures of all tests, and their shared modules."""

import pathlib
import sys

TESTS = pathlib.Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from tests.conftest import *  # noqa: E402, F403
