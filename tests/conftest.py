# SPDX-License-Identifier: Apache-2.0
"""Markers by folder, eight CPU devices, no deadlines, strict shapes."""

import os
import pathlib
import tempfile

import hypothesis
import jax
import pytest

FOLDERS = ("unit", "property", "parity", "gpu", "gpu_aot", "tpu_aot", "e2e")
CHECKOUT = pathlib.Path(__file__).parents[1]
MOST_MAPS = 20_000

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("ci")


def pytest_configure(config):
    for folder in FOLDERS:
        config.addinivalue_line("markers", f"{folder}: the tests in tests/{folder}")
    config.addinivalue_line("markers", "slow: run with SLOW_TESTS=1, as `.ci/run --full` does")
    paths = [pathlib.Path(argument.split("::")[0]) for argument in config.args]
    if not any("gpu" in path.parts for path in paths):
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    # Programs that the command line keeps go where nobody else looks for them.
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="sparse-lavida-cache-")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(getattr(pytest.mark, item.path.parent.name))
        if item.get_closest_marker("slow") and not os.environ.get("SLOW_TESTS"):
            item.add_marker(pytest.mark.skip(reason="takes long: SLOW_TESTS=1 pytest runs it"))


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Compiled programs hold memory maps, and XLA aborts when a process has no more of them.

    Linux grants 65,530. Dropping the programs of finished modules gives theirs back.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def golden_dir() -> pathlib.Path:
    """The recorded cases of the released model: $GOLDEN_DIR, or beside the checkout."""
    folder = pathlib.Path(os.environ.get("GOLDEN_DIR", CHECKOUT.parent / "shared" / "golden"))
    if not folder.is_dir():
        pytest.skip(f"no recorded cases in {folder}: set GOLDEN_DIR to the folder that holds them")
    return folder
