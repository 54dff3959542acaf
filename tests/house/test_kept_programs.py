# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept between runs of the tests: whole ones, and not too many."""

import os
import zlib

import kept_programs
from jax._src import compilation_cache

PROGRAM = compilation_cache.compress_executable(os.urandom(1000))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_whole_programs_are_kept_for_the_next_run(tmp_path):
    first, second, kept = (tmp_path / name for name in ("first", "second", "kept"))
    for folder in (first, second):
        folder.mkdir()
    (first / "whole-cache").write_bytes(PROGRAM)
    (first / "half-cache").write_bytes(PROGRAM[:500])
    (first / "foreign-cache").write_bytes(zlib.compress(b"x")[:-1])
    (first / "empty-cache").touch()
    (first / "settings.json").touch()
    kept_programs.keep(kept, first)
    assert names(kept) == ["whole-cache"]
    kept_programs.take(kept, second)
    assert (second / "whole-cache").read_bytes() == PROGRAM


def test_the_least_recently_used_go_first(tmp_path):
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    for i in range(4):
        (run / f"{i}-cache").write_bytes(PROGRAM)
    kept_programs.keep(kept, run)
    for i in range(4):
        os.utime(kept / f"{i}-cache", (i, i))
    kept_programs.keep(kept, kept, most=2 * len(PROGRAM))
    assert names(kept) == ["2-cache", "3-cache"]
