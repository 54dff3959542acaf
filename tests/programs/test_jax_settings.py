# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on what other code, or the environment, has set in jax."""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import warnings

import jax
import numpy as np
import other_settings
import pytest
import stand_ins
from jax._src import config as jax_config
from jax.sharding import AxisType

from sparse_lavida_jax import SparseLaViDa
from sparse_lavida_jax.programs import jax_settings, persistent_jit, side_by_side
from sparse_lavida_jax.sampling import state

DOCS = pathlib.Path(__file__).parents[2] / "docs/api/variables.md"
WORDS = "three purple crosses"


# ---------------------------------------------------------------------------------------------
# Which settings.


def own_process(command: str, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs Python code in a process with these variables of jax, and no others."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-c", command, *words],
        env=environment | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
    )


def test_the_defaults_are_the_values_of_a_fresh_process():
    command = """
import jax
from sparse_lavida_jax.programs import jax_settings
for name, before in jax.config.values.items():
    with jax_settings.defaults():
        if name in jax_settings.DEFAULTS and jax.config.values[name] != before:
            print(name, before, jax.config.values[name])
"""
    done = own_process(command)
    assert done.returncode == 0, done.stderr
    unlike = [line.split() for line in done.stdout.splitlines()]
    # Guards that are not set allow: a guard of all threads has to be overruled.
    assert all("_guard" in name and rest == ["None", "allow"] for name, *rest in unlike), unlike


def test_every_setting_that_jax_traces_with_is_set():
    """A setting that is new in jax fails here: it is added, or named."""
    harmless = {"jax_hlo_source_file_canonicalization_regex"}
    depends = set()
    for name, setting in jax_config.config_states.items():
        before, value = jax_config.trace_context(), setting.swap_local("another")
        if jax_config.trace_context() != before:
            depends.add(name)
        setting.set_local(value)
    assert "jax_enable_x64" in depends
    assert depends - harmless <= jax_settings.DEFAULTS.keys()


def test_the_documentation_lists_them():
    (row,) = (line for line in DOCS.read_text().splitlines() if "`jax_enable_x64`" in line)
    listed = set(re.findall(r"`((?:jax_|check_vma|eager_)\w*)`", row))
    assert listed == jax_settings.DEFAULTS.keys()


