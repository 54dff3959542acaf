# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of full size, with a tiny model: every part runs, and is not run twice."""

import json
import os
import subprocess
import sys

import pytest

from sparse_lavida_jax.bench import table

# Fixed names, since the module's flags have names that other benchmarks use too.
PARTS = {
    "stand_in", "convert", "verify", "export", "int8", "load_whole", "load_image", "load_int8",
    "generate", "edit", "ask", "ground", "inpaint", "presets_image", "presets_edit",
    "presets_text", "lora", "branch",
}  # fmt: skip
FULL_DISK = """
import collections, shutil
from absl import app
from sparse_lavida_jax.bench import rehearsal
shutil.disk_usage = lambda _: collections.namedtuple("Usage", "free")(40_000_000_000)
app.run(rehearsal.main)
"""


@pytest.fixture
def run(tmp_path):
    def done(*words, program=("-m", "sparse_lavida_jax.bench.rehearsal")):
        return subprocess.run(
            [sys.executable, *program, *words],
            capture_output=True, text=True, check=False, env=os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_backend_optimization_level=0",  # quick to compile
                "SPARSE_LAVIDA_RESULTS": str(tmp_path / "results"),
            },
        )  # fmt: skip

    return done


@pytest.mark.slow
def test_every_part_runs_once(run, tmp_path):
    words = ("--tiny", f"--scratch={tmp_path / 'scratch'}")
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(path.read_text()) for path in (tmp_path / "results").rglob("*.json")]
    assert {row["part"] for row in found} == PARTS
    rows = {row["id"].removeprefix("tiny/layers4/"): row for row in found}
    for row in found:
        assert (row["size"], row["layers"]) == ("tiny", 4)
        assert row["median_s"] > 0 and row["peak_host_memory_bytes"] > 0
        assert all(row["checks"].values()), row
    assert rows["export"]["checks"]["identical"] and not rows["export"]["different"]
    for name in ("load_whole", "load_image", "load_int8"):
        assert rows[name]["bytes"]["parameters"] == rows[name]["expected_bytes"]["total"]
    for task in ("generate", "edit", "ask", "ground", "inpaint"):
        assert rows[task]["checks"]["the same again"] and rows[task]["quantize"] == "w8a8"
        assert rows[task]["flops"]["useful"] > 0 and rows[task]["tokens"]["useful"] > 0
    assert rows["generate"]["checks"]["cancelled"] and rows["ask"]["checks"]["cancelled"]
    for kind, others in (("image", 9), ("edit", 1), ("text", 2)):
        own = {name for name in rows if name.startswith(f"presets_{kind}/")}
        assert len(own) == others + 1
        assert len({rows[name]["run"] for name in own}) == 1
        sparse = rows[f"presets_{kind}/sparse"]
        assert sparse["steps_timed"] == sparse["steps"] or kind != "image"
    shown = table.table("rehearsal_presets", found)
    assert "| t2i32 | dense_lean |" in shown and "| reasoning |" in shown
    assert "| lora |" in table.table("rehearsal", found)

    # The source is gone, and nothing is done again; parts that are asked for are.
    assert not (tmp_path / "scratch" / "released").exists()
    again = run(*words)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("its rows are there") == len(PARTS)
    third = run(*words, "--parts=verify", "--again")
    assert "its rows are there" not in third.stdout and third.returncode == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--scratch=FOLDER is needed"),
        (["--layers=3"], "--layers=3 is odd"),
        (["--parts=verify,paint"], "there is no part 'paint': stand_in, convert,"),
        (["--tiny", "--parts=verify"], "not as it should be: verify."),
    ],
)
def test_mistakes_are_told_in_a_sentence(run, tmp_path, words, told):
    done = run(*words, *([f"--scratch={tmp_path}"] if words else []))
    assert done.returncode == 1
    assert told in done.stderr and "Traceback" not in done.stderr
    if "--tiny" in words:
        assert "is not there: run --parts=stand_in,convert first." in done.stdout


def test_a_full_disk_is_told_before_anything_is_written(run, tmp_path):
    done = run(f"--scratch={tmp_path}", program=("-c", FULL_DISK))
    assert done.returncode == 1
    assert "GB, of which 0.0 are there, and only 40.0 GB are free." in done.stderr
    assert not (tmp_path / "released").exists()
