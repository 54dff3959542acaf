# SPDX-License-Identifier: Apache-2.0
"""Where compiled programs are kept, and whether freed memory is."""

import types

import jax
import pytest

from sparse_lavida_jax import runtime


@pytest.fixture
def updated(monkeypatch):
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    return found


def test_compiled_programs_are_kept_in_the_users_cache(updated, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime.keep_programs()
    assert updated == {
        "jax_compilation_cache_dir": str(tmp_path / "sparse-lavida-jax"),
        "jax_compilation_cache_max_size": runtime.MOST_BYTES,
    }


def test_a_folder_that_is_asked_for_stays(updated, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    runtime.keep_programs()
    assert updated == {}


def test_memory_is_kept_where_the_c_library_can_be_told_to(monkeypatch):
    told = []
    library = types.SimpleNamespace(mallopt=lambda *option: told.append(option))
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(runtime.sys, "platform", "linux")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    runtime.keep_freed_memory()
    assert (runtime.M_MMAP_MAX, 0) in told
    del library.mallopt  # as of musl
    runtime.keep_freed_memory()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    library.mallopt = told.append
    runtime.keep_freed_memory()
    assert len(told) == 2