def test_a_value_that_jax_does_not_know_is_one_sentence():
    done = own_process(
        "from sparse_lavida_jax.__main__ import main; exit(main())", JAX_ENABLE_X64="maybe"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("sparse_lavida_jax: jax refuses a variable of its own: ")
    assert done.stderr.count("\n") == 1 and "JAX_ENABLE_X64" in done.stderr


# ---------------------------------------------------------------------------------------------
# The same bits.


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with stand_ins.quick_compilation():
        yield


@pytest.fixture(scope="module")
def folder(_quick, tmp_path_factory):
    return stand_ins.model_of_every_task(tmp_path_factory.mktemp("models") / "tiny")


def results(folder, callback=None) -> list[np.ndarray]:
    """Loads a model, draws, replays, and answers."""
    state._keys.jitted.clear_cache()  # jax finds programs without looking at all settings
    pipe = SparseLaViDa.from_pretrained(folder)
    how = {"temperature": 1.5, "callback": callback}
    drawn = pipe.generate(WORDS, seed=5, layout=False, **how)
    again = pipe.replay(drawn.records[0])
    text = pipe.ask(drawn.pixels[0], "how many crosses are there?", seed=5, **how)
    seen = pipe.preview(drawn.tokens[0])
    return [*drawn.pixels, *again.pixels, *drawn.tokens, *text.tokens, seen]


@pytest.fixture(scope="module")
def usual(folder):
    return results(folder)


@contextlib.contextmanager
def around(mesh):
    """As `with mesh:`, which jax calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mesh:
            yield


def mesh_of(number, kind):
    return jax.make_mesh((number,), ("data",), axis_types=(kind,))


SURROUNDINGS = {
    f"{kind} mesh of {number}": lambda kind=kind, number=number: jax.set_mesh(mesh_of(number, kind))
    for kind in (AxisType.Explicit, AxisType.Auto)
    for number in (1, 4)
} | {
    "with mesh": lambda: around(mesh_of(4, AxisType.Auto)),
    "abstract mesh": lambda: jax.sharding.use_abstract_mesh(
        mesh_of(4, AxisType.Auto).abstract_mesh
    ),
    "unsafe_rbg": lambda: jax.default_prng_impl("unsafe_rbg"),
    "numpy errors": lambda: np.errstate(all="raise"),
    "disable_jit": jax.disable_jit,
    "a guard": lambda: jax.transfer_guard("disallow"),
}
OTHERS = other_settings.values()
LISTED = """
    jax_default_prng_impl jax_threefry_partitionable jax_enable_x64 jax_default_matmul_precision
    jax_default_device jax_numpy_rank_promotion jax_numpy_dtype_promotion jax_random_seed_offset
    jax_high_dynamic_range_gumbel jax_legacy_prng_key jax_debug_infs jax_check_tracer_leaks
    jax_explicit_x64_dtypes jax_no_tracing jax_transfer_guard_host_to_device
""".split()
REST = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS if name not in LISTED]


@pytest.mark.parametrize("name", [*LISTED, *SURROUNDINGS, *REST])
def test_results_are_the_same_bits(folder, usual, name):
    setting = jax_config.config_states.get(name)
    with SURROUNDINGS[name]() if setting is None else setting(OTHERS[name]):
        found = results(folder)
    stand_ins.assert_equal(found, usual)


def test_all_threads_may_have_other_settings_and_callbacks_see_ours(folder, usual):
    """Set as by variables, around a pipeline that is used in a thread, as a server does."""
    seen = []

    def look(_):
        seen.append({name: jax.config.values[name] for name in OTHERS if name in kinds})

    kinds = jax.config.values.keys()
    with jax_settings.defaults():
        look(None)
    known = seen.pop()
    with (
        other_settings.everywhere(**{name: x for name, x in OTHERS.items() if name in kinds}),
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        found = pool.submit(results, folder, look).result()
    assert len(seen) > 3 and all(one == known for one in seen)
    stand_ins.assert_equal(found, usual)


def test_a_program_is_made_once_and_the_same_under_all_settings():
    """Also where no pipeline is around it, and jax itself would find another program's key."""
    side_by_side.make_ahead(True)
    traced = []

    @persistent_jit.persistent_jit()
    def noise(seed):
        traced.append(seed)
        return jax.random.gumbel(jax.random.key(seed), (3,))

    with jax_settings.defaults():
        usual = np.asarray(noise(np.int32(5)))
    for name in ("jax_default_prng_impl", "jax_enable_x64", "jax_random_seed_offset"):
        with jax_config.config_states[name](OTHERS[name]):
            np.testing.assert_array_equal(noise(np.int32(5)), usual)
            with jax_settings.defaults():
                np.testing.assert_array_equal(noise(np.int32(5)), usual)
        noise.forget()
    assert len(traced) <= 6


# ---------------------------------------------------------------------------------------------
# Damaged programs.


COMPILED = """
import sys, jax, numpy as np
from sparse_lavida_jax.programs import folder, persistent_jit
folder.keep_programs(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
for function in (jax.jit, persistent_jit.persistent_jit()):
    print(float(function(lambda x: x * 3 + 1)(np.float32(2))))
    print(any("cache_hits" in name for name in seen))
    seen.clear()
"""


def compiled(folder):
    """Returns what two functions return, and whether jax found their programs; and stderr."""
    done = own_process(COMPILED, str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_a_damaged_program_is_written_anew(tmp_path):
    new, known = ["7.0", "False", "7.0", "False"], ["7.0", "True", "7.0", "False"]
    assert compiled(tmp_path) == (new, "")
    programs = {path: path.stat().st_size for path in tmp_path.glob("*-cache")}
    assert len(programs) > 1
    for number, path in enumerate([*programs, *(tmp_path / "executables").glob("*")]):
        os.truncate(path, 100 * (number % 2))
    assert compiled(tmp_path) == (new, "")
    assert all(path.stat().st_size > 0.9 * size for path, size in programs.items())
    assert compiled(tmp_path) == (known, "")


def test_a_folder_that_cannot_be_written_is_one_sentence():
    returned, said = compiled("/dev/null/programs")
    assert returned == ["7.0", "False", "7.0", "False"]
    assert said.count("\n") == 1 and "compiled programs are not kept in" in said


# ---------------------------------------------------------------------------------------------
# Commands.

VARIABLES = [
    "JAX_ENABLE_X64=1 JAX_DEFAULT_PRNG_IMPL=rbg JAX_DEFAULT_MATMUL_PRECISION=bfloat16",
    "JAX_DISABLE_JIT=1 JAX_THREEFRY_PARTITIONABLE=0 JAX_TRANSFER_GUARD=disallow_explicit",
    "JAX_NUMPY_DTYPE_PROMOTION=strict JAX_DEBUG_INFS=1 JAX_CHECK_TRACER_LEAKS=1",
]


@pytest.mark.slow
def test_commands_draw_and_answer_the_same_under_variables(tmp_path):
    def run(*words, **variables):
        code = "import sys; from sparse_lavida_jax.cli import program; sys.exit(program.main())"
        kept_in = f"--compilation-cache={tmp_path / 'programs'}"
        done = own_process(code, *words, kept_in, **variables)
        assert done.returncode == 0, done.stderr
        return done

    out, again = tmp_path / "out.png", tmp_path / "again.png"
    run("generate", WORDS, "--seed=5", "--temperature=1.5", "--no-layout", f"--out={out}")
    answer = run("ask", str(out), "how many crosses are there?").stdout
    for line in VARIABLES:
        variables = dict(one.split("=") for one in line.split())
        replayed = run("replay", str(out), f"--out={again}", **variables)
        assert again.read_bytes() == out.read_bytes()
        assert "to compile" not in replayed.stderr  # it is found where the first has kept it
        assert run("ask", str(out), "how many crosses are there?", **variables).stdout == answer
