# SPDX-License-Identifier: Apache-2.0
"""The sampling benchmark on a model with random weights, without a checkpoint or a tokenizer."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import suites, table
from sparse_lavida_jax import config

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"

CONFIG = """
import ml_collections

def get_config():
    c = ml_collections.ConfigDict()
    c.name = "small"
    c.model = dict(
        vocab_size=64, text_mask_id=1, end_of_text_id=50, width=32, mlp_hidden=32, num_layers=2,
        dual_tower_layers=0, num_heads=2, head_dim=16, generation_width=16,
        generation_mlp_hidden=16, codebook_size=8, codes_per_token=4, grid_size=4,
        num_registers=2, compute_dtype="bfloat16",
    )
    c.data = dict(source="none", text_block_len=4, max_answer_len=8)
    c.sampling = dict(num_steps=4, text=dict(steps=2), guidance=1.5, layout=False)
    return c
"""
# Rows are written where the test says, not into the results of the project.
PROGRAM = """
import pathlib, sys
from absl import app
from benchmarks import measurements, sampling
measurements.RESULTS = pathlib.Path(sys.argv.pop())
app.run(sampling.main)
"""


@pytest.fixture
def run(tmp_path):
    def done(*words):
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, *words, str(tmp_path / "results")],
            capture_output=True, text=True, check=False, env=os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_backend_optimization_level=0",  # quick to compile
                "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
            },
        )  # fmt: skip

    return done


@pytest.mark.slow
def test_random_weights_are_timed_by_every_preset_that_is_asked_for(run, tmp_path):
    config = tmp_path / "small.py"
    config.write_text(CONFIG)
    done = run(
        f"--config={config}", "--random-weights", "--batch=1", "--runs=5", "--presets=dense,sparse"
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(path.read_text()) for path in (tmp_path / "results").rglob("*.json")]
    assert {(row["task"], row["method"]) for row in rows} == {
        (task, method) for task in ("draw", "text") for method in ("dense", "sparse")
    }
    for row in rows:
        assert row["random_weights"] and len(row["times_s"]) == 5
        assert row["guidance_rows"] == (2 if row["task"] == "draw" else 1)
    passed = {row["method"]: row["tokens"]["useful"] for row in rows if row["task"] == "draw"}
    # Prompt and 16 cells four times; below: prompt once, each step's cells, 2 registers, newest.
    assert passed["dense"] == 4 * (128 + 16)
    assert passed["sparse"] < 128 + 4 * 2 + 2 * 16
    assert "| small, draw, 1, 4 | sparse |" in table.table("sampling", rows)
    assert done.stdout.endswith(f"\n{table.table('sampling_seconds', rows)}\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--config=configs/none.py", "--random-weights"], "there is no config file"),
        (["--config=configs/none.py"], "--config and --random-weights go together"),
        (["--presets=fast", "--checkpoint=nowhere"], "there is no preset 'fast'"),
        (["--presets=fast", "--suite=cpu"], "there is no preset 'fast'"),
        (["--checkpoint=nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_reported_in_a_sentence(run, words, told):
    done = run(*words)
    assert done.returncode == 1
    assert told in done.stderr and "Traceback" not in done.stderr


# The release's structure, 32 layers, at a tiny width and in few steps.
TINY = """
import runpy

def get_config():
    c = runpy.run_path({path!r})["get_config"]()
    c.sampling.update(num_steps=4, text=dict(steps=2))
    return c
"""


@pytest.mark.slow
@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_suite_of_whole_requests_runs_at_the_full_structure(run, tmp_path, suite):
    """From words to pixels or words; existing results are not measured again."""
    path = tmp_path / "tiny.py"
    path.write_text(TINY.format(path=str(CONFIGS / "lavida_o_tiny.py")))
    settings = config.read(path)
    words = (f"--suite={suite}", f"--config={path}", "--random-weights", "--runs=5", "--missing")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    rows = record_rows(tmp_path / "results" / "cpu" / suite)
    assert set(rows) == {case.id for case in suites.cases(suite, settings)}
    assert len({row["run"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["compilations_timed"] == 0
        assert 0 < row["longest_compile_s"] <= row["compile_s"]
        assert len(row["times_s"]) == 5 and row["steps_timed"] <= row["steps"]
        assert row["floor_s"] > 0 and row["calibration"]["copy_gbps"] > 0
        assert row["flops"]["useful"] > 0
        assert row["tokens"]["useful"] <= row["tokens"]["padded"]
        draws = row["task"] != "reasoning"
        assert (row["split_s"]["vq_decode"] > 0) == draws
        assert (row["split_s"]["vq_encode"] > 0) == row["task"].startswith("edit")
    table.table("whole_requests", rows.values())
    if suite == "headline":
        assert run(*words).stdout == ""


def record_rows(folder):
    rows = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    return {row["id"]: row for row in rows}
