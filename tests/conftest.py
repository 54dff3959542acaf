# SPDX-License-Identifier: Apache-2.0
"""Markers by folder, eight CPU devices, fast compilation shared by all tests, no deadlines."""

import os
import pathlib
import shutil
import tempfile

import hypothesis
import jax
import kept_programs
import pytest

TESTS = pathlib.Path(__file__).parent
CHECKOUT = TESTS.parent
FOLDERS = {path.parent.name for path in TESTS.rglob("test_*.py")}
MOST_MAPS = 20_000
KEEPING = ("test_programs", "test_warmup", "test_warm_start")
# The suite spends more time compiling than computing; these flags cut compilation to a fifth.
FAST_COMPILATION = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):
    FAST_COMPILATION.append("--xla_cpu_use_fusion_emitters=false")

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("ci")


def pytest_configure(config):
    for folder in sorted(FOLDERS):
        config.addinivalue_line("markers", f"{folder}: the tests in a folder of this name")
    config.addinivalue_line("markers", "slow: run with SLOW_TESTS=1, as `.ci/run --full` does")
    folders = {part for argument in config.args for part in pathlib.Path(argument).parts}
    if "gpu" not in folders:
        jax.config.update("jax_platforms", "cpu")
    if not folders & {"gpu", "gpu_aot", "tpu_aot"}:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_COMPILATION])
    jax.config.update("jax_num_cpu_devices", 8)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # Compiled programs are shared by the workers and commands of this run, and kept for the
        # next one.
        folder, kept = tempfile.mkdtemp(prefix="sparse-lavida-cache-"), kept_programs.folder()
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            kept_programs.take(kept, pathlib.Path(folder))
            config.add_cleanup(lambda: kept_programs.keep(kept, pathlib.Path(folder)))
        os.environ["XDG_CACHE_HOME"] = folder
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        # Most programs are tiny: together they take longer to compile than the large ones.
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        # The keys of programs would hold the name of this run's folder.
        os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")
        # With a limit, jax scans the whole folder at every write.
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update(
        "jax_persistent_cache_enable_xla_caches",
        os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"],
    )
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs",
        float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]),
    )
    jax.config.update("jax_numpy_rank_promotion", "raise")
    from sparse_lavida_jax.programs import jax_settings

    jax_settings.DEFAULTS["jax_numpy_rank_promotion"] = "raise"  # results do not depend on it


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in FOLDERS:
            item.add_marker(getattr(pytest.mark, item.path.parent.name))
        if item.get_closest_marker("slow") and not os.environ.get("SLOW_TESTS"):
            item.add_marker(pytest.mark.skip(reason="takes long: SLOW_TESTS=1 pytest runs it"))


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Compiled programs use memory maps, and XLA aborts when a process runs out of them.

    Linux allows 65,530. Dropping the programs of finished modules frees theirs.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        from sparse_lavida_jax.programs import persistent_jit

        persistent_jit.forget()


@pytest.fixture(autouse=True)
def programs_of_commands_end(request, monkeypatch):
    """What a command in this process says about keeping and making programs ends with its test.

    Only tests of executables keep any: the others find their programs in jax's cache.
    """
    from sparse_lavida_jax.programs import executables, side_by_side

    if request.path.stem not in KEEPING:
        monkeypatch.setattr(executables, "keep_in", lambda _: None)
    yield
    executables._folder = None
    side_by_side.make_ahead(None)


@pytest.fixture(scope="session")
def every_task(tmp_path_factory) -> pathlib.Path:
    """The folder of a tiny model that says it learned every task; tests must not change it."""
    import stand_ins

    return stand_ins.model_of_every_task(tmp_path_factory.mktemp("every_task") / "tiny")


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> pathlib.Path:
    """A model folder, converted from a tiny released one; tests must not change it."""
    import torch_folder

    return torch_folder.convert(tmp_path_factory.mktemp("converted"))


@pytest.fixture(scope="session")
def golden_dir() -> pathlib.Path:
    """The recorded cases of the released model: $GOLDEN_DIR, or a folder next to the checkout."""
    folder = pathlib.Path(os.environ.get("GOLDEN_DIR", CHECKOUT.parent / "shared" / "golden"))
    if not folder.is_dir():
        pytest.skip(f"no recorded cases in {folder}: set GOLDEN_DIR to the folder that holds them")
    return folder
