# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept for the next process, found by what they depend on, and replaced."""

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import lru_cache

from sparse_lavida_jax.programs import compiling, executables, folder, side_by_side
from sparse_lavida_jax.programs import persistent_jit as jit_module
from sparse_lavida_jax.programs.persistent_jit import Call, finish, make, persistent_jit
from sparse_lavida_jax.programs.program_arguments import Types

# ---------------------------------------------------------------------------------------------
# jax's cache.


@pytest.fixture
def updated(monkeypatch):
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_compiled_programs_are_kept_in_the_users_cache(updated, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder.keep_programs()
    assert updated == {
        "jax_compilation_cache_dir": str(tmp_path / "sparse-lavida-jax"),
        "jax_compilation_cache_max_size": folder.MOST_BYTES,
    }


def test_a_folder_that_is_asked_for_stays(updated, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    folder.keep_programs()
    assert updated == {"jax_compilation_cache_max_size": folder.MOST_BYTES}


def test_a_limit_that_was_asked_for_stays(updated, monkeypatch, tmp_path):
    (tmp_path / "jit_f-1-cache").write_bytes(b"of no limit")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")
    folder.keep_programs(tmp_path)
    assert updated == {"jax_compilation_cache_dir": str(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["jit_f-1-cache"]


def test_programs_of_which_one_file_is_missing_do_not_stop_others_from_being_kept(
    updated, tmp_path
):
    """Processes without a limit leave such programs, and so do killed ones."""
    (tmp_path / "jit_f-1-cache").write_bytes(b"a program")
    (tmp_path / "jit_g-2-atime").write_bytes(bytes(8))
    limited = lru_cache.LRUCache(str(tmp_path), max_size=1000)
    with contextlib.suppress(FileNotFoundError):  # which jax 0.12 no longer raises
        limited.put("jit_h-3", b"another")
    folder.keep_programs(tmp_path)
    limited.put("jit_h-3", b"another")
    assert (limited.get("jit_f-1"), limited.get("jit_h-3")) == (b"a program", b"another")
    assert not (tmp_path / "jit_g-2-atime").exists()


@pytest.mark.slow
def test_no_alarm_about_slow_compilation_reaches_users():
    """Folding a constant for more than a second sounds the alarm sooner than a slow program."""
    command = """
import sys, jax, jax.numpy as jnp
from sparse_lavida_jax.programs import folder
def compile_slowly(rows):
    def fold(x):
        return x + jax.lax.reduce_window(
            jnp.ones((rows, 1024)), 0.0, jax.lax.add, (1, 512), (1, 1), "SAME"
        )
    jax.jit(fold).lower(1.0).compile()
compile_slowly(16)
folder.silence_alarm()
print("silent from here on", file=sys.stderr, flush=True)
compile_slowly(17)
try:
    jax.jit(lambda x: x, compiler_options={"xla_no_such_option": 1})(1.0)
except Exception as error:
    print(error, file=sys.stderr)
"""
    environment = {name: x for name, x in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=environment | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True, text=True,
    )  # fmt: skip
    before, _, after = done.stderr.partition("silent from here on")
    assert "slow_operation_alarm" in before and "file a bug" in before
    assert "alarm" not in after and "xla_no_such_option" in after  # true errors are raised


def test_the_log_of_xla_is_silent_only_while_something_is_compiled(monkeypatch):
    levels = []
    monkeypatch.setattr(folder.utils, "absl_set_min_log_level", levels.append)
    monkeypatch.setattr(folder.compiler, "backend_compile_and_load", None)

    def failing():
        assert levels[-1] == folder.FATAL
        raise RuntimeError

    monkeypatch.setattr(folder, "_compile", failing)
    folder.silence_alarm()
    for usual, set_to in (("1", [3, 1]), ("2", [3, 2]), ("0", [])):
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", usual)
        levels[:] = [] if set_to else [folder.FATAL]
        with pytest.raises(RuntimeError):
            folder.compiler.backend_compile_and_load()
        assert levels == (set_to or [folder.FATAL])


# ---------------------------------------------------------------------------------------------
# Executables.


@pytest.fixture
def place(tmp_path):
    executables.keep_in(tmp_path / "executables")
    return tmp_path / "executables"


def a_step():
    """A function that this process has not compiled."""

    @persistent_jit(static=("power",), donate=("state",))
    def step(model, state, *, number, power):
        def body(_, x):
            return {"key": x["key"], "value": jnp.sin(x["value"] @ model["w"]) ** power}

        return jax.lax.fori_loop(0, number, body, state)

    return step


def arguments():
    model = {"unused": jnp.ones(3), "w": jnp.arange(16.0).reshape(4, 4) / 16}
    return model, {"key": jax.random.key(3), "value": jnp.ones((2, 4))}


def result(step, power=2):
    made = step(*arguments(), number=np.int32(3), power=power)
    return np.asarray(made["value"]).tolist(), jax.random.key_data(made["key"]).tolist()


@pytest.fixture
def traced():
    """Functions that are traced, lowered or compiled."""
    seen = []

    def note(name, _, **of):
        if name.startswith("/jax/core/compile/") and "step" in str(of.get("fun_name")):
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


def test_a_kept_program_is_loaded_without_being_traced(place, traced):
    expected = result(a_step())
    assert len([*place.iterdir()]) == 1 and len(traced) == 3
    del traced[:]
    assert result(a_step()) == expected
    assert not traced


def test_forgotten_programs_are_freed_at_once_although_they_are_kept(place):
    """Otherwise a process gets more memory maps than it may have (`memory_maps`)."""
    client = jax.devices()[0].client
    gc.collect()
    gc.disable()
    try:
        before = len(client.live_executables())
        expected = result(a_step())
        assert len(client.live_executables()) > before
        jit_module.forget()
        assert len(client.live_executables()) <= before
    finally:
        gc.enable()
    assert result(a_step()) == expected


def test_a_program_of_jaxs_cache_is_compiled_anew_so_that_it_can_be_kept(tmp_path):
    """On a CPU, what jax loads from its cache can be serialised only in part."""
    command = f"""
import sys
import jax
from sparse_lavida_jax.programs import folder
from sparse_lavida_jax.programs.persistent_jit import persistent_jit
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
folder.keep_programs({str(tmp_path)!r})
rows = jax.numpy.ones((64, 64))
print(persistent_jit()(lambda x: jax.numpy.tanh(x @ x).sum(axis=0) * 3)(rows).sum())
"""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("JAX_")
    } | {"JAX_PLATFORMS": "cpu"}
    found, place = [], tmp_path / "executables"
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", command], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
        if len(found) == 1:  # as after an upgrade of this package, which finds other files
            for path in place.iterdir():
                path.unlink()
    assert len({*found}) == 1 and [*place.iterdir()]


def test_a_change_of_what_a_program_depends_on_makes_another_one(place):
    plain = result(a_step())
    assert result(a_step(), power=3) != plain
    with jax.default_matmul_precision("highest"):  # a setting of this thread alone
        result(a_step())
    assert len([*place.iterdir()]) == 3


def test_programs_depend_on_code_and_tiles_and_not_on_rows_of_benchmarks():
    names = {path.relative_to(jit_module.PACKAGE).as_posix() for path in jit_module._sources()}
    assert {"sample.py", "models/vq.py", "kernels/tile_sizes.json"} <= names
    assert not [name for name in names if "results/" in name]


@pytest.mark.parametrize("damage", [
    lambda whole: whole[:-100], lambda whole: b"", lambda whole: bytes(len(whole)),
    lambda whole: executables.hashlib.sha256(b"no pickle").digest() + b"no pickle",
    lambda whole: (
        executables.hashlib.sha256(foreign := pickle.dumps((kept_types(), b"foreign"))).digest()
        + foreign
    ),
])  # fmt: skip
def test_damaged_and_foreign_files_are_compiled_again_and_replaced(place, traced, damage):
    expected = result(a_step())
    (path,) = place.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert result(a_step()) == expected
    del traced[:]
    assert len(path.read_bytes()) > 1000
    assert result(a_step()) == expected and not traced


def kept_types():
    shapes = jax.eval_shape(lambda: arguments()[1])
    leaves, structure = jax.tree.flatten(shapes)
    return Types(leaves, structure)


def test_a_folder_that_others_may_write_to_is_not_read(place, traced, caplog):
    expected = result(a_step())
    (path,) = place.iterdir()
    before = path.read_bytes()
    executables._is_private.cache_clear()
    place.chmod(0o770)
    del traced[:]
    assert result(a_step()) == expected and traced
    assert path.read_bytes() == before
    assert caplog.text.count("others may write there") == 1
    place.chmod(0o700)
    executables._is_private.cache_clear()


def test_a_link_or_a_pipe_in_the_folder_is_not_opened(place, tmp_path):
    result(a_step())
    (path,) = place.iterdir()
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert executables.read(path.name) is None
    path.unlink()
    os.mkfifo(path)
    assert executables.read(path.name) is None


def test_the_files_used_longest_ago_are_deleted(place, monkeypatch):
    monkeypatch.setattr(executables, "MOST_BYTES", 250)
    assert executables.are_kept()
    for number, name in enumerate(["a", "b", "c"]):
        executables.write(name, bytes(50))
        os.utime(place / name, (number, number))
    assert executables.read("a") == bytes(50)  # and is used now
    executables.write("d", bytes(50))
    assert {path.name for path in place.iterdir()} == {"a", "c", "d"}


def test_an_empty_name_of_the_folder_keeps_nothing(place, tmp_path, monkeypatch):
    before = jax.config.jax_enable_compilation_cache
    folder.keep_programs("")
    try:
        assert not executables.are_kept() and not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


# ---------------------------------------------------------------------------------------------
# Side by side.


def test_calls_are_made_from_types_alone_and_then_run(traced):
    side_by_side.make_ahead(True)
    first, second = a_step(), a_step()

    def calls(power):
        model, state = arguments()
        more = {"number": np.int32(3), "power": power}
        state = yield Call(first, (model, state), more)
        return (yield Call(second, (model, state), more))

    make(calls(2), 2)
    del traced[:]
    made = finish(calls(2), lambda call: call())
    assert not traced
    again = first(*arguments(), number=np.int32(6), power=2)
    np.testing.assert_array_equal(made["value"], again["value"])


def test_another_device_that_was_chosen_is_used():
    side_by_side.make_ahead(True)
    step, other = a_step(), jax.devices()[1]
    model = jax.device_put(arguments()[0], other)
    with jax.default_device(other):
        made = step(model, arguments()[1], number=np.int32(3), power=2)
    held = step(model, jax.device_put(arguments()[1], other), number=np.int32(3), power=2)
    for result_of in (made, held):
        assert result_of["value"].devices() == {other}
    assert not step.in_memory()


def test_over_a_mesh_of_tpus_a_program_has_options_of_its_own_and_as_a_part_none(monkeypatch):
    """`jax.jit` refuses the options of a program that is part of another."""
    monkeypatch.setattr(jit_module, "OVER_TPUS", {"xla_llvm_disable_expensive_passes": True})
    double, used = persistent_jit()(lambda x: 2 * x), []
    with_options = double.over_tpus
    monkeypatch.setattr(double, "over_tpus", lambda *args: used.append(1) or with_options(*args))
    x = jnp.arange(4)

    def results():
        return [double(x), jax.jit(lambda x: double(x))(x)]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    with jax.set_mesh(mesh):
        results()
    assert not used
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    results()
    assert not used
    with jax.set_mesh(mesh):
        assert all((result == 2 * x).all() for result in results())
    assert used == [1]


def test_shapes_are_kept_and_read_without_tracing(place):
    traced = []

    def shapes(setting):
        def make():
            traced.append(setting)
            return {"x": jnp.zeros((2, 3)), "y": [jnp.ones(4, jnp.int8)]}

        return jit_module.shapes_of(make, setting)

    first = shapes("one")
    assert [leaf.shape for leaf in jax.tree.leaves(first)] == [(2, 3), (4,)]
    assert first == shapes("one") == shapes("two")
    assert traced == ["one", "two"]
    (place / os.listdir(place)[0]).write_bytes(b"damaged")
    assert shapes("one") == shapes("two") == first
    assert len(traced) == 3


def test_seconds_of_compiling_are_counted_once_and_from_when_they_are_asked_for(monkeypatch):
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.7), (5.0, 6.0)]  # of two threads
    monkeypatch.setattr(compiling, "_spans", spans)
    assert compiling.seconds(since=0.0) == 4.0
    assert compiling.seconds(since=2.5) == 1.5
    assert compiling.seconds(since=9.0) == 0.0


def test_what_jax_compiles_is_noted():
    begin = time.monotonic()
    jax.jit(lambda x: x @ x + 5).lower(jnp.ones((3, 3))).compile()
    took = time.monotonic() - begin
    assert 0 < compiling.seconds(begin) <= took
    assert compiling.seconds(time.monotonic()) == 0


def test_an_error_is_raised_by_the_call():
    side_by_side.make_ahead(True)

    @persistent_jit()
    def wrong(x):
        return jax.pure_callback(lambda _: 1 / 0, jax.ShapeDtypeStruct((), "float32"), x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="division"):
        jax.block_until_ready(wrong(jnp.ones(())))


def test_an_interrupt_ends_the_wait(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side.runtime, "check_interrupt", interrupted)
    side_by_side.make_ahead(True)
    with pytest.raises(KeyboardInterrupt):
        result(a_step())


def test_progress_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(side_by_side, "QUIET_S", 0.0)
    done = side_by_side.start(lambda: None)
    side_by_side.wait([done])
    with side_by_side.ProgressLine(2) as progress:
        progress.show([done])
        progress.show([done, done])
    assert capsys.readouterr().err == "compiling: 2 programs, 0 s\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with side_by_side.ProgressLine(2) as progress:
        progress.show([done])
    lines = []
    with side_by_side.progress_shown(lines.append), side_by_side.ProgressLine(2) as in_bar:
        in_bar.show([done])
        in_bar.show([done])
    assert lines == ["compiling: program 2 of 2, 0 s"]
    shown, last = capsys.readouterr().err.rsplit("\r", 1)
    assert shown == "\rcompiling: program 2 of 2, 0 s"
    assert last.rstrip() == "compiling: 2 programs, 0 s" and len(last) == len(shown)
